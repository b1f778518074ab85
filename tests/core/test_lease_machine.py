"""Under any schedule the lease table answers as the naive one does, and block references are conserved."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvloop.core.chain import Chain, Identity, build_chain, root_digest
from kvloop.core.lease import ClaimGranted, LeaseState, LeaseTable

from .naive_lease import NaiveLease, NaiveTable

KEY = bytes(32)
ROOTS = {tenant: root_digest(KEY, Identity("m", "", "", "", tenant)) for tenant in "ab"}
BLOCK, TTL, CLAIM_TERM, MAX_LEASES, MAX_CLAIMS = 16, 60, 12, 4, 5
# Histories that share prefixes, differ in a tail, in a segment, and from the first token on.
HISTORIES = [
    list(range(70)),
    list(range(64)),
    list(range(63)),
    list(range(200)),
    [*range(128), 9, *range(129, 200)],
    [*range(199), 9],
    [9, *range(1, 200)],
]
lease_ids = st.sampled_from([f"l{number}" for number in range(6)])
claim_ids = st.sampled_from([f"c{number}" for number in range(8)])
tenants = st.sampled_from("aaab")
histories = st.sampled_from(HISTORIES)
terms = st.integers(1, 30)


def chain_of(tenant: str, tokens: list[int]) -> Chain:
    """The chain that stands for a tenant's tokens."""
    return build_chain(KEY, ROOTS[tenant], tokens)


class LeaseMachine(RuleBasedStateMachine):
    """Drives both tables with the same calls."""

    @initialize()
    def begin(self) -> None:
        """Both start empty."""
        self.now = 0
        self.table = LeaseTable(BLOCK, TTL, CLAIM_TERM, MAX_LEASES, MAX_CLAIMS)
        self.naive = NaiveTable(BLOCK, TTL, CLAIM_TERM, MAX_LEASES, MAX_CLAIMS)
        self.blocks_made = 0
        self.out = 0
        self.blocks_home: list[int] = []

    @rule(lease_id=lease_ids, tenant=tenants, tokens=histories, term=terms, exact_only=st.booleans())
    def grant(self, lease_id: str, tenant: str, tokens: list[int], term: int, exact_only: bool) -> None:
        """Every lease has blocks of its own, so that each can be told."""
        self.naive.settle(self.now)
        if self.naive.find(lease_id):
            return
        needed = -(-len(tokens) // BLOCK)
        numbers = range(self.blocks_made, self.blocks_made + 2 * needed)
        blocks = (tuple(numbers[:needed]), tuple(numbers[needed:]))
        self.blocks_made += 2 * needed
        deadline = self.now + min(term, TTL)
        lease = NaiveLease(lease_id, tenant, tokens, blocks, exact_only, deadline, self.now)
        granted = self.table.grant(lease_id, chain_of(tenant, tokens), blocks, self.now, term, exact_only)
        assert granted is self.naive.grant(lease)

    @rule(lease_id=lease_ids, claim_id=claim_ids, tenant=tenants, wanted=histories)
    def claim(self, lease_id: str, claim_id: str, tenant: str, wanted: list[int]) -> None:
        """Granted is exactly what the naive table proves, and refused for the same reason."""
        self.naive.settle(self.now)
        answer = self.table.claim(lease_id, claim_id, chain_of(tenant, wanted), "reader", self.now)
        naive = self.naive.claim(lease_id, claim_id, tenant, wanted)
        if isinstance(answer, ClaimGranted):
            assert (answer.matched_tokens, answer.blocks) == naive
            assert (answer.claim_id, answer.term_ns) == (claim_id, CLAIM_TERM)
        else:
            assert answer.reason == naive

    @rule(claim_id=claim_ids)
    def release(self, claim_id: str) -> None:
        """In time, late, twice, or never claimed."""
        self.naive.settle(self.now)
        assert self.table.release(claim_id, self.now) is self.naive.release(claim_id)

    @rule(lease_id=lease_ids, term=terms)
    def renew(self, lease_id: str, term: int) -> None:
        """Within the TTL since the last use."""
        self.naive.settle(self.now)
        assert self.table.renew(lease_id, self.now, term) is self.naive.renew(lease_id, term)
        lease = self.naive.find(lease_id)
        assert self.table.deadline_ns(lease_id) == (lease and lease.deadline)

    @rule(lease_id=lease_ids)
    def drop(self, lease_id: str) -> None:
        """Its conversation is over."""
        self.naive.settle(self.now)
        assert self.table.drop(lease_id, self.now) is self.naive.end(lease_id, "released")

    @rule(lease_id=lease_ids)
    def reclaim(self, lease_id: str) -> None:
        """Live work needs the memory."""
        self.naive.settle(self.now)
        assert self.table.reclaim(lease_id, self.now) is self.naive.end(lease_id, "reclaimed")

    @rule()
    def drop_all(self) -> None:
        """The weights have changed."""
        self.naive.settle(self.now)
        dropped = [
            self.naive.end(lease.lease_id, "released") for lease in self.naive.leases if not lease.is_out
        ]
        assert self.table.drop_all(self.now) == sum(dropped)

    @rule(step=st.integers(0, 15), is_told=st.booleans())
    def pass_time(self, step: int, is_told: bool) -> None:
        """The table may learn of it now, or with its next call."""
        self.now += step
        if is_told:
            self.table.advance(self.now)
            self.naive.settle(self.now)

    @rule()
    def wake_at_the_next_deadline(self) -> None:
        """Nothing falls due before `next_deadline_ns`, and something does then."""
        self.table.advance(self.now)
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
        self.table.advance(self.now)
        self.naive.settle(self.now)
        freed = self.table.take_freed()
        naive, self.naive.out = self.naive.out, []
        assert sorted((lease.lease_id, lease.state.value, lease.blocks) for lease in freed) == sorted(naive)
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
        if self.now == self.naive.now == self.table._now_ns:
            assert self.table.held_blocks + waiting + len(self.blocks_home) == self.blocks_made
            assert self.table.claim_count() == len(self.naive.live_claims())
            held = [lease for lease in self.naive.leases if not lease.is_out]
            claimed = sum(bool(self.naive.live_claims(lease)) for lease in held)
            assert self.table.counts()[LeaseState.CLAIMED] == claimed
            assert len(self.table) == len(held)

    def teardown(self) -> None:
        """Time heals: at the end every block has come home."""
        if not hasattr(self, "table"):
            return
        self.now += TTL + CLAIM_TERM
        self.take_freed()
        assert sorted(self.blocks_home) == list(range(self.blocks_made))
        assert self.table.held_blocks == 0
        assert self.table.next_deadline_ns() is None


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(deadline=None, max_examples=80, stateful_step_count=40)
TestLeaseMachine.__doc__ = "LeaseTable and NaiveTable cannot be told apart by any schedule of calls."
