"""What a router renews, drops and lets go, lease by lease."""

import pytest

from kvloop.core.handle import LeaseRef
from kvloop.core.keeper import Ending, Keeper, KeeperTimes, SendDrop, SendRenew
from kvloop.core.life_table import OBSERVATION
from kvloop.core.returns import ReturnModel

S = 1_000_000_000
ADDRESS = ("d0", 5570)
TIMES = KeeperTimes()


def make_keeper(**options: object) -> Keeper:
    """A keeper whose model knows nothing yet."""
    return Keeper(ReturnModel(TIMES.ttl_ns, 100 * S), TIMES, **options)  # type: ignore[arg-type]


def ref(name: str, address: tuple[str, int] = ADDRESS) -> LeaseRef:
    """A lease of 100 tokens and a term of a minute."""
    return LeaseRef(name, "i1", address, 100, 60_000)


def sent(keeper: Keeper, until_s: float, limit: int = 1000) -> list[tuple[float, SendRenew | SendDrop]]:
    """All that is sent until then, with when."""
    sends: list[tuple[float, SendRenew | SendDrop]] = []
    while (due_ns := keeper.next_due_ns()) is not None and due_ns <= until_s * S:
        sends += [(due_ns / S, send) for send in keeper.due(due_ns, limit)]
        keeper.check_integrity()
    return sends


def test_a_fixed_keeper_renews_until_the_ttl() -> None:
    """On every tick, all of an engine's leases in one message, and never past the TTL since the last use."""
    keeper = make_keeper(fixed=True)
    for number in range(3):
        keeper.filed(ref(f"l{number}"), "t", Ending.STOP, number * S)
    sends = sent(keeper, 10_000)
    assert [at_s for at_s, _ in sends][:3] == [20, 40, 60]
    for at_s, send in sends:
        assert isinstance(send, SendRenew)
        assert send.address == ADDRESS
        for lease_id, term_ns, _ in send.leases:
            assert at_s * S + term_ns <= int(lease_id[1:]) * S + TIMES.ttl_ns
    assert len(sends[0][1].leases) == 3  # type: ignore[union-attr]
    assert len(keeper) == keeper.held == 0
    assert keeper.counts.expired == 3


def test_a_client_may_have_it_let_go_at_once() -> None:
    """A wish of 0 seconds: the lease is dropped within a second, and never renewed."""
    keeper = make_keeper()
    keeper.filed(ref("l"), "t", Ending.TOOL_CALLS, 0, keep_ns=0)
    assert keeper.held == 0
    assert sent(keeper, 10_000) == [(1.0, SendDrop(ADDRESS, ("l",)))]


def test_a_lease_is_kept_on_demand() -> None:
    """So long from then, whatever the model says, within the TTL; what was let go is not fetched back."""
    keeper = make_keeper()
    keeper.filed(ref("l"), "t", Ending.STOP, 0)
    assert keeper.keep("l", 10_000 * S, 10 * S)
    renewals = [send for _, send in sent(keeper, TIMES.ttl_ns / S) if isinstance(send, SendRenew)]
    assert len(renewals) >= TIMES.ttl_ns // TIMES.term_ns
    assert len(keeper) == 0
    keeper.filed(ref("m"), "t", Ending.STOP, 1000 * S)
    assert keeper.keep("m", 0, 1001 * S)
    assert keeper.held == 0
    assert not keeper.keep("m", 60 * S, 1002 * S)
    assert not keeper.keep("unknown", 60 * S, 1002 * S)
    keeper.check_integrity()


def test_what_is_superseded_is_dropped_when_nobody_uses_it() -> None:
    """A fork in flight keeps the lease; the last one that is through with it lets it go."""
    keeper = make_keeper(fixed=True)
    keeper.filed(ref("l"), "t", Ending.STOP, 0)
    keeper.used("l", S)
    keeper.used("l", 2 * S)
    keeper.done("l", 3 * S)
    keeper.ended("l", 3 * S)
    assert sent(keeper, 10) == []
    keeper.done("l", 10 * S)
    assert sent(keeper, 100) == [(11.0, SendDrop(ADDRESS, ("l",), is_over=True))]
    assert len(keeper) == 0


def test_what_only_shares_a_part_is_no_return() -> None:
    """It holds the lease while it is in flight; the wait for the conversation itself goes on as it was."""
    keeper = make_keeper(fixed=True)
    keeper.filed(ref("l"), "t", Ending.STOP, 0)
    keeper.used("l", S, returns=False)
    keeper.used("l", 2 * S, returns=False)
    assert keeper.counts.returned == 0
    keeper.done("l", 3 * S)
    assert sent(keeper, 60)[0] == (20.0, SendRenew(ADDRESS, (("l", TIMES.term_ns, 1000),)))
    keeper.done("l", 61 * S)
    keeper.used("l", 62 * S, returns=False)
    keeper.used("l", 63 * S)
    keeper.used("l", 64 * S)
    keeper.check_integrity()
    assert keeper.counts.returned == 1
    seen = keeper.model._everybody[Ending.STOP].table
    assert sum(seen.returns) == OBSERVATION
    assert seen.returns[keeper.model.bins.of(63 * S)] == OBSERVATION, (
        "the wait did not begin when the turn was filed"
    )


def test_what_shares_a_part_keeps_a_superseded_lease_too() -> None:
    """Dropped when the fork is through; the wait that was broken off is learned from once."""
    keeper = make_keeper(fixed=True)
    keeper.filed(ref("l"), "t", Ending.STOP, 0)
    keeper.used("l", S, returns=False)
    keeper.ended("l", 2 * S)
    assert sent(keeper, 10) == []
    keeper.done("l", 10 * S)
    assert sent(keeper, 100) == [(11.0, SendDrop(ADDRESS, ("l",), is_over=True))]
    assert len(keeper) == 0
    seen = keeper.model._everybody[Ending.STOP].table
    assert sum(seen.exposure) == OBSERVATION * keeper.model.bins.of(2 * S) + OBSERVATION // 2


def test_a_lease_that_a_claim_brought_back_is_renewed_within_its_new_term() -> None:
    """Decode had been told to drop it, so what it was told before counts no more."""
    keeper = make_keeper()
    keeper.filed(LeaseRef("l", "i1", ADDRESS, 100, 10_000), "t", Ending.TOOL_CALLS, 0, keep_ns=30 * S)
    assert sent(keeper, 40)[-1] == (31.0, SendDrop(ADDRESS, ("l",)))
    keeper.used("l", 41 * S)
    assert [at_s for at_s, _ in sent(keeper, 65)] == [46.0, 60.0]


def test_a_lease_that_a_claim_brought_back_for_less_than_an_interval_is_renewed_in_time() -> None:
    """Also where it had been renewed so that nothing was due before the next tick."""
    keeper = make_keeper()
    keeper.filed(LeaseRef("l", "i1", ADDRESS, 100, 2_000), "t", Ending.TOOL_CALLS, 19 * S, keep_ns=4 * S)
    assert [at_s for at_s, _ in sent(keeper, 30)] == [20.0, 24.0]
    keeper.used("l", 30 * S)
    assert sent(keeper, 32)[0] == (31.0, SendRenew(ADDRESS, (("l", TIMES.term_ns, 1000),)))


def test_a_lease_that_was_nearly_dropped_is_renewed_before_its_term_ends() -> None:
    """The drop had not been sent yet, so no claim has brought it back: its term is the old one."""
    keeper = make_keeper()
    keeper.filed(ref("l"), "t", Ending.TOOL_CALLS, 0, keep_ns=58 * S)
    assert sent(keeper, 58) == []
    keeper.used("l", 58 * S + S // 2)
    assert [at_s for at_s, _ in sent(keeper, 70)] == [59.25, 60.0]


def test_bounds_must_be_positive() -> None:
    """A keeper without room or time is a mistake in the configuration."""
    with pytest.raises(ValueError, match="positive"):
        make_keeper(max_leases=0)
    with pytest.raises(ValueError, match="positive"):
        KeeperTimes(ttl_ns=0)
    with pytest.raises(ValueError, match="outlast"):
        KeeperTimes(term_ns=20 * S)
