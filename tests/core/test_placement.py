"""The engines that a turn looks at: those that may be asked, the known ones among them, never all of many."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloop.core.decision import DECODE, PREFILL, AppendLimits, Ask, Option
from kvloop.core.load import Work
from kvloop.core.placement import WINDOW, Eligible, Placement
from kvloop.core.policy import POLICIES, Kv, Policy, Sight

EVERYONE = Eligible(lambda _: True, lambda _: True)


class Watching:
    """A policy that remembers what it was shown."""

    def __init__(self) -> None:
        self.shown: list[Sight] = []

    def choose(self, ask: Ask, sight: Sight) -> list[Option]:
        """As `kv` does."""
        self.shown.append(sight)
        return Kv().choose(ask, sight)


def fleet(prefill: int, decode: int, policy: Policy | None = None) -> Placement:
    """Engines p0.. and d0.."""
    placement = Placement(policy or Kv(), AppendLimits())
    for number in range(prefill):
        placement.add(f"p{number}", PREFILL)
    for number in range(decode):
        placement.add(f"d{number}", DECODE)
    placement.check_integrity()
    return placement


def but_not(*names: str) -> Eligible:
    """All are worth trying but these."""
    return Eligible(lambda _: True, lambda name: name not in names)


def test_a_turn_looks_at_a_few_and_at_those_it_knows() -> None:
    """Of ten thousand engines; and over the turns at all of them."""
    policy = Watching()
    placement = fleet(5000, 5000, policy)
    ask = Ask(100, 90, "d4999", True, 80, "p4000")
    for _ in range(2500):
        placement.choose(ask, 0, EVERYONE)
    for sight in policy.shown:
        assert len(sight.prefill) <= WINDOW + 1
        assert len(sight.decode) <= WINDOW + 1
        assert any(load.name == "p4000" for load in sight.prefill)
        assert any(load.name == "d4999" for load in sight.decode)
    seen = Counter(load.name for sight in policy.shown for load in sight.prefill)
    assert len(seen) > 2500


def test_strangers_take_turns() -> None:
    """Where nothing speaks for one engine, all get as many."""
    placement = fleet(3, 3)
    chosen = [placement.choose(Ask(100), 0, EVERYONE)[0] for _ in range(30)]
    assert set(Counter(way.prefill for way in chosen).values()) == {10}


def test_the_last_resort_is_for_decode_alone() -> None:
    """An engine that just failed is asked to decode where there is no other, never to prefill; one that
    cannot serve the request is asked for nothing."""
    placement = fleet(1, 1)
    ways = placement.choose(Ask(100), 0, but_not("p0", "d0"))
    assert [(way.prefill, way.decode) for way in ways] == [(None, "d0")]
    nobody = Eligible(lambda _: False, lambda _: True)
    assert placement.choose(Ask(100), 0, nobody) == []
    assert placement.choose_decode(Ask(9), 0, nobody, (), prefill="p0", last_resort=True) is None


def test_engines_come_and_go() -> None:
    """One that is gone is asked no more; what it has under way is still given back, to nobody's harm."""
    placement = fleet(2, 2)
    load = placement["p1"]
    job = load.begin(0, 10, 10)
    placement.remove("p1")
    assert {placement.choose(Ask(9), 0, EVERYONE)[0].prefill for _ in range(9)} == {"p0"}
    load.leave(job, 5)
    placement["p1"].begin(0, 10, 10)
    placement.add("p1", PREFILL)
    assert placement["p1"].queued_tokens == 0
    placement.check_integrity()


def test_one_engine_may_have_both_roles() -> None:
    """With one book for both."""
    placement = fleet(0, 0)
    placement.add("b", PREFILL)
    placement.add("b", DECODE)
    way = placement.choose(Ask(100), 0, EVERYONE)[0]
    assert (way.prefill, way.decode) in {("b", "b"), (None, "b")}
    placement.remove("b")
    placement.check_integrity()
    assert placement.choose(Ask(100), 0, EVERYONE) == []


@pytest.mark.parametrize("name", POLICIES)
@given(
    prefill=st.integers(0, 6),
    decode=st.integers(0, 6),
    out=st.sets(st.sampled_from(["p0", "p1", "d0", "d1"])),
    holder=st.sampled_from([None, "d0", "d1", "d5", "gone"]),
    computed_at=st.sampled_from([None, "p0", "p1", "gone"]),
)
def test_every_policy_chooses_among_those_that_may_be_asked(
    name: str, prefill: int, decode: int, out: set[str], holder: str | None, computed_at: str | None
) -> None:
    """And finds a way wherever there is one."""
    placement = fleet(prefill, decode, POLICIES[name]())
    ask = Ask(2000, 1500 if holder else 0, holder, holder is not None, 1400, computed_at)
    ways = placement.choose(ask, 0, but_not(*out))
    assert bool(ways) is bool(decode)
    usable = {f"d{number}" for number in range(decode)} - out
    for way in ways:
        assert way.prefill is None or way.prefill not in out
        assert way.decode in (usable or {f"d{number}" for number in range(decode)})
    other = placement.choose_prefill(ask, 0, but_not(*out), ("p0",))
    assert (other is None) is (decode == 0 or not {f"p{n}" for n in range(1, prefill)} - out)
    assert other not in {*out, "p0"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [("round-robin", {"d0": 4, "d1": 4}), ("sticky", {"d1": 8}), ("least-loaded", {"d0": 8})],
)
def test_policies_differ(name: str, expected: dict[str, int]) -> None:
    """One goes round, one stays where it was, one looks for the least under way."""
    placement = fleet(2, 2, POLICIES[name]())
    placement["d1"].running = 3
    ask = Ask(2000, 1500, "d1", True)
    chosen = Counter(
        placement.choose_decode(ask, 0, EVERYONE, (), prefill="p0", last_resort=True) for _ in range(8)
    )
    assert chosen == expected


@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize("name", ["round-robin", "sticky", "kv"])
def test_strangers_take_turns_at_decode_too(name: str, at_once: int) -> None:
    """One after the other, and where several prompts are chosen for before the first one is computed."""
    placement = fleet(2, 2, POLICIES[name]())
    prefills, decodes = Counter[str | None](), Counter[str | None]()
    for _ in range(8 // at_once):
        asked = [placement.choose(Ask(100), 0, EVERYONE)[0].prefill for _ in range(at_once)]
        prefills.update(asked)
        decodes.update(
            placement.choose_decode(Ask(100), 0, EVERYONE, (), prefill=prefill, last_resort=True)
            for prefill in asked
        )
    assert prefills == {"p0": 4, "p1": 4}
    assert decodes == {"d0": 4, "d1": 4}


def test_what_was_learned_goes_with_the_engine() -> None:
    """One that comes back under the same name is believed to be like the others."""
    placement = fleet(2, 1)
    for _ in range(30):
        placement.costs.computed(PREFILL, "p0", Work(1, 1000, 0, 9_000_000_000))
        placement.costs.computed(PREFILL, "p1", Work(1, 1000, 0, 100_000_000))
    slow_ns = placement.costs.compute_ns(PREFILL, "p0", 1000, 0)
    placement.remove("p0")
    placement.add("p0", PREFILL)
    assert placement.costs.compute_ns(PREFILL, "p0", 1000, 0) < slow_ns / 2
