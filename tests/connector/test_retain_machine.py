"""Under any schedule of requests, claims, time and memory pressure, block references balance, and no block
that a claim lends is ever free."""

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, ClassVar
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvloop.connector import retain as module
from kvloop.connector.retain import Retainer
from kvloop.core.chain import Chain, build_chain, root_digest
from kvloop.core.handle import Handle
from kvloop.wire.control import (
    Claim,
    Drop,
    Granted,
    Message,
    Refused,
    Release,
    Released,
    Renew,
    Renewed,
    Stat,
    StatReply,
)
from tests.connector.fakes import (
    BLOCK,
    IDENTITIES,
    KEY,
    Clock,
    Pool,
    S,
    make_request,
    make_settings,
    make_source,
)

POOL_BLOCKS, SHARE, TTL_S, CLAIM_S = 32, 0.8, 60, 5
LIMIT = int(POOL_BLOCKS * SHARE)
LENGTHS = [1, 64, 65, 80, 129, 200]
MAX_ROUNDS = 8
MUST_REACH = set(
    """retained|not retained|retained beside a claim|shared blocks|claimed|claimed in part|refused|released
    |released twice|expired claim|made room|no room|dropped|dropped under a claim|renewed|renewed in vain
    |reset|new incarnation|reclaimed for the share""".replace("\n    ", "").split("|")
)
picks = st.integers(0, 7)


@dataclass
class Lent:
    """A claim as its reader knows it."""

    claim_id: str
    blocks: list[int]
    deadline_ns: int


@dataclass
class Turn:
    """A live request and the blocks that it holds."""

    tokens: list[int]
    blocks: list[int] = field(default_factory=list)


def chain(tokens: list[int]) -> Chain:
    """The chain that a reader builds."""
    request = make_request("reader", tokens)
    return build_chain(KEY, root_digest(KEY, IDENTITIES(request)), tokens)


class RetainMachine(RuleBasedStateMachine):
    """Plays the scheduler and the control thread. `reached` counts what came about in all runs together."""

    reached: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.patched = patch.object(module, "time", self.clock)
        self.patched.start()
        self.pool = Pool(POOL_BLOCKS)
        self.retainer: Any = Retainer(
            make_settings(max_retained_share=SHARE, lease_ttl_ns=TTL_S * S, claim_term_ns=CLAIM_S * S),
            identity_of=IDENTITIES,
            block_size=BLOCK,
            engine_id="decode-0",
            incarnation="i1",
            describe_source=make_source,
        )
        pool: Any = self.pool
        self.retainer.bind(pool)
        self.running: list[Turn] = []
        self.kept: list[tuple[Handle, Turn]] = []
        self.lent: list[Lent] = []
        self.gone: list[str] = []

    def teardown(self) -> None:
        """When every claim has ended, so has every lease, and not one reference is left."""
        for turn in self.running:
            self.pool.free(turn.blocks)
        self.clock.now_ns += (TTL_S + CLAIM_S) * S
        self.retainer.give_back()
        assert self.pool.held() == 0
        self.patched.stop()

    def serve(self, message: Message) -> Message:
        """On another thread, as the control channel does."""
        answers: list[Message] = []
        thread = threading.Thread(target=lambda: answers.append(self.retainer.serve(message)))
        thread.start()
        thread.join()
        return answers[0]

    def stat(self) -> StatReply:
        """The retainer's own count."""
        answer = self.retainer.serve(Stat())
        assert isinstance(answer, StatReply)
        return answer

    @initialize()
    def begin(self) -> None:
        """Something runs."""
        self.admit(2, 0, False)

    @rule(length=st.integers(0, len(LENGTHS) - 1), pick=picks, goes_on=st.booleans())
    def admit(self, length: int, pick: int, goes_on: bool) -> None:
        """A request comes: a new one, or one that goes on from a lease and shares its whole blocks."""
        tokens = [100 + pick] * LENGTHS[length]
        shared: list[int] = []
        if goes_on and self.kept:
            _, before = self.kept[pick % len(self.kept)]
            tokens = [*before.tokens, *tokens]
            if all(self.pool.blocks[number].ref_cnt for number in before.blocks):
                shared = before.blocks[: (len(before.tokens) - 1) // BLOCK]
        needed = -(-len(tokens) // BLOCK) - len(shared)
        if len(tokens) > 400:
            return
        self.pool.touch([self.pool.blocks[number] for number in shared])
        had = self.pool.get_num_free_blocks()
        self.retainer.make_room(needed)
        if had < needed:
            made = self.pool.get_num_free_blocks() >= needed
            self.reached["made room" if made else "no room"] += 1
            assert made or not self.stat().granted, "a lease that nobody claims kept a request waiting"
        fresh = self.pool.allocate(needed)
        if fresh or not needed:
            self.running.append(Turn(tokens, shared + fresh))
            self.reached["shared blocks"] += bool(shared)
        else:
            self.pool.free(shared)

    @precondition(lambda self: self.running)
    @rule(pick=picks, keep=st.sampled_from([True, True, True, False]))
    def finish(self, pick: int, keep: bool) -> None:
        """A request ends and gives its own references back, retained or not."""
        turn = self.running.pop(pick % len(self.running))
        if keep:
            before, reclaimed = self.stat(), self.stat().reclaimed_total
            handle = self.retainer.retain(make_request("r", turn.tokens), (turn.blocks,))
            self.reached["reclaimed for the share"] += self.stat().reclaimed_total > reclaimed
            if handle is None:
                self.reached["not retained"] += 1
                needed = -(-(len(turn.tokens) - 1) // BLOCK)
                full = self.stat().held_blocks + needed > LIMIT and not self.stat().granted
                assert len(turn.tokens) < 65 or needed > LIMIT or full, "there was room"
            else:
                self.reached["retained"] += 1
                self.reached["retained beside a claim"] += bool(before.claims)
                assert handle.token_count == len(turn.tokens) - 1
                self.kept.append((handle, turn))
                del self.kept[:-8]
        self.pool.free(reversed(turn.blocks))

    @rule(length=st.sampled_from([3, 4, 5]), pick=picks, goes_on=st.booleans())
    def whole_turn(self, length: int, pick: int, goes_on: bool) -> None:
        """A request comes and ends: leases come to fill the pool."""
        self.admit(length, pick, goes_on)
        if self.running:
            self.finish(len(self.running) - 1, True)

    @precondition(lambda self: self.kept)
    @rule(pick=picks, cut=st.sampled_from([0, 0, 0, 70, 20]))
    def claim(self, pick: int, cut: int) -> None:
        """A reader asks for what it has in common with a lease: all, a part, too little."""
        handle, turn = self.kept[pick % len(self.kept)]
        wanted = turn.tokens[: handle.token_count]
        if cut:
            wanted = [*wanted[:cut], *[7] * len(wanted[cut:])]
        answer = self.serve(Claim.asking(handle, chain(wanted)))
        if isinstance(answer, Refused):
            self.reached["refused"] += 1
            return
        assert isinstance(answer, Granted)
        if cut:
            assert answer.matched_tokens <= cut
            self.reached["claimed in part"] += 1
        else:
            assert answer.matched_tokens == handle.token_count
            self.reached["claimed"] += 1
        (blocks,) = answer.block_ids
        assert blocks == turn.blocks[: -(-answer.matched_tokens // BLOCK)]
        self.lent.append(Lent(answer.claim_id, blocks, self.clock.now_ns + CLAIM_S * S))

    @precondition(lambda self: self.lent or self.gone)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        """A reader is through; sometimes it says so twice, or too late."""
        ids = [lent.claim_id for lent in self.lent] + self.gone[-1:]
        claim_id = ids[pick % len(ids)]
        live = claim_id not in self.gone
        assert self.serve(Release(claim_id)) == Released(live)
        self.reached["released" if live else "released twice"] += 1
        self.lent = [lent for lent in self.lent if lent.claim_id != claim_id]
        self.gone.append(claim_id)

    @rule(seconds=st.sampled_from([1, 1, 2, 5, 61]))
    def wait(self, seconds: int) -> None:
        """Time passes; claims that nobody released end."""
        self.clock.now_ns += seconds * S
        over = [lent.claim_id for lent in self.lent if lent.deadline_ns <= self.clock.now_ns]
        self.lent = [lent for lent in self.lent if lent.claim_id not in over]
        self.gone += over
        self.reached["expired claim"] += bool(over)

    @precondition(lambda self: self.kept)
    @rule(pick=picks)
    def drop(self, pick: int) -> None:
        """The router says that a conversation is over."""
        handle, _ = self.kept[pick % len(self.kept)]
        claims = self.stat().claimed
        self.serve(Drop([handle.lease_id]))
        self.reached["dropped under a claim" if claims else "dropped"] += 1

    @precondition(lambda self: self.kept)
    @rule(pick=picks, term_s=st.integers(1, 100))
    def renew(self, pick: int, term_s: int) -> None:
        """The router says that it goes on."""
        handle, _ = self.kept[pick % len(self.kept)]
        answer = self.serve(Renew([(handle.lease_id, term_s * 1_000)]))
        assert isinstance(answer, Renewed)
        self.reached["renewed in vain" if answer.gone else "renewed"] += 1

    @rule(new_memory=st.sampled_from([False, False, False, True]), often=st.integers(0, 3))
    def reset(self, new_memory: bool, often: int) -> None:
        """The weights or the memory are others: leases end as soon as nobody reads them."""
        if often:
            return
        if new_memory:
            self.retainer.begin_incarnation(f"i{len(self.gone)}")
        else:
            self.retainer.drop_all()
        assert not self.stat().granted
        self.reached["new incarnation" if new_memory else "reset"] += 1

    @rule(wanted=st.integers(0, POOL_BLOCKS))
    def make_room(self, wanted: int) -> None:
        """Live work needs so many blocks: it has them, or nothing is left to give."""
        self.retainer.make_room(wanted)
        assert self.pool.get_num_free_blocks() >= wanted or not self.stat().granted

    @rule()
    def give_back(self) -> None:
        """The scheduler looks: what has ended is free, and every reference is accounted for."""
        self.retainer.give_back()
        running = sum(len(turn.blocks) for turn in self.running)
        assert self.pool.held() == running + self.stat().held_blocks

    @invariant()
    def lent_blocks_are_held(self) -> None:
        """Whatever happened, until the claim is released or its time is over."""
        for lent in self.lent:
            assert all(self.pool.blocks[number].ref_cnt for number in lent.blocks)

    @invariant()
    def the_share_is_kept(self) -> None:
        """Leases never hold more than the operator allows."""
        assert self.stat().held_blocks <= LIMIT
        self.retainer.check_integrity()


def test_references_balance_under_any_schedule() -> None:
    """And every kind of event has come about, or the schedules have shown nothing."""
    RetainMachine.reached.clear()
    for _ in range(MAX_ROUNDS):
        run_state_machine_as_test(
            RetainMachine, settings=settings(deadline=None, max_examples=150, stateful_step_count=60)
        )
        if not MUST_REACH - {name for name, count in RetainMachine.reached.items() if count}:
            break
    assert not MUST_REACH - {name for name, count in RetainMachine.reached.items() if count}
