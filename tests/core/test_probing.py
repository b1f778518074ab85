"""Probes count only in a row, and slow start is a ramp."""

from hypothesis import given
from hypothesis import strategies as st

from kvloop.core.probing import ProbeEvent, ProbeGate, ProbeState
from kvloop.core.slow_start import FIRST_SHARE_PERMILLE, share_permille, takes_part


def test_rows() -> None:
    """Three misses in a row take an engine out, two passes bring it back; a broken row counts anew."""
    gate = ProbeGate(fall=3, rise=2)
    events = [gate.heard(one == "+") for one in "--+---+-++"]
    assert events == [*[None] * 5, ProbeEvent.FALL, None, None, None, ProbeEvent.RISE]
    assert gate.state is ProbeState.UP


@given(st.lists(st.booleans()), st.integers(1, 5), st.integers(1, 5))
def test_as_a_naive_one(passed: list[bool], fall: int, rise: int) -> None:
    """The gate is up or down as somebody says who looks at the whole row each time."""
    gate, up, since = ProbeGate(fall, rise), True, 0
    for index, one in enumerate(passed):
        gate.heard(one)
        needed = fall if up else rise
        row = passed[since : index + 1][-needed:]
        if len(row) == needed and all(it is not up for it in row):
            up, since = not up, index + 1
        assert (gate.state is ProbeState.UP) == up


def test_ramp() -> None:
    """The share grows from a tenth to the whole and never shrinks; without a ramp it is the whole."""
    shares = [share_permille(age, 1000) for age in range(0, 1200, 50)]
    assert shares[0] == FIRST_SHARE_PERMILLE
    assert shares == sorted(shares)
    assert share_permille(500, 1000) == 500
    assert shares[-1] == share_permille(0, 0) == 1000


@given(st.integers(0, 1000), st.integers(1, 10_000), st.integers(2, 9))
def test_turns_of_a_share(permille: int, first: int, engines: int) -> None:
    """Of any thousand turns in a row exactly the share are its own, whoever else.s turn each is."""
    taken = [turn for turn in range(first, first + 1000) if takes_part(turn, permille)]
    assert len(taken) == permille
    by_place = [sum(turn % engines == place for turn in taken) for place in range(engines)]
    assert max(by_place) - min(by_place) <= 2 * engines
