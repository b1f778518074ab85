"""The lease table, claim by claim. What holds under every schedule is in test_lease_machine.py."""

from itertools import product

import pytest

from kvloop.core.chain import Chain, Identity, build_chain, root_digest
from kvloop.core.lease import (
    TRANSITIONS,
    ClaimGranted,
    ClaimRefused,
    FreedLease,
    LeaseEvent,
    LeaseState,
    LeaseTable,
    RefusalReason,
)
from kvloop.core.lease_state import FINAL

KEY = bytes(32)
ROOT = root_digest(KEY, Identity("m", "", "", "", "a"))
OTHER_ROOT = root_digest(KEY, Identity("m", "", "", "", "b"))
BLOCK, TTL, TERM, CLAIM_TERM = 16, 480, 60, 10
TOKENS = list(range(200))
HELD = build_chain(KEY, ROOT, TOKENS)
BLOCKS = (tuple(range(13)), tuple(range(100, 113)))


def table_with_lease(*, exact_only: bool = False, max_leases: int = 4, max_claims: int = 4) -> LeaseTable:
    """A table with one lease "l" over TOKENS, granted at time 0."""
    table = LeaseTable(BLOCK, TTL, CLAIM_TERM, max_leases, max_claims)
    assert table.grant("l", HELD, BLOCKS, 0, TERM, exact_only)
    return table


def claim(table: LeaseTable, claim_id: str, now_ns: int, wanted: Chain = HELD) -> ClaimGranted | ClaimRefused:
    """Claim `wanted` from the lease "l"."""
    answer = table.claim("l", claim_id, wanted, "reader", now_ns)
    table.check_integrity()
    return answer


def test_grants_exactly_the_proven_prefix() -> None:
    """A history edited in its second segment gets one segment's tokens and the blocks for those, no more."""
    edited = build_chain(KEY, ROOT, [*TOKENS[:100], 9, *TOKENS[101:]])
    expected = ClaimGranted("c", 64, (BLOCKS[0][:4], BLOCKS[1][:4]), CLAIM_TERM)
    assert claim(table_with_lease(), "c", 1, edited) == expected


def test_grants_to_the_token() -> None:
    """The exact continuation gets everything, the partly filled last block included."""
    assert claim(table_with_lease(), "c", 1) == ClaimGranted("c", 200, BLOCKS, CLAIM_TERM)


def test_refuses_what_is_not_proven() -> None:
    """Other tokens, another tenant, an unknown lease, another incarnation: each has its own reason."""
    table = table_with_lease()
    stranger = build_chain(KEY, ROOT, [5, *TOKENS])
    assert claim(table, "c", 1, stranger) == ClaimRefused(RefusalReason.NO_MATCH)
    foreign = build_chain(KEY, OTHER_ROOT, TOKENS)
    assert claim(table, "c", 1, foreign) == ClaimRefused(RefusalReason.WRONG_ROOT)
    assert table.claim("?", "c", HELD, "r", 1) == ClaimRefused(RefusalReason.UNKNOWN_LEASE)
    reborn = table.claim("l", "c", HELD, "r", 1, incarnation="the one before")
    assert reborn == ClaimRefused(RefusalReason.WRONG_INCARNATION)
    assert table.claim_count() == 0


def test_forgetting_the_incarnation_fails_closed() -> None:
    """A table that has an incarnation grants nothing to a claim that names none."""
    table = LeaseTable(BLOCK, TTL, CLAIM_TERM, 1, 1, incarnation="now")
    table.grant("l", HELD, BLOCKS, 0, TERM)
    assert table.claim("l", "c", HELD, "r", 0) == ClaimRefused(RefusalReason.WRONG_INCARNATION)
    assert isinstance(table.claim("l", "c", HELD, "r", 0, incarnation="now"), ClaimGranted)


def test_hybrid_models_get_all_or_nothing() -> None:
    """With `exact_only` a partial match is refused, a full one gets every block of every group."""
    table = LeaseTable(BLOCK, TTL, CLAIM_TERM, 1, 1)
    uneven = ((1, 2, 3), (9,))
    table.grant("l", HELD, uneven, 0, TERM, exact_only=True)
    partial = build_chain(KEY, ROOT, TOKENS[:199])
    assert claim(table, "c", 1, partial) == ClaimRefused(RefusalReason.NOT_EXACT)
    assert claim(table, "c", 1) == ClaimGranted("c", 200, uneven, CLAIM_TERM)


def test_two_readers_pin_until_both_are_through() -> None:
    """A lease dropped under two readers comes out when the second has released, once."""
    table = table_with_lease()
    claim(table, "c1", 1)
    claim(table, "c2", 1)
    assert table.drop("l", 2)
    assert not table.drop("l", 2)
    assert claim(table, "c3", 2) == ClaimRefused(RefusalReason.RELEASED)
    assert table.release("c1", 3)
    assert table.take_freed() == []
    assert table.release("c2", 3)
    assert table.take_freed() == [FreedLease("l", LeaseState.RELEASED, BLOCKS, HELD)]
    assert table.take_freed() == []


def test_expiry_waits_for_the_claim() -> None:
    """A term that passes under a claim ends the lease with the claim, and grants nothing meanwhile."""
    table = table_with_lease()
    claim(table, "c", TERM - 1)
    assert claim(table, "d", TERM) == ClaimRefused(RefusalReason.EXPIRED)
    assert not table.renew("l", TERM, TERM)
    assert table.state("l") is LeaseState.CLAIMED
    table.advance(TERM - 1 + CLAIM_TERM)
    assert table.take_freed() == [FreedLease("l", LeaseState.EXPIRED, BLOCKS, HELD)]
    assert not table.release("c", TERM + CLAIM_TERM)


def test_a_claim_holds_up_to_its_deadline() -> None:
    """One nanosecond before the deadline the blocks are held; at the deadline they are not."""
    table = table_with_lease()
    claim(table, "c", 0)
    table.drop("l", 0)
    table.advance(CLAIM_TERM - 1)
    assert table.take_freed() == []
    table.advance(CLAIM_TERM)
    assert len(table.take_freed()) == 1


def test_duplicate_claims_and_releases_are_harmless() -> None:
    """A claim id in use is refused; releasing twice, or what never was, answers False."""
    table = table_with_lease()
    claim(table, "c", 0)
    assert claim(table, "c", 0) == ClaimRefused(RefusalReason.DUPLICATE_CLAIM)
    assert table.release("c", 1)
    assert not table.release("c", 1)
    assert not table.release("never", 1)
    assert table.state("l") is LeaseState.GRANTED


def test_reclaim_never_takes_a_claimed_lease() -> None:
    """Live work gets an unclaimed lease's memory, and has to wait for a reader's."""
    table = table_with_lease()
    claim(table, "c", 0)
    assert table.least_worth() is None
    assert not table.reclaim("l", 0)
    table.release("c", 1)
    assert table.least_worth() == "l"
    assert table.reclaim("l", 1)
    assert not table.reclaim("l", 1)
    assert table.take_freed() == [FreedLease("l", LeaseState.RECLAIMED, BLOCKS, HELD)]


def test_among_equals_the_least_recently_used_is_worth_least() -> None:
    """Granting and reading are uses; waiting is none."""
    table = table_with_lease()
    table.grant("m", HELD, BLOCKS, 1, TERM)
    assert table.least_worth() == "l"
    claim(table, "c", 2)
    assert table.least_worth() == "m"
    table.release("c", 3)
    assert table.least_worth() == "m"


def test_live_work_takes_what_saves_least_block_for_block() -> None:
    """Worth is chance x tokens / blocks: a router's word counts at once, and no word is an even chance."""
    table = table_with_lease()
    table.grant("sparse", build_chain(KEY, ROOT, TOKENS[:100]), BLOCKS, 0, TERM)
    assert table.least_worth() == "sparse"
    table.renew("sparse", 1, TERM, 1000)
    table.renew("l", 1, TERM)
    assert table.least_worth() == "l"  # 500 x 200 / 26 are no more than 1000 x 100 / 26, and granted first
    table.renew("sparse", 1, TERM, 980)
    assert table.least_worth() == "sparse"
    table.renew("l", 1, TERM, 480)
    assert table.least_worth() == "l"
    table.grant("hopeless", HELD, BLOCKS, 1, TERM, chance=0)
    assert table.least_worth() == "hopeless"
    with pytest.raises(ValueError, match="permille"):
        table.renew("l", 1, TERM, 1001)
    table.check_integrity()


def test_renewal_never_passes_the_ttl_since_the_last_use() -> None:
    """However often the router renews, an unused lease ends at its TTL; a claim or a release is a use."""
    table = table_with_lease()
    for now_ns in range(0, TTL, TERM // 2):
        assert table.renew("l", now_ns, TERM)
    assert table.deadline_ns("l") == TTL
    claim(table, "c", TTL - 2)
    table.release("c", TTL - 1)
    assert table.renew("l", TTL - 1, 10 * TTL)
    assert table.deadline_ns("l") == TTL - 1 + TTL


def test_a_claim_that_times_out_was_a_use() -> None:
    """The TTL counts from when the claim was made, also if its reader was never heard of again."""
    table = table_with_lease()
    claim(table, "c", TERM - 20)
    table.advance(TERM - 20 + CLAIM_TERM)
    assert table.claim_count() == 0
    assert table.renew("l", TERM - 1, 10 * TTL)
    assert table.deadline_ns("l") == TERM - 20 + TTL


def test_the_next_deadline_is_the_earliest_of_all() -> None:
    """A claim's deadline wakes the table as a lease's does."""
    table = table_with_lease()
    assert table.next_deadline_ns() == TERM
    claim(table, "c", 5)
    assert table.next_deadline_ns() == 5 + CLAIM_TERM
    table.release("c", 6)
    assert table.next_deadline_ns() == TERM


def test_renewal_never_shortens() -> None:
    """A renewal that was overtaken by a later one changes nothing."""
    table = table_with_lease()
    assert table.renew("l", 10, TERM)
    assert table.renew("l", 10, 1)
    assert table.deadline_ns("l") == 10 + TERM


def test_a_full_table_gives_the_blocks_back_at_once() -> None:
    """A lease that finds no room is not held, and its references still come home through `take_freed`."""
    table = table_with_lease(max_leases=1)
    assert not table.grant("m", HELD, BLOCKS, 0, TERM)
    assert table.take_freed() == [FreedLease("m", LeaseState.RECLAIMED, BLOCKS, HELD)]
    assert len(table) == 1
    table.check_integrity()


def test_claims_are_bounded() -> None:
    """One claim more than `max_claims` is refused, until one ends."""
    table = table_with_lease(max_claims=2)
    assert isinstance(claim(table, "c1", 0), ClaimGranted)
    assert isinstance(claim(table, "c2", 0), ClaimGranted)
    assert claim(table, "c3", 0) == ClaimRefused(RefusalReason.TOO_MANY_CLAIMS)
    table.release("c1", 0)
    assert isinstance(claim(table, "c3", 0), ClaimGranted)


def test_counts_and_drop_all() -> None:
    """Live leases are counted as they are, ended ones for ever; a dropped one counts while it is read."""
    table = table_with_lease()
    table.grant("m", HELD, BLOCKS, 0, TERM)
    claim(table, "c", 0)
    assert table.held_blocks == 52
    assert table.drop_all(0) == 2
    assert table.counts() == {
        LeaseState.GRANTED: 0,
        LeaseState.CLAIMED: 1,
        LeaseState.EXPIRED: 0,
        LeaseState.RELEASED: 1,
        LeaseState.RECLAIMED: 0,
    }
    assert table.held_blocks == 26


def test_totals() -> None:
    """What came of grants, renewals and claims is counted, each once."""
    table = table_with_lease(max_leases=1)
    table.grant("m", HELD, BLOCKS, 0, TERM)
    table.renew("l", 1, TERM)
    table.renew("m", 1, TERM)
    claim(table, "c", 1)
    claim(table, "c", 1)
    totals = table.totals
    assert (totals.granted, totals.not_held, totals.renewed, totals.renewals_lost) == (2, 1, 1, 1)
    assert {name: count for name, count in totals.claims.items() if count} == {
        "granted": 1,
        "duplicate_claim": 1,
    }
    assert totals.claims.keys() == {"granted", *RefusalReason}


def test_held_memory_is_counted_over_time() -> None:
    """Blocks times nanoseconds, up to the moment at which they came out."""
    table = table_with_lease()
    table.grant("m", HELD, BLOCKS, 10, TERM)
    assert table.held_block_ns(10) == 26 * 10
    table.drop("m", 15)
    assert table.held_block_ns(20) == 26 * 20 + 26 * 5
    assert table.held_block_ns(TERM) == table.held_block_ns(5 * TERM) == 26 * TERM + 26 * 5


def test_a_block_that_two_leases_hold_is_one_block() -> None:
    """Counted by references it is two."""
    table = table_with_lease()
    held, references = table.block_ids(), table.held_blocks
    table.grant("m", HELD, BLOCKS, 10, TERM)
    assert table.block_ids() == held == {block for group in BLOCKS for block in group}
    assert table.held_blocks == 2 * references


def test_an_ended_lease_may_be_granted_again() -> None:
    """Its blocks may still hold what they held: the same id, claimed as before."""
    table = table_with_lease()
    table.reclaim("l", 1)
    assert claim(table, "c", 1) == ClaimRefused(RefusalReason.UNKNOWN_LEASE)
    table.take_freed()
    assert table.grant("l", HELD, BLOCKS, 2, TERM)
    assert isinstance(claim(table, "c", 2), ClaimGranted)


def test_what_is_over_is_void() -> None:
    """A drop may say that nobody will ask again, also a later one; the blocks still wait for the reader."""
    table = table_with_lease()
    table.grant("m", HELD, BLOCKS, 0, TERM)
    claim(table, "c", 0)
    assert table.drop("l", 0)
    assert not table.drop("l", 0, is_over=True)
    assert table.drop("m", 0, is_over=True)
    assert not table.drop("n", 0, is_over=True)
    table.release("c", 1)
    assert [(freed.lease_id, freed.is_void) for freed in table.take_freed()] == [("m", True), ("l", True)]


def test_dropping_everything_voids_it() -> None:
    """What was dropped because the memory is not what it was is told from a conversation that is over."""
    table = table_with_lease()
    table.grant("m", HELD, BLOCKS, 0, TERM)
    table.grant("n", HELD, BLOCKS, 0, TERM)
    claim(table, "c", 0)
    table.drop("l", 0)
    table.drop("m", 0)
    table.drop_all(1)
    table.release("c", 2)
    assert [(freed.lease_id, freed.is_void) for freed in table.take_freed()] == [
        ("m", False),
        ("n", True),
        ("l", True),
    ]


def test_a_clock_that_steps_back_shortens_nothing() -> None:
    """Two threads that read the clock and lock in the other order do not end a claim early."""
    table = table_with_lease()
    table.advance(50)
    claim(table, "c", 45)
    table.drop("l", 45)
    table.advance(59)
    assert table.take_freed() == []


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"lease_id": "l"}, "there already"),
        ({"blocks": (BLOCKS[0], BLOCKS[1][:12])}, "need 13 blocks"),
        ({"blocks": ()}, "need 13 blocks"),
        ({"term_ns": 0}, "positive"),
        ({"chance": -1}, "permille"),
    ],
)
def test_refuses_a_lease_that_cannot_be(change: dict[str, object], match: str) -> None:
    """A lease id in use, too few blocks for the tokens, or no term: a bug of the caller, and said so."""
    table = table_with_lease()
    lease = {"lease_id": "m", "chain": HELD, "blocks": BLOCKS, "now_ns": 0, "term_ns": TERM} | change
    with pytest.raises(ValueError, match=match):
        table.grant(**lease)  # type: ignore[arg-type]
    table.check_integrity()
    assert len(table) == 1


def test_bounds_must_be_positive() -> None:
    """A table without room or time is a mistake in the configuration."""
    with pytest.raises(ValueError, match="positive"):
        LeaseTable(0, TTL, CLAIM_TERM, 1, 1)


def test_no_event_leads_out_of_a_final_state() -> None:
    """The table has no move from a final state, and none that takes a claimed lease's blocks away."""
    for state, event in product(FINAL, LeaseEvent):
        assert (state, event) not in TRANSITIONS
    assert not any(
        state is LeaseState.CLAIMED and after in FINAL for (state, _), after in TRANSITIONS.items()
    )


def test_thousands_of_leases_stay_cheap() -> None:
    """10,000 leases are granted, renewed, claimed and expired: a scan of the table for each takes minutes."""
    table = LeaseTable(BLOCK, TTL, CLAIM_TERM, 10_000, 10_000)
    for number in range(10_000):
        table.grant(f"l{number}", HELD, BLOCKS, number // 1_000, TERM)
        table.renew(f"l{number}", number // 1_000, TERM + 1)
        table.claim(f"l{number}", f"c{number}", HELD, "r", number // 1_000)
        table.next_deadline_ns()
    table.advance(10 * TTL)
    assert len(table.take_freed()) == 10_000
    assert table.next_deadline_ns() is None
