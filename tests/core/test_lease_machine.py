"""Under any schedule the lease table answers as the naive one does, and block references are conserved."""

from collections import Counter
from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvloop.core.chain import Chain, Identity, build_chain, root_digest
from kvloop.core.lease import UNLIMITED, ClaimRefused, LeaseState, LeaseTable
from tests.reach import run_machine_until_reached

from .naive_lease import NaiveLease, NaiveTable

KEY = bytes(32)
ROOTS = {tenant: root_digest(KEY, Identity("m", "", "", "", tenant)) for tenant in "ab"}
BLOCK, TTL, CLAIM_TERM, MAX_LEASES, MAX_CLAIMS = 16, 25, 12, 4, 3
# Histories that share prefixes, differ in a tail, in a segment, and from the first token on.
HISTORIES = [
    list(range(200)),
    [*range(199), 9],
    [*range(128), 9, *range(129, 200)],
    list(range(70)),
    list(range(64)),
    list(range(63)),
    [9, *range(1, 200)],
]
picks = st.integers(0, 7)
tenants = st.sampled_from("aaaaab")
histories = st.sampled_from(HISTORIES)
terms = st.integers(5, 30)
chances = st.none() | st.sampled_from([0, 300, 500, 1000])
# What the schedules must bring about for their passing to mean anything.
MUST_REACH = set(
    """granted|full|claimed|claimed in part|claimed twice|expired|released|unknown_lease|wrong_root|no_match
    |not_exact|duplicate_claim|too_many_claims|release True|release False|renew True|renew False|drop True
    |drop under a claim|reclaim True|reclaim False|freed expired|freed released|freed reclaimed
    |reclaimed the least|behind""".replace("\n    ", "").split("|")
)


def chain_of(tenant: str, tokens: list[int]) -> Chain:
    """The chain that stands for a tenant's tokens."""
    return build_chain(KEY, ROOTS[tenant], tokens)


class LeaseMachine(RuleBasedStateMachine):
    """Drives both tables with the same calls. `reached` counts what came about, in all runs together."""

    reached: ClassVar[Counter[str]] = Counter()

    @initialize(expiries=st.sampled_from([UNLIMITED, 1]))
    def begin(self, expiries: int) -> None:
        """Both start empty. One lease may expire with a call, or all that are due."""
        self.now = 0
        self.is_late = expiries == 1
        self.table = LeaseTable(BLOCK, TTL, CLAIM_TERM, MAX_LEASES, MAX_CLAIMS, max_expiries=expiries)
        self.naive = NaiveTable(BLOCK, TTL, CLAIM_TERM, MAX_LEASES, MAX_CLAIMS)
        self.blocks_made = 0
        self.ids_made = 0
        self.blocks_home: list[int] = []

    def catch_up(self) -> None:
        """Both know what has ended by now."""
        self.table.advance(self.now)
        while self.table.is_behind:
            self.reached["behind"] += 1
            self.table.advance(self.now)
        self.naive.settle(self.now)

    def lease_id(self, pick: int) -> str:
        """Mostly a lease that is held, sometimes one that has ended or never was."""
        ids = [lease.lease_id for lease in self.naive.leases if not lease.is_out]
        return ids[pick % len(ids)] if ids and pick < 7 else "l0"

    def claim_id(self, pick: int) -> str:
        """Mostly a claim that is live, sometimes one that has ended or never was."""
        ids = [claim.claim_id for claim in self.naive.live_claims()]
        return ids[pick % len(ids)] if ids and pick < 7 else "c2"

    def fresh(self, kind: str) -> str:
        """An id never used before."""
        self.ids_made += 1
        return f"{kind}{self.ids_made}"

    @rule(tenant=tenants, tokens=histories, term=terms, exact_only=st.sampled_from([False, False, True]))
    def grant(self, tenant: str, tokens: list[int], term: int, exact_only: bool) -> None:
        """Every lease has blocks of its own, so that each can be told."""
        self.naive.settle(self.now)
        needed = -(-len(tokens) // BLOCK)
        numbers = range(self.blocks_made, self.blocks_made + 2 * needed)
        blocks = (tuple(numbers[:needed]), tuple(numbers[needed:]))
        self.blocks_made += 2 * needed
        deadline = self.now + min(term, TTL)
        lease = NaiveLease(self.fresh("l"), tenant, tokens, blocks, exact_only, deadline, self.now)
        chain = chain_of(tenant, tokens)
        granted = self.table.grant(lease.lease_id, chain, blocks, self.now, term, exact_only)
        assert granted is self.naive.grant(lease)
        self.reached["granted" if granted else "full"] += 1

    @precondition(lambda self: self.table)
    @rule(pick=picks, is_foreign=st.sampled_from([False] * 5 + [True]), wanted=st.none() | histories)
    def claim(self, pick: int, is_foreign: bool, wanted: list[int] | None) -> None:
        """Granted is exactly what the naive table proves, and refused for the same reason."""
        self.naive.settle(self.now)
        lease_id = self.lease_id(pick)
        lease = self.naive.find(lease_id)
        tenant = "b" if is_foreign or lease is None else lease.tenant
        tokens = wanted or (lease.tokens if lease else HISTORIES[0])
        self.claim_as(lease_id, self.fresh("c"), tenant, tokens)

    @precondition(lambda self: self.table)
    @rule(first=picks, second=picks)
    def claim_two(self, first: int, second: int) -> None:
        """Two readers at once, of one lease or of two."""
        self.claim(first, False, None)
        self.claim(second, False, None)

    @precondition(lambda self: self.table)
    @rule(pick=picks, other=picks)
    def claim_again(self, pick: int, other: int) -> None:
        """A claim id that is live, or has been: a duplicate, or a stale message."""
        self.naive.settle(self.now)
        self.claim_as(self.lease_id(pick), self.claim_id(other), "a", HISTORIES[0])

    def claim_as(self, lease_id: str, claim_id: str, tenant: str, wanted: list[int]) -> None:
        """The same claim on both tables."""
        answer = self.table.claim(lease_id, claim_id, chain_of(tenant, wanted), "reader", self.now)
        naive = self.naive.claim(lease_id, claim_id, tenant, wanted)
        if isinstance(answer, ClaimRefused):
            assert answer.reason == naive
            self.reached[answer.reason] += 1
            return
        assert (answer.matched_tokens, answer.blocks) == naive
        assert (answer.claim_id, answer.term_ns) == (claim_id, CLAIM_TERM)
        self.reached["claimed" if answer.matched_tokens == len(wanted) else "claimed in part"] += 1
        lease = self.naive.find(lease_id)
        self.reached["claimed twice"] += len(self.naive.live_claims(lease)) > 1

    @precondition(lambda self: self.naive.claims)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        """In time, late, twice, or never claimed."""
        self.naive.settle(self.now)
        claim_id = self.claim_id(pick)
        released = self.table.release(claim_id, self.now)
        assert released is self.naive.release(claim_id)
        self.reached[f"release {released}"] += 1

    @precondition(lambda self: self.table)
    @rule(pick=picks, term=terms, chance=chances)
    def renew(self, pick: int, term: int, chance: int | None) -> None:
        """Within the TTL since the last use; the router's word on a return replaces the last."""
        self.naive.settle(self.now)
        lease_id = self.lease_id(pick)
        renewed = self.table.renew(lease_id, self.now, term, chance)
        assert renewed is self.naive.renew(lease_id, term, chance)
        lease = self.naive.find(lease_id)
        assert self.table.deadline_ns(lease_id) == (lease and lease.deadline)
        self.reached[f"renew {renewed}"] += 1

    @precondition(lambda self: self.table)
    @rule(pick=picks)
    def drop(self, pick: int) -> None:
        """Its conversation is over."""
        self.naive.settle(self.now)
        lease_id = self.lease_id(pick)
        dropped = self.table.drop(lease_id, self.now)
        assert dropped is self.naive.end(lease_id, "released")
        is_held = self.naive.find(lease_id) is not None
        self.reached["drop under a claim" if dropped and is_held else f"drop {dropped}"] += 1

    @precondition(lambda self: self.table)
    @rule(pick=picks)
    def reclaim(self, pick: int) -> None:
        """Live work needs the memory."""
        self.naive.settle(self.now)
        lease_id = self.lease_id(pick)
        reclaimed = self.table.reclaim(lease_id, self.now)
        assert reclaimed is self.naive.end(lease_id, "reclaimed")
        self.reached[f"reclaim {reclaimed}"] += 1

    @precondition(lambda self: self.table)
    @rule()
    def reclaim_the_least(self) -> None:
        """Live work needs memory, and takes what it will miss least."""
        self.catch_up()
        lease_id = self.table.least_worth()
        assert lease_id == self.naive.least_worth()
        if lease_id is not None:
            assert self.table.reclaim(lease_id, self.now)
            assert self.naive.end(lease_id, "reclaimed")
            self.reached["reclaimed the least"] += 1

    @rule(is_so=st.sampled_from([False] * 9 + [True]))
    def drop_all(self, is_so: bool) -> None:
        """The weights have changed, which is rare."""
        if not is_so:
            return
        self.naive.settle(self.now)
        dropped = [
            self.naive.end(lease.lease_id, "released") for lease in self.naive.leases if not lease.is_out
        ]
        assert self.table.drop_all(self.now) == sum(dropped)

    @rule(step=st.integers(0, 6), is_told=st.booleans())
    def pass_time(self, step: int, is_told: bool) -> None:
        """The table may learn of it now, or with its next call."""
        self.now += step
        if is_told:
            self.table.advance(self.now)
            self.naive.settle(self.now)

    @rule()
    def wake_at_the_next_deadline(self) -> None:
        """Nothing falls due before `next_deadline_ns`, and something does then."""
        self.catch_up()
        deadline = self.table.next_deadline_ns()
        if deadline is None:
            return
        self.take_freed()
        before = (self.table.claim_count(), self.table.counts(), len(self.table))
        self.table.advance(deadline - 1)
        assert (self.table.claim_count(), self.table.counts(), len(self.table)) == before
        self.now = deadline

    @rule()
    def take_freed(self) -> None:
        """Both let out the same leases in the same state; no block comes home twice, none under a claim."""
        self.catch_up()
        freed = self.table.take_freed()
        naive, self.naive.out = self.naive.out, []
        assert sorted((lease.lease_id, lease.state.value, lease.blocks) for lease in freed) == sorted(naive)
        self.reached.update(f"freed {lease.state}" for lease in freed)
        claimed = {
            block for claim in self.naive.live_claims() for group in claim.lease.blocks for block in group
        }
        home = [block for lease in freed for group in lease.blocks for block in group]
        assert not claimed & set(home)
        self.blocks_home += home
        assert len(self.blocks_home) == len(set(self.blocks_home))

    @invariant()
    def nothing_contradicts_itself(self) -> None:
        """After each step, references are conserved and the counts are those of a scan."""
        self.table.check_integrity()
        waiting = sum(len(group) for _, _, blocks in self.naive.out for group in blocks)
        if self.now == self.naive.now == self.table._now_ns and not self.table.is_behind:
            assert self.table.held_blocks + waiting + len(self.blocks_home) == self.blocks_made
            assert self.table.claim_count() == len(self.naive.live_claims())
            held = [lease for lease in self.naive.leases if not lease.is_out]
            claimed = sum(bool(self.naive.live_claims(lease)) for lease in held)
            assert self.table.counts()[LeaseState.CLAIMED] == claimed
            assert len(self.table) == len(held)
            assert self.table.least_worth() == self.naive.least_worth()
            late = self.table.held_block_ns(self.now) - self.naive.block_ns
            assert late >= 0 if self.is_late else late == 0

    def teardown(self) -> None:
        """Time heals: at the end every block has come home."""
        if not hasattr(self, "table"):
            return
        self.now += TTL + CLAIM_TERM
        self.take_freed()
        assert sorted(self.blocks_home) == list(range(self.blocks_made))
        assert self.table.held_blocks == 0
        assert self.table.next_deadline_ns() is None


def test_the_table_cannot_be_told_from_the_naive_one() -> None:
    """Under any schedule of calls both answer alike, and the schedules reach everything there is to reach."""
    schedules = settings(deadline=None, max_examples=200, stateful_step_count=50)
    run_machine_until_reached(LeaseMachine, schedules, LeaseMachine.reached, MUST_REACH)
