"""Each wrong reuse changes the answer: the rules broken one at a time, in the code under test.

The other half of each test is that the same scenario, unbroken, gives the cold engine's answer; so what turns
the answer is the broken rule. In every scenario the broken system itself sees nothing wrong.
"""

from collections.abc import Callable

import msgspec
import pytest

from kvloop.core import chain, lease
from kvloop.core.chain import Chain, Identity
from kvloop.core.claim import ReadBook
from kvloop.core.lease import Blocks, LeaseTable
from kvloop.sim import leases
from kvloop.sim.engine import Engine
from kvloop.sim.loads import Loads
from kvloop.sim.memory import Memory
from kvloop.sim.pool import BlockPool
from kvloop.sim.request import Hop, Request, Send
from kvloop.wire.control import Claim
from tests.sim.pair import MS, S, World, config, make_profile, pair, tokens

Break = Callable[[pytest.MonkeyPatch], None]
EDITED = tokens(100) + tokens(300, 1)


def cold(prompt: bytes) -> bytes:
    """The answer of engines that have seen nothing before."""
    return pair().turn("cold", prompt)[0]


def differs(world: World, name: str, prompt: bytes) -> bool:
    """Whether the answer is another than a cold engine's; the engine's own mark says the same."""
    said = world.said[name]
    wrong = said != cold(prompt)[: len(said)]
    assert world.finished[name].wrong is wrong
    return wrong


def second_turn(prompt: bytes, salt: str = "") -> bool:
    """A turn with the first turn's handle: is it answered wrongly?"""
    world = pair()
    _, first = world.turn("a", tokens(300))
    world.turn("b", prompt, first.handle, salt=salt)
    return differs(world, "bd", prompt)


def without_proof(patch: pytest.MonkeyPatch) -> None:
    """Everything that the lease has is granted, whatever was asked for."""
    patch.setattr(lease, "matched_tokens", lambda held, wanted: min(held.token_count, wanted.token_count))


def by_length(patch: pytest.MonkeyPatch) -> None:
    """Segments count, and not what is in them: upstream's way."""
    patch.setattr(
        lease, "matched_tokens", lambda held, wanted: min(held.token_count, wanted.token_count) // 64 * 64
    )


def one_segment_more(patch: pytest.MonkeyPatch) -> None:
    """What is proven is rounded up."""
    honest = chain.matched_tokens

    def generous(held: Chain, wanted: Chain) -> int:
        matched = honest(held, wanted)
        return min(matched + 64, held.token_count // 64 * 64) if matched % 64 == 0 and matched else matched

    patch.setattr(lease, "matched_tokens", generous)


def without_salt(patch: pytest.MonkeyPatch) -> None:
    """The tenant is left out of the chain's root."""
    honest = chain.root_digest

    def blind(key: bytes, identity: Identity) -> bytes:
        return honest(key, Identity(identity.model, identity.revision, identity.kv_layout, "", ""))

    patch.setattr(leases, "root_digest", blind)


@pytest.mark.parametrize(
    ("broken", "prompt", "salt"),
    [
        (without_proof, EDITED, ""),
        (without_proof, tokens(400, 1), ""),
        (by_length, EDITED, ""),
        (one_segment_more, EDITED, ""),
        (without_salt, tokens(400), "another tenant"),
    ],
    ids=["no proof", "no proof, other history", "by length", "rounded up", "no tenant"],
)
def test_what_is_not_proven(broken: Break, prompt: bytes, salt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix that was granted without a proof answers from other tokens' KV."""
    assert not second_turn(prompt, salt)
    broken(monkeypatch)
    assert second_turn(prompt, salt)


def slow_read(*, pressure: bool) -> World:
    """A return whose transfer takes 150 ms while decode needs its memory for others."""
    profile = make_profile(blocks=130)
    slow = msgspec.structs.replace(
        profile, transfer=msgspec.structs.replace(profile.transfer, setup_ns=150 * MS)
    )
    prefill = config("p", retains=False, prefix_cache=False)
    world = World(
        Engine(prefill, slow), Engine(config("d", reads=False, prefix_cache=False), make_profile(blocks=130))
    )
    world.check_each_step = False
    _, first = world.turn("a", tokens(300))
    request = Request("bp", world.text(tokens(400)), 1, hop=Hop.PREFILL, handle=first.handle)
    world.submit("p", request)
    world.run(lambda: bool(world.reads) and world.reads[-1].request_id is None)
    if pressure:
        for kind in range(2, 9):
            world.submit(
                "d", Request(str(kind), world.text(tokens(1000, kind)), 4, hop=Hop.ALONE, ends_at=1000)
            )
    world.run(lambda: "bp" in world.finished)
    return world


def taken_from_under_a_claim(patch: pytest.MonkeyPatch) -> None:
    """Live work reclaims a lease that somebody reads."""
    honest = LeaseTable.reclaim

    def heartless(table: LeaseTable, lease_id: str, now_ns: int) -> bool:
        for claim_id in sorted(table._leases[lease_id].claim_ids):
            table.release(claim_id, now_ns)
        return honest(table, lease_id, now_ns)

    patch.setattr(LeaseTable, "reclaim", heartless)
    patch.setattr(LeaseTable, "least_worth", lambda table: next(iter(table._leases), None))


def given_back_at_the_claim(patch: pytest.MonkeyPatch) -> None:
    """A lease's blocks are freed as soon as it has been claimed."""
    honest = leases.Leases._serve_claim

    def hasty(self: leases.Leases, claim: Claim, now_ns: int, starved: bool) -> object:
        answer = honest(self, claim, now_ns, starved)
        for held in self.table._leases.values():
            self._pool.free(held.blocks[0])
        return answer

    patch.setattr(leases.Leases, "_serve_claim", hasty)


@pytest.mark.parametrize("broken", [taken_from_under_a_claim, given_back_at_the_claim])
def test_blocks_under_a_claim(broken: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are freed while they are read are rewritten by live work, and the reader sees it."""
    world = slow_read(pressure=True)
    assert world.report("b")["returned_tokens"] == 339 or world.report("b")["returned_tokens"] == 256
    assert not world.finished["bp"].wrong
    broken(monkeypatch)
    world = slow_read(pressure=True)
    assert world.finished["bp"].wrong
    monkeypatch.undo()
    assert differs(world, "bp", tokens(400))
    assert not slow_read(pressure=False).finished["bp"].wrong


def no_deadline(patch: pytest.MonkeyPatch) -> None:
    """Prefill takes a claim to last a hundred times as long as it does."""
    honest = ReadBook.on_granted

    def patient(
        book: ReadBook,
        request_id: str,
        claim_id: str,
        matched: int,
        blocks: Blocks,
        term_ns: int,
        now_ns: int,
        *,
        ask_id: int,
    ) -> object:
        return honest(book, request_id, claim_id, matched, blocks, 100 * term_ns, now_ns, ask_id=ask_id)

    patch.setattr(ReadBook, "on_granted", patient)


def test_a_read_that_outlives_its_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode's claim ends, its blocks are rewritten, and only the deadline keeps prefill from using them."""

    def late() -> World:
        profile = make_profile(blocks=130)
        slow = msgspec.structs.replace(
            profile, transfer=msgspec.structs.replace(profile.transfer, setup_ns=S)
        )
        short = {"claim_term_ns": 200 * MS, "lease_ttl_ns": 300 * MS}
        world = World(
            Engine(config("p", retains=False, prefix_cache=False, **short), slow),
            Engine(config("d", reads=False, prefix_cache=False, **short), profile),
        )
        _, first = world.turn("a", tokens(300))
        world.submit("p", Request("bp", world.text(tokens(400)), 1, hop=Hop.PREFILL, handle=first.handle))
        for kind in range(2, 9):
            rewriting = Request(str(kind), world.text(tokens(1000, kind)), 4, hop=Hop.ALONE, ends_at=1000)
            world.loop.after(250 * MS, lambda one=rewriting: world.submit("d", one))  # type: ignore[misc]
        world.run(lambda: "bp" in world.finished)
        return world

    world = late()
    assert world.report("b")["reason"] == "deadline"
    assert not world.finished["bp"].wrong
    no_deadline(monkeypatch)
    assert late().finished["bp"].wrong


def no_fence(patch: pytest.MonkeyPatch) -> None:
    """The blocks of a late read are used again at once."""

    def careless(loads: Loads, request_id: str) -> None:
        loads._loads[loads._by_request[request_id]].sequence = None

    honest = Loads.end

    def without_giving_back(loads: Loads, read_id: str, contents: list[int] | None) -> object:
        load = loads._loads.get(read_id)
        if load is not None and load.sequence is None:
            loads._pool.touch(load.targets)
        return honest(loads, read_id, contents)

    patch.setattr(Loads, "orphan", careless)
    patch.setattr(Loads, "end", without_giving_back)
    patch.setattr(Loads, "orphaned_references", lambda _: 0)


def test_bytes_that_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the fence the bytes of a late read land on what its own request computed anew."""

    def late() -> World:
        profile = make_profile(blocks=130)
        slow = msgspec.structs.replace(
            profile, transfer=msgspec.structs.replace(profile.transfer, setup_ns=S)
        )
        world = World(
            Engine(config("p", retains=False, prefix_cache=False, claim_term_ns=900 * MS), slow),
            Engine(config("d", reads=False, claim_term_ns=900 * MS), make_profile(blocks=130)),
        )
        _, first = world.turn("a", tokens(300))
        world.submit("p", Request("bp", world.text(EDITED), 1, hop=Hop.PREFILL, handle=first.handle))
        for kind in range(2, 5):
            other = Request(str(kind), world.text(tokens(400, kind)), 250, hop=Hop.ALONE, ends_at=1000)
            world.loop.after(850 * MS, lambda one=other: world.submit("p", one))  # type: ignore[misc]
        world.run(lambda: len(world.finished) == 6)
        return world

    world = late()
    assert world.report("b")["reason"] == "deadline"
    assert not any(finished.wrong for finished in world.finished.values())
    no_fence(monkeypatch)
    world = late()
    wrong = [name for name, finished in world.finished.items() if finished.wrong]
    assert wrong
    monkeypatch.undo()


def test_a_lease_given_back_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks freed once too often are taken from whoever has them now."""

    def shared() -> World:
        world = World(Engine(config("d"), make_profile(blocks=130)))
        world.check_each_step = False
        world.submit("d", Request("a", world.text(tokens(600)), 4, hop=Hop.ALONE, ends_at=1000))
        world.run(lambda: "a" in world.finished)
        world.submit("d", Request("b", world.text(tokens(620)), 400, hop=Hop.ALONE, ends_at=1000))
        world.run(lambda: "b" in world.said)
        engine = world.engines["d"]
        engine.leases.drop_all(world.loop.now_ns)
        for kind in range(2, 6):
            world.submit("d", Request(str(kind), world.text(tokens(400, kind)), 4, ends_at=1000))
        world.run(lambda: "b" in world.finished)
        return world

    assert not shared().finished["b"].wrong
    honest = BlockPool.free

    def twice(self: LeaseTable) -> list[lease.FreedLease]:
        freed, self._freed = self._freed, []
        return [*freed, *freed]

    def forgiving(pool: BlockPool, blocks: list[int]) -> None:
        honest(pool, [block for block in blocks if block in pool._holders])

    monkeypatch.setattr(LeaseTable, "take_freed", twice)
    monkeypatch.setattr(BlockPool, "free", forgiving)
    assert shared().finished["b"].wrong


def test_a_lost_answer_is_no_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mark is not set by chance: a system in which nothing is reused is never called wrong."""
    monkeypatch.setattr(Memory, "seen", Memory.seen)
    world = pair(claim_timeout_ns=MS)
    world.lose = lambda send: isinstance(send, Send)
    _, first = world.turn("a", tokens(300))
    world.turn("b", tokens(400), first.handle)
    assert not differs(world, "bd", tokens(400))
