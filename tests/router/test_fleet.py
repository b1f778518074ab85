"""Who is in the fleet: sources that change their word, draining, roles, ranks; nothing is cut short."""

from collections import Counter
from unittest import mock

import pytest

from kvloop.core.decision import AppendLimits, Ask
from kvloop.core.policy import LeastLoaded
from kvloop.errors import UserError
from kvloop.router.engine import Engine, EngineRules
from kvloop.router.fleet import Fleet, FleetEvent
from kvloop.router.membership import Membership
from kvloop.router.target import MAX_TARGETS, Role, Target, check_url
from tests.router.harness import in_loop


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> int:
        return int(self.now_s * 1e9)


def p(number: int, **more: object) -> Target:
    """A prefill target."""
    return Target(f"http://p:{number}", Role.PREFILL, **more)  # type: ignore[arg-type]


def d(number: int, **more: object) -> Target:
    """A decode target."""
    return Target(f"http://d:{number}", Role.DECODE, **more)  # type: ignore[arg-type]


def made(*targets: Target, slow_start_s: float = 10.0) -> tuple[Membership, Clock, list[tuple[str, str]]]:
    """A fleet of these, its clock, and what happens to it from now on."""
    clock, heard = Clock(), list[tuple[str, str]]()
    fleet = Fleet([], [], clock, LeastLoaded(), AppendLimits())
    membership = Membership(fleet, EngineRules(slow_start_s=slow_start_s))
    membership.set("flags", targets)
    membership.fleet.listeners.append(lambda event, engine: heard.append((event.value, engine.name)))
    return membership, clock, heard


def chosen(fleet: Fleet) -> str | None:
    """The decode engine of a turn that nobody has seen."""
    ways = fleet.choose(Ask(100))
    return ways[0].decode if ways else None


def names(membership: Membership) -> list[str]:
    """Who takes requests."""
    return [engine.name for engine in membership.fleet.engines()]


def test_a_source_changes_its_word() -> None:
    """Whom it names no more leaves, whom it names anew joins, and who stays is the same engine."""
    membership, _, heard = made(d(1), d(2))
    stayed = membership.fleet.find("http://d:2")
    membership.set("flags", [d(2), d(3)])
    assert names(membership) == ["http://d:2", "http://d:3"]
    assert membership.fleet.find("http://d:2") is stayed
    assert heard == [("leaving", "http://d:1"), ("left", "http://d:1"), ("joined", "http://d:3")]


def test_sources_do_not_take_from_each_other() -> None:
    """An engine is there while any source names it; named as prefill and as decode it is both, once."""
    membership, _, _ = made(p(1), d(1))
    membership.set("dns", [Target("http://p:1", Role.DECODE)])
    both = membership.fleet.find("http://p:1")
    assert both is not None
    assert both.role is Role.BOTH
    assert list(membership.fleet.prefill) == ["http://p:1"]
    assert list(membership.fleet.decode) == ["http://d:1", "http://p:1"]
    assert len(membership.fleet.engines()) == 2
    membership.set("flags", [d(1)])
    assert both.role is Role.DECODE
    assert list(membership.fleet.prefill) == []
    membership.set("dns", [])
    assert names(membership) == ["http://d:1"]


@in_loop
async def test_work_in_flight_finishes() -> None:
    """Who is removed stays until the last request, and whoever reads what it computed, is done."""
    membership, _, heard = made(p(1), d(1))
    fleet = membership.fleet
    engine = fleet.prefill["http://p:1"]
    with engine.slot():
        membership.set("flags", [d(1)])
        assert fleet.choose_prefill(Ask(100), ()) is None
        assert fleet.find("http://p:1") is engine
        engine.hold()
    assert heard == [("leaving", "http://p:1")]
    assert membership.listed()[-1]["state"] == "draining"
    engine.let_go()
    assert heard == [("leaving", "http://p:1"), ("left", "http://p:1")]
    assert fleet.find("http://p:1") is None


@in_loop
async def test_back_before_it_left() -> None:
    """Who is named again while it still finishes is the same engine, and does not leave at the end."""
    membership, _, heard = made(d(1), d(2))
    engine = membership.fleet.decode["http://d:1"]
    with engine.slot():
        membership.set("flags", [d(2)])
        membership.set("flags", [d(1, weight=2.0), d(2)])
    assert membership.fleet.decode["http://d:1"] is engine
    assert engine.target.weight == 2.0
    assert [event for event, _ in heard] == ["leaving", "joined"]


@in_loop
async def test_draining() -> None:
    """Who is drained is in no choice, even as a last resort, whatever the sources say."""
    membership, _, _ = made(d(1), d(2), slow_start_s=0.0)
    fleet = membership.fleet
    with fleet.decode["http://d:1"].slot():
        assert membership.drain("http://d:1/") == ["http://d:1"]
        membership.set("flags", [d(1), d(2)])
        assert {chosen(fleet) for _ in range(4)} == {"http://d:2"}
        assert [row["state"] for row in membership.listed()] == ["draining", "serving"]
    assert [row["state"] for row in membership.listed()] == ["drained", "serving"]
    assert membership.undrain("http://d:1") == ["http://d:1"]
    assert {chosen(fleet) for _ in range(4)} == {"http://d:1", "http://d:2"}
    membership.drain("http://d:2")
    membership.set("flags", [d(1)])
    membership.set("flags", [d(1), d(2)])
    assert sorted(names(membership)) == ["http://d:1", "http://d:2"], "forgotten with its engine"
    assert membership.drain("http://nobody") == []


def test_ranks_are_targets() -> None:
    """Each rank has its own name, load and header, and is drained alone or with its server."""
    membership, _, _ = made(d(1, rank=0), d(1, rank=1))
    zero, one = membership.fleet.engines()
    assert (zero.name, one.name) == ("http://d:1#0", "http://d:1#1")
    assert one.lines == b"x-data-parallel-rank: 1\r\n"
    zero.in_flight = 9
    assert one.in_flight == 0
    assert membership.drain("http://d:1#1") == ["http://d:1#1"]
    assert names(membership) == ["http://d:1#0"]
    assert membership.drain("http://d:1") == ["http://d:1#0", "http://d:1#1"]
    assert names(membership) == []


def asked(fleet: Fleet, count: int, ask: Ask = Ask(100)) -> Counter[str]:  # noqa: B008
    """Who is chosen for so many turns, of engines that are all idle."""
    return Counter(fleet.choose(ask)[0].decode[-1] for _ in range(count))


def test_slow_start() -> None:
    """Who was there first gets its whole share; who joins, or is found again, a tenth of it at first."""
    membership, clock, _ = made(d(1))
    fleet = membership.fleet
    membership.set("dns", [])
    membership.set("dns", [d(2)])
    assert 8 <= asked(fleet, 200)["2"] <= 12, "of a tenth of all turns it takes half"
    assert asked(fleet, 20, Ask(100, held=90, holder="http://d:2", can_return=True))["2"] > 2
    clock.now_s += 5.0
    assert 45 <= asked(fleet, 200)["2"] <= 55
    clock.now_s += 5.0
    assert 95 <= asked(fleet, 200)["2"] <= 105
    first = fleet.decode["http://d:1"]
    for passed in (False, False, False, True, True):
        first.probed(passed, clock.now_s)
    fleet.restarted(first)
    assert 8 <= asked(fleet, 200)["1"] <= 12


def test_who_is_new_and_alone() -> None:
    """Where there is nobody else, or nobody else that is well, a new engine gets every turn."""
    membership, clock, _ = made()
    membership.set("flags", [d(1)])
    assert asked(membership.fleet, 20) == {"1": 20}
    membership.set("flags", [d(1), d(2)])
    membership.fleet.decode["http://d:1"].failed(clock.now_s)
    assert asked(membership.fleet, 20) == {"2": 20}


def test_weights() -> None:
    """An engine of half the weight is looked at in half the turns."""
    membership, _, _ = made(d(1), d(2, weight=4.0), d(3, weight=4.0))
    seen = asked(membership.fleet, 400)
    assert seen["2"] + seen["3"] > 360
    assert 20 <= seen["1"] <= 40
    membership.set("flags", [d(1), d(2), d(3)])
    assert min(asked(membership.fleet, 300).values()) > 95


def test_probes_take_out_and_bring_back() -> None:
    """Whom the probes miss is in no choice, whatever requests do; found again, all is forgotten."""
    engine = Engine("http://d:1", "decode")
    for _ in range(3):
        engine.probed(False, 1.0)
    engine.answered()
    assert not engine.available(1.0)
    engine.failed(1.0)
    for _ in range(2):
        engine.probed(True, 1.0)
    assert engine.available(1.0)


def test_a_restart_is_heard_of() -> None:
    """Another incarnation of an engine is told once; the first one that is seen is none."""
    membership, _, heard = made(d(1))
    for incarnation in ("a", "a", "b", "b"):
        membership.fleet.saw_incarnation("http://d:1", incarnation)
    membership.fleet.saw_incarnation("http://nobody", "c")
    assert heard == [(FleetEvent.RESTARTED.value, "http://d:1")]


def test_a_fleet_is_bounded() -> None:
    """A source that names more than the bound, or all of them together, gets no more than that in."""
    membership, _, _ = made(d(1))
    membership.set("dns", (p(number) for number in range(MAX_TARGETS + 5)))
    assert len(names(membership)) == MAX_TARGETS
    assert membership.fleet.decode


@pytest.mark.parametrize("url", ["d:1", "http://d/v1", "http://u:k@d", "http://d#1", "http://d?x", "ftp://d"])
def test_what_is_no_url(url: str) -> None:
    """A URL that hides a key, a path or a rank is refused."""
    with pytest.raises(UserError, match="base URL"):
        check_url(url)


def test_uneven_shares_cost_no_more_in_a_large_fleet() -> None:
    """Whether a turn is anybody's is asked once per role, however many engines it is not meant for."""
    membership, _, _ = made(*[p(number, weight=0.01) for number in range(300)], p(300), d(0))
    fleet, asked_of = membership.fleet, 0
    honest = fleet._shares.take_part

    def counted(engine: Engine, now_s: float) -> bool:
        nonlocal asked_of
        asked_of += 1
        return honest(engine, now_s)

    with mock.patch.object(fleet._shares, "take_part", counted):
        fleet.choose(Ask(100))
    assert asked_of <= 2 * 302
