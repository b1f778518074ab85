"""Legs against each other, reckoned by hand; and where two answers part."""

import pytest

from kvloop.bench.load.figures import figures_of
from kvloop.bench.load.mismatch import MAX_TOLD_EACH, parting
from kvloop.bench.load.pairs import ALL_TURNS, LATER_TURNS, compared
from kvloop.bench.load.record import Request
from tests.bench.load.made_up import asked, run_of


def test_each_turn_by_the_same_turn() -> None:
    """Pairs go by round, conversation and turn; who has no counterpart is in no ratio."""
    base = [
        asked("aggregated", 2, first_ms=1.0, round=1),
        asked("aggregated", 0, first_ms=100.0),
        asked("aggregated", 1, first_ms=10.0),
        asked("aggregated", 2, first_ms=20.0),
    ]
    ours = [
        asked("kvloop", 0, first_ms=100.0, prompt_tokens=600),
        asked("kvloop", 1, first_ms=30.0, prompt_tokens=600),
        asked("kvloop", 2, first_ms=40.0, prompt_tokens=2500),
        asked("kvloop", 2, first_ms=7.0, conversation="c1"),
        asked("kvloop", 3, first_ms=7.0),
    ]
    found = {one.part: one for one in compared({"aggregated": base, "kvloop": ours})}
    assert list(found) == [ALL_TURNS, LATER_TURNS, "0.5k-1k", "2k-4k"]
    every, later = found[ALL_TURNS], found[LATER_TURNS]
    assert (every.n, every.median_ratio, every.q1, every.q3) == (3, 2.0, 1.5, 2.5)
    assert (every.ratio_of_medians, every.distance_ms) == (2.0, 20.0)
    assert (later.n, later.median_ratio) == (2, 2.5)
    assert later.ratio_of_medians == pytest.approx(35 / 15)
    assert (found["0.5k-1k"].n, found["0.5k-1k"].median_ratio) == (1, 3.0)


def test_every_base_that_is_there() -> None:
    """The floor, one-way and upstream, each against all others; the first leg where none of them is."""

    def pairs(*names: str) -> set[tuple[str, str]]:
        legs = {name: [asked(name, first_ms=5.0)] for name in names}
        return {(one.leg, one.base) for one in compared(legs)}

    floor, upstream = "aggregated", "upstream"
    assert pairs("kvloop", upstream, floor) == {
        ("kvloop", floor),
        (upstream, floor),
        ("kvloop", upstream),
        (floor, upstream),
    }
    assert pairs("mine", "theirs") == {("theirs", "mine")}
    assert pairs("kvloop") == set()


def test_a_repeated_turn_is_paired_once() -> None:
    """The first of each side counts, and a time of zero divides nothing."""
    base = [asked("aggregated", 0, first_ms=0.0), asked("aggregated", 1, first_ms=4.0)]
    ours = [asked("b", 0, first_ms=1.0), asked("b", 1, first_ms=8.0), asked("b", 1, first_ms=800.0)]
    found = compared({"aggregated": base, "b": ours})
    assert [(one.n, one.median_ratio) for one in found] == [(1, 2.0), (1, 2.0)]


@pytest.mark.parametrize(
    ("one", "other", "at"),
    [("abc", "abd", 2), ("abc", "abcd", 3), ("", "x", 0), ("äb", "äc", 1), ("x", "", 0)],
)
def test_where_texts_part(one: str, other: str, at: int) -> None:
    """The first character that differs, or that only one has."""
    assert parting(one, other) == at


def _told(leg: str, text: str | None, agrees: bool | None = True, turn: int = 1) -> Request:
    return asked(leg, turn, text=text, agrees=agrees)


def test_a_mismatch_is_told_with_its_place() -> None:
    """Against the floor where that answered, with what both said before it and how they went on."""
    records = [
        run_of("one-way", "aggregated", "kvloop"),
        _told("one-way", "the cat sat here"),
        _told("aggregated", "the cat sat here"),
        _told("kvloop", "the cat ate it", agrees=False),
        asked("aggregated", 1, text="another conversation", conversation="c9"),
    ]
    (found,) = figures_of(records).mismatches
    assert (found.leg, found.against, found.conversation, found.turn) == ("kvloop", "aggregated", "c0", 1)
    assert (found.at, found.same, found.here, found.there) == (8, "the cat ", "ate it", "sat here")


def test_a_mismatch_is_told_against_one_that_is_not_wrong_itself() -> None:
    """Where the floor did not answer: one that nobody says differs, and of those one that kept its text."""
    records = [
        run_of("a", "b", "c", "kvloop"),
        _told("a", "the dog", False),
        _told("b", None),
        _told("c", "the cat"),
    ]
    found = figures_of([*records, _told("kvloop", "the cow", False)]).mismatches
    assert [(one.leg, one.against, one.at) for one in found] == [("a", "c", 4), ("kvloop", "c", 5)]


def test_a_mismatch_without_texts_is_told_all_the_same() -> None:
    """Where no text was kept, or nobody else answered."""
    records = [
        run_of("a", "b"),
        _told("a", None),
        _told("b", "x", agrees=False),
        _told("b", "y", False, turn=2),
    ]
    first, second = figures_of(records).mismatches
    assert (first.against, first.at) == ("a", None)
    assert (second.against, second.at) == (None, None)


def test_mismatches_and_failures_are_told_up_to_a_bound_and_counted_beyond_it() -> None:
    """Every leg has its own examples, however many another has."""
    records = [run_of("a", "b")]
    records += [_told("a", "x", False, turn) for turn in range(50)]
    records += [asked("a", turn, status=500) for turn in range(50)]
    records += [_told("b", "y", False), asked("b", 2, status=0, error="refused")]
    figures = figures_of(records)
    assert [leg.differing for leg in figures.legs] == [50, 1]
    assert [leg.failed for leg in figures.legs] == [50, 1]
    told = [one.leg for one in figures.mismatches], [one.leg for one in figures.failures]
    assert told == (["a"] * MAX_TOLD_EACH + ["b"],) * 2
    assert figures.failures[-1].error == "refused"
