"""Placement: least in flight, affinity within bounds, and never an engine that is excluded."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvloop.core.placement import AFFINITY_SLACK_REQUESTS, Candidate, choose

fleets = st.lists(
    st.builds(Candidate, st.sampled_from("abcdef"), st.integers(0, 20), st.booleans()),
    max_size=6,
    unique_by=lambda one: one.name,
)


@given(
    fleets, st.integers(0, 100), st.none() | st.sampled_from("abcdefg"), st.sets(st.sampled_from("abcdef"))
)
def test_choice(fleet: list[Candidate], number: int, preferred: str | None, excluded: set[str]) -> None:
    """The chosen engine is usable, and no busier than the least busy one by more than affinity may cost."""
    usable = {one.name: one.in_flight for one in fleet if one.available and one.name not in excluded}
    chosen = choose(fleet, number, preferred, excluded)
    if not usable:
        assert chosen is None
        return
    assert chosen in usable
    least = min(usable.values())
    slack = AFFINITY_SLACK_REQUESTS if chosen == preferred else 0
    assert usable[chosen] <= least + slack
    if preferred in usable and usable[preferred] <= least + AFFINITY_SLACK_REQUESTS:
        assert chosen == preferred


def test_affinity_gives_way() -> None:
    """The preferred engine is kept up to the slack, and not one request beyond it."""
    idle = Candidate("idle", 0)
    assert choose([idle, Candidate("home", AFFINITY_SLACK_REQUESTS)], 0, "home") == "home"
    assert choose([idle, Candidate("home", AFFINITY_SLACK_REQUESTS + 1)], 0, "home") == "idle"


def test_ties_go_round() -> None:
    """Equally busy engines take turns."""
    fleet = [Candidate(name, 3) for name in "abc"]
    counts = Counter(choose(fleet, number) for number in range(30))
    assert counts == {"a": 10, "b": 10, "c": 10}
