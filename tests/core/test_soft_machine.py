"""Under any schedule ended leases give what a scan of tokens and blocks says is left of them."""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from kvloop.core.chain import Identity, build_chain, root_digest
from kvloop.core.lease_state import FreedLease, LeaseState
from kvloop.core.soft import BLOCK_COST_BYTES, LEASE_COST_BYTES, SoftTable
from tests.reach import run_machine_until_reached

KEY = bytes(32)
ROOTS = {tenant: root_digest(KEY, Identity("m", "", "", "", tenant)) for tenant in "ab"}
BLOCK, POOL, MAX_LEASES, SEGMENT = 16, 60, 4, 64
MAX_BYTES = 5 * LEASE_COST_BYTES + 60 * BLOCK_COST_BYTES
HISTORIES = [
    list(range(200)),
    [*range(199), 9],
    [*range(128), 9, *range(129, 200)],
    list(range(128)),
    list(range(70)),
    list(range(20)),
]
MUST_REACH = {"all", "part for the tokens", "part for the blocks", "nothing", "unknown", "not exact"}
MUST_REACH |= {"pushed out by number", "pushed out by size", "void", "kept again"}
picks = st.integers(0, 5)


@dataclass
class NaiveSoft:
    """A lease that has ended: its tokens, its blocks, and how often each had been written then."""

    lease_id: str
    tokens: list[int]
    blocks: tuple[tuple[int, ...], ...]
    writes: tuple[tuple[int, ...], ...]
    exact_only: bool

    @property
    def cost(self) -> int:
        """As the table counts it."""
        blocks = sum(map(len, self.blocks))
        return LEASE_COST_BYTES + len(self.tokens) // SEGMENT * 16 + BLOCK_COST_BYTES * blocks


class SoftMachine(RuleBasedStateMachine):
    """A pool of blocks that are written to, and leases on them that end. `reached` counts what came about."""

    reached: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.table = SoftTable(BLOCK, MAX_LEASES, MAX_BYTES)
        self.kept: list[NaiveSoft] = []
        self.written = [0] * POOL
        self.ids = 0

    @rule(
        tokens=st.sampled_from(HISTORIES),
        first=st.integers(0, POOL // 2),
        exact_only=st.sampled_from([False, False, True]),
        is_void=st.sampled_from([False] * 5 + [True]),
        again=st.sampled_from([False] * 3 + [True]),
    )
    def keep(self, tokens: list[int], first: int, exact_only: bool, is_void: bool, again: bool) -> None:
        """A lease ends; its id may be one that has ended before, and was had again since."""
        needed = -(-len(tokens) // BLOCK)
        blocks = (tuple(range(first, first + needed)), tuple(range(first + needed, first + 2 * needed)))
        self.ids += 1
        lease_id = self.kept[0].lease_id if again and self.kept else f"l{self.ids}"
        self.reached["kept again"] += bool(again and self.kept)
        chain = build_chain(KEY, ROOTS["a"], tokens)
        freed = FreedLease(lease_id, LeaseState.EXPIRED, blocks, chain, exact_only, is_void)
        writes = tuple(tuple(self.written[block] for block in group) for group in blocks)
        kept = NaiveSoft(lease_id, tokens, blocks, writes, exact_only)
        self.kept = [soft for soft in self.kept if soft.lease_id != lease_id]
        if not is_void:
            self.kept.append(kept)
        while len(self.kept) > MAX_LEASES:
            self.reached["pushed out by number"] += 1
            del self.kept[0]
        while sum(soft.cost for soft in self.kept) > MAX_BYTES:
            self.reached["pushed out by size"] += 1
            del self.kept[0]
        assert self.table.keep(freed, writes) is (kept in self.kept)
        self.reached["void"] += is_void

    @rule(first=st.integers(0, POOL - 1), count=st.integers(1, 3))
    def write(self, first: int, count: int) -> None:
        """Live work is handed blocks."""
        for block in range(first, min(POOL, first + count)):
            self.written[block] += 1

    @rule(pick=picks, wanted=st.none() | st.sampled_from(HISTORIES), tenant=st.sampled_from("aaaab"))
    def ask(self, pick: int, wanted: list[int] | None, tenant: str) -> None:
        """The longest prefix that is equal token by token and whose blocks nobody has written to since."""
        soft = self.kept[pick] if pick < len(self.kept) else None
        tokens = wanted or (soft.tokens if soft else HISTORIES[0])
        chain = build_chain(KEY, ROOTS[tenant], tokens)
        answer = self.table.surviving(soft.lease_id if soft else "never", chain, self.unchanged)
        expected = 0 if soft is None or tenant == "b" else self.left(soft, tokens)
        if soft is None or not expected:
            self.reached["nothing" if soft else "unknown"] += 1
            assert answer is None
            return
        needed = -(-expected // BLOCK)
        blocks = soft.blocks if soft.exact_only else tuple(group[:needed] for group in soft.blocks)
        assert answer == (build_chain(KEY, ROOTS["a"], soft.tokens[:expected]), blocks)
        self.reached["all"] += expected == len(soft.tokens)

    def left(self, soft: NaiveSoft, wanted: list[int]) -> int:
        """Tokens that the lease has in common with `wanted`, and still holds; whole segments, or all."""
        common = 0
        while common < min(len(soft.tokens), len(wanted)) and soft.tokens[common] == wanted[common]:
            common += 1
        is_all = common == len(soft.tokens) == len(wanted)
        proven = common if is_all else common // SEGMENT * SEGMENT
        intact = 0
        while intact * BLOCK < proven and all(
            self.written[group[intact]] == writes[intact]
            for group, writes in zip(soft.blocks, soft.writes, strict=True)
        ):
            intact += 1
        left = proven if intact * BLOCK >= proven else intact * BLOCK // SEGMENT * SEGMENT
        self.reached["part for the tokens"] += 0 < left == proven < len(soft.tokens)
        self.reached["part for the blocks"] += 0 < left < proven
        self.reached["not exact"] += soft.exact_only and 0 < left < len(soft.tokens)
        return 0 if soft.exact_only and left < len(soft.tokens) else left

    def unchanged(self, block: int, proof: Hashable) -> bool:
        """What the blocks' owner knows."""
        return self.written[block] == proof

    @precondition(lambda self: self.kept)
    @rule(pick=picks)
    def forget(self, pick: int) -> None:
        """It is held again, or over; telling twice is harmless."""
        soft = self.kept.pop(pick % len(self.kept))
        self.table.forget(soft.lease_id)
        self.table.forget(soft.lease_id)

    @rule(is_so=st.sampled_from([False] * 9 + [True]))
    def clear(self, is_so: bool) -> None:
        """The memory is another, which is rare."""
        if is_so:
            self.table.clear()
            self.kept.clear()

    @invariant()
    def remembers_what_it_should(self) -> None:
        """The same leases as the list, and their cost."""
        self.table.check_integrity()
        assert len(self.table) == len(self.kept)
        assert all(self.table.get(soft.lease_id) is not None for soft in self.kept)
        assert self.table.used_bytes == sum(soft.cost for soft in self.kept)


def test_what_is_left_is_what_a_scan_finds() -> None:
    """Under any schedule, and the schedules reach everything there is to reach."""
    schedules = settings(deadline=None, max_examples=150, stateful_step_count=40)
    run_machine_until_reached(SoftMachine, schedules, SoftMachine.reached, MUST_REACH)
