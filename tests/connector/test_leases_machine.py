"""Under any schedule of requests, claims, time and memory pressure, block references balance, no block that a
claim lends is ever free, and what it lends holds what was proven: also where a lease had ended before."""

from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvloop.connector import leases
from kvloop.core.handle import Handle
from kvloop.wire.control import Claim, Drop, Granted, Refused, Release, Released, Renew, Renewed
from tests.connector.decode import TIMED, Decode, chain
from tests.connector.fakes import BLOCK, Clock, Pool, S, make_request
from tests.reach import run_machine_until_reached

POOL_BLOCKS, SHARE, TTL_S, TERM_S, CLAIM_S = 32, 0.8, 60, 40, 5
LIMIT = int((POOL_BLOCKS + 1) * SHARE)
LENGTHS = [1, 64, 65, 80, 129, 200]
SEGMENT = 64
STEP_COST = 12
MUST_REACH = set(
    """retained|not retained|retained beside a claim|shared blocks|claimed|claimed in part|refused|released
    |released twice|expired claim|made room|no room|dropped|dropped under a claim|renewed|renewed in vain
    |reset|new incarnation|reclaimed for the share|revived|revived in part|lost|left to live work
    |more left""".replace("\n    ", "").split("|")
)
picks = st.integers(0, 7)


@dataclass
class Lent:
    """A claim as its reader knows it."""

    claim_id: str
    blocks: list[int]
    tokens: list[int]
    deadline_ns: int


@dataclass
class Turn:
    """A request and its blocks: what it holds of them while it lives, what it wrote to them ever after."""

    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)


class DecodeMachine(RuleBasedStateMachine):
    """Plays the scheduler and the peers. `reached` counts what came about in all runs together."""

    reached: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.patches = [patch.object(module, "time", self.clock) for module in TIMED]
        self.patches.append(patch.object(leases, "STEP_COST_BLOCKS", STEP_COST))
        for patched in self.patches:
            patched.start()
        self.pool = Pool(POOL_BLOCKS)
        self.decode = Decode(
            self.pool,
            max_retained_share=SHARE,
            lease_ttl_ns=TTL_S * S,
            lease_term_ns=TERM_S * S,
            claim_term_ns=CLAIM_S * S,
        )
        self.content: dict[int, tuple[int, list[int]]] = {}
        """What is written in each block, and by which write."""
        self.writes = 0
        self.provable: dict[str, int] = {}
        """How many tokens leases are of that were cut when they were had again."""
        self.running: list[Turn] = []
        self.kept: list[tuple[Handle, Turn]] = []
        self.lent: list[Lent] = []
        self.gone: list[str] = []

    def teardown(self) -> None:
        """When every claim has ended, so has every lease, and not one reference is left."""
        for turn in self.running:
            self.pool.free(turn.blocks)
        self.clock.now_ns += (TTL_S + CLAIM_S) * S
        while self.decode.leases.give_back():
            pass
        assert self.pool.held() == 0
        for patched in self.patches:
            patched.stop()

    def unclaimed(self) -> int:
        """Leases that could be reclaimed."""
        return self.decode.stat()['leases{state="granted"}']

    def intact_blocks(self, turn: Turn, token_count: int) -> int:
        """How many of the blocks of a turn's first so many tokens nobody has written to since, from the first
        on."""
        count = 0
        for block, write in zip(turn.blocks[: -(-token_count // BLOCK)], turn.writes, strict=False):
            if self.content.get(block, (0, []))[0] != write:
                break
            count += 1
        return count

    @initialize()
    def begin(self) -> None:
        """Something runs."""
        self.admit(2, 0, False)

    @rule(length=st.integers(0, len(LENGTHS) - 1), pick=picks, goes_on=st.booleans())
    def admit(self, length: int, pick: int, goes_on: bool) -> None:
        """A request comes: a new one, or one that goes on from a lease and shares the whole blocks that are
        still cached, free ones too."""
        tokens = [100 + pick] * LENGTHS[length]
        shared: list[int] = []
        if goes_on and self.kept:
            _, before = self.kept[pick % len(self.kept)]
            tokens = [*before.tokens, *tokens]
            whole = (len(before.tokens) - 1) // BLOCK
            shared = before.blocks[: self.intact_blocks(before, whole * BLOCK)]
        needed = -(-len(tokens) // BLOCK) - len(shared)
        if len(tokens) > 400:
            return
        if len(shared) > self.pool.get_num_free_blocks():
            return
        self.pool.touch([self.pool.blocks[number] for number in shared])
        had = self.pool.get_num_free_blocks()
        if had < needed:
            self.decode.leases.make_room(needed - had)
            made = self.pool.get_num_free_blocks() >= needed
            self.reached["made room" if made else "no room"] += 1
            assert made or not self.unclaimed(), "a lease that nobody claims kept a request waiting"
        fresh = self.pool.allocate(needed)
        if fresh or not needed:
            turn = Turn(tokens, shared + fresh)
            for place, block in enumerate(turn.blocks):
                if block in fresh:
                    self.writes += 1
                    self.content[block] = self.writes, tokens[place * BLOCK : (place + 1) * BLOCK]
                turn.writes.append(self.content[block][0])
            self.running.append(turn)
            self.reached["shared blocks"] += bool(shared)
        else:
            self.pool.free(shared)

    @precondition(lambda self: self.running)
    @rule(pick=picks, keep=st.sampled_from([True, True, True, False]))
    def finish(self, pick: int, keep: bool) -> None:
        """A request ends and gives its own references back, retained or not."""
        turn = self.running.pop(pick % len(self.running))
        if keep:
            before = self.decode.stat()
            handle = self.decode.retainer.retain(make_request("r", turn.tokens), (turn.blocks,))
            after = self.decode.stat()
            reclaimed = 'leases_ended_total{state="reclaimed"}'
            self.reached["reclaimed for the share"] += after[reclaimed] > before[reclaimed]
            if handle is None:
                self.reached["not retained"] += 1
                needed = -(-(len(turn.tokens) - 1) // BLOCK)
                full = after["lease_blocks"] + needed > LIMIT and not after['leases{state="granted"}']
                assert len(turn.tokens) < 65 or needed > LIMIT or full, "there was room"
            else:
                self.reached["retained"] += 1
                self.reached["retained beside a claim"] += bool(before['leases{state="claimed"}'])
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
    @rule(pick=picks, cut=st.sampled_from([0, 0, 0, 70, 20]), starved=st.sampled_from([False] * 4 + [True]))
    def claim(self, pick: int, cut: int, starved: bool) -> None:
        """A reader asks for what it has in common with a lease: all, a part, too little."""
        handle, turn = self.kept[pick % len(self.kept)]
        wanted = turn.tokens[: handle.token_count]
        common = cut if cut and len(wanted) > cut else len(wanted)
        wanted = [*wanted[:common], *[7] * (len(wanted) - common)]
        held = self.decode.stat()["lease_blocks"]
        answer = self.decode.serve(Claim.asking(handle, chain(wanted)))
        if answer is None:
            expected = self.left_of(handle, turn, common)
            self.decode.lender.answer_deferred(starved=starved)
            answer = self.decode.late.pop()
            if starved:
                assert isinstance(answer, Refused)
                self.reached["left to live work"] += 1
            elif isinstance(answer, Granted):
                assert answer.matched_tokens == expected
                self.provable[handle.lease_id] = expected
                self.reached["revived" if expected == handle.token_count else "revived in part"] += 1
            else:
                self.reached["lost"] += not expected
                assert not expected or held + -(-expected // BLOCK) > LIMIT, "it was still there"
        if isinstance(answer, Refused):
            self.reached["refused"] += 1
            return
        assert isinstance(answer, Granted)
        assert answer.matched_tokens <= common
        assert answer.matched_tokens == handle.token_count or answer.matched_tokens % SEGMENT == 0
        self.reached["claimed in part" if cut else "claimed"] += 1
        (blocks,) = answer.block_ids
        deadline_ns = self.clock.now_ns + CLAIM_S * S
        self.lent.append(Lent(answer.claim_id, blocks, wanted[: answer.matched_tokens], deadline_ns))

    def left_of(self, handle: Handle, turn: Turn, common: int) -> int:
        """What a soft lease can grant to a reader who has its first `common` tokens: all of it if it is asked
        for all of it, or whole segments; of what is still written. What was cut once is forgotten."""
        provable = self.provable.get(handle.lease_id, handle.token_count)
        proven = min(provable, common)
        if not common == provable == handle.token_count:
            proven = proven // SEGMENT * SEGMENT
        intact = self.intact_blocks(turn, proven)
        return proven if intact * BLOCK >= proven else intact * BLOCK // SEGMENT * SEGMENT

    @precondition(lambda self: self.lent or self.gone)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        """A reader is through; sometimes it says so twice, or too late."""
        ids = [lent.claim_id for lent in self.lent] + self.gone[-1:]
        claim_id = ids[pick % len(ids)]
        live = claim_id not in self.gone
        assert self.decode.serve(Release(claim_id)) == Released(live)
        self.reached["released" if live else "released twice"] += 1
        self.lent = [lent for lent in self.lent if lent.claim_id != claim_id]
        self.gone.append(claim_id)

    @rule(seconds=st.sampled_from([1, 1, 2, 5, 41]))
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
        claims = self.decode.stat()['leases{state="claimed"}']
        self.decode.serve(Drop([handle.lease_id]))
        self.reached["dropped under a claim" if claims else "dropped"] += 1

    @precondition(lambda self: self.kept)
    @rule(pick=picks, term_s=st.integers(1, 100), chance=st.integers(0, 1000))
    def renew(self, pick: int, term_s: int, chance: int) -> None:
        """The router says that it goes on."""
        handle, _ = self.kept[pick % len(self.kept)]
        answer = self.decode.serve(Renew([(handle.lease_id, term_s * 1_000, chance)]))
        assert isinstance(answer, Renewed)
        self.reached["renewed in vain" if answer.gone or answer.soft else "renewed"] += 1

    @rule(new_memory=st.sampled_from([False, False, False, True]), often=st.integers(0, 3))
    def reset(self, new_memory: bool, often: int) -> None:
        """The weights or the memory are others: what is in blocks that nobody reads is worth nothing."""
        if often:
            return
        self.decode.leases.drop_all(f"i{len(self.gone)}" if new_memory else None)
        self.kept = [(handle, Turn(turn.tokens)) for handle, turn in self.kept]
        for turn in self.running:
            self.pool.free(turn.blocks)
        self.running.clear()
        reading = {block for lent in self.lent for block in lent.blocks}
        self.content = {block: written for block, written in self.content.items() if block in reading}
        assert not self.unclaimed()
        self.reached["new incarnation" if new_memory else "reset"] += 1

    @rule(missing=st.integers(0, POOL_BLOCKS))
    def make_room(self, missing: int) -> None:
        """Live work needs so many blocks more: it has them, or nothing is left to give."""
        before = self.pool.get_num_free_blocks()
        self.decode.leases.make_room(missing)
        assert self.pool.get_num_free_blocks() >= before + missing or not self.unclaimed()

    @rule()
    def give_back(self) -> None:
        """The scheduler looks: some of what has ended is free, no more than a step's worth or one lease, and
        every reference is accounted for."""
        with self.decode.leases.lock:
            self.decode.leases.note_ended()
        held = [len(blocks) for blocks in self.decode.leases.held()]
        more = self.decode.leases.give_back()
        left = [len(blocks) for blocks in self.decode.leases.held()]
        freed = sum(held) - sum(left)
        assert freed <= STEP_COST or len(held) - len(left) == 1
        self.reached["more left"] += more
        running = sum(len(turn.blocks) for turn in self.running)
        assert self.pool.held() == running + sum(left)
        assert more or sum(left) == self.decode.stat()["lease_blocks"]

    @invariant()
    def lent_blocks_are_held_and_hold_what_was_proven(self) -> None:
        """Whatever happened, until the claim is released or its time is over."""
        for lent in self.lent:
            assert all(self.pool.blocks[number].ref_cnt for number in lent.blocks)
            written = [token for block in lent.blocks for token in self.content[block][1]]
            assert written[: len(lent.tokens)] == lent.tokens

    @invariant()
    def the_share_is_kept(self) -> None:
        """Leases never hold more than the operator allows."""
        assert sum(len(blocks) for blocks in self.decode.leases.held()) <= LIMIT
        self.decode.check()


def test_references_balance_under_any_schedule() -> None:
    """And every kind of event has come about, or the schedules have shown nothing."""
    schedules = settings(deadline=None, max_examples=150, stateful_step_count=60)
    run_machine_until_reached(DecodeMachine, schedules, DecodeMachine.reached, MUST_REACH)
