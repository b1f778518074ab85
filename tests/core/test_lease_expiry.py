"""Many terms end at one instant: so many leases expire with a call, and nobody gets what is due."""

from kvloop.core.chain import Identity, build_chain, root_digest
from kvloop.core.lease import ClaimGranted, ClaimRefused, LeaseState, LeaseTable, RefusalReason

KEY = bytes(32)
BLOCK, TTL, CLAIM_TERM, TERM, MANY, AT_ONCE = 16, 480, 20, 10, 30, 3
HELD = build_chain(KEY, root_digest(KEY, Identity("m", "", "", "", "a")), list(range(64)))
UNKNOWN = ClaimRefused(RefusalReason.UNKNOWN_LEASE)


def full_table(claimed: int = 0) -> LeaseTable:
    """Leases l0 to l29, all for the same term from 0; so many of them are claimed from 5 on."""
    table = LeaseTable(BLOCK, TTL, CLAIM_TERM, MANY, MANY, max_expiries=AT_ONCE)
    for number in range(MANY):
        assert table.grant(f"l{number}", HELD, (tuple(range(4 * number, 4 * number + 4)),), 0, TERM)
    for number in range(claimed):
        assert isinstance(table.claim(f"l{number}", f"c{number}", HELD, "r", 5), ClaimGranted)
    return table


def test_no_more_expire_with_a_call_than_the_bound() -> None:
    """Each call takes its share, at the same instant too; references come out with it, once."""
    table = full_table()
    freed: list[str] = []
    for left in range(MANY - AT_ONCE, -1, -AT_ONCE):
        table.advance(TERM)
        table.check_integrity()
        assert len(table) == left
        assert table.held_blocks == 4 * left
        taken = table.take_freed()
        assert len(taken) == AT_ONCE
        freed += [lease.lease_id for lease in taken]
    assert freed == [f"l{number}" for number in range(MANY)]
    table.advance(TERM)
    assert not table.is_behind
    assert table.take_freed() == []
    assert table.counts()[LeaseState.EXPIRED] == MANY


def test_whoever_names_one_finds_it_expired() -> None:
    """Claimed, renewed, dropped, reclaimed or looked up while the table is behind: it is over."""
    table = full_table()
    assert table.claim("l29", "c", HELD, "r", TERM) == UNKNOWN
    assert not table.renew("l28", TERM, TERM)
    assert not table.drop("l27", TERM)
    assert not table.reclaim("l26", TERM)
    assert table.state("l25") is None
    assert table.deadline_ns("l24") is None
    assert table.is_behind
    table.check_integrity()
    assert table.grant("l23", HELD, ((1, 2, 3, 4),), TERM, TERM), "its id is free again"
    while table.is_behind:
        table.advance(TERM)
    assert len(table) == 1
    freed = [lease.lease_id for lease in table.take_freed()]
    assert sorted(freed) == sorted(f"l{number}" for number in range(MANY))
    counts = table.counts()
    assert (counts[LeaseState.EXPIRED], counts[LeaseState.GRANTED]) == (MANY, 1)


def test_one_that_is_read_is_refused_to_others() -> None:
    """It waits for its reader; to a new one it is expired, whether the table knows it yet or not."""
    table = full_table(claimed=10)
    assert table.claim("l9", "c", HELD, "r", TERM) == ClaimRefused(RefusalReason.EXPIRED)
    assert table.release("c9", TERM)
    assert table.claim("l9", "c", HELD, "r", TERM) == UNKNOWN
    assert table.release("c8", TERM), "not yet marked"
    assert table.state("l8") is None
    table.check_integrity()


def test_a_full_table_first_lets_go_of_what_is_due() -> None:
    """Where those that expire with the call are still read by somebody, and make no room."""
    table = full_table(claimed=5)
    assert table.grant("new", HELD, ((1, 2, 3, 4),), TERM, TERM)
    assert len(table) <= MANY
    assert table.state("new") is LeaseState.GRANTED
    table.check_integrity()


def test_all_are_dropped_at_once() -> None:
    """Those that are due have expired; nothing is left to come."""
    table = full_table()
    assert table.grant("new", HELD, ((1, 2, 3, 4),), TERM - 1, TERM) is False, "the table is full"
    table.advance(TERM)
    assert table.drop_all(TERM) == 0
    assert (len(table), table.is_behind) == (0, False)
    assert len(table.take_freed()) == MANY + 1
