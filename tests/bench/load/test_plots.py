"""What is drawn: each plot's marks against the records that they are of; and fewer where there are many."""

import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloop.bench.load.figures import figures_of
from kvloop.bench.load.plots import plots_of
from kvloop.bench.load.record import Record
from kvloop.bench.load.thin import distribution, every_so_many, with_peaks
from kvloop.bench.plot import COLOURS, DASHES, HEIGHT
from tests.bench.load.made_up import MIB, asked, held, run_of, window

SVG = "{http://www.w3.org/2000/svg}"


def drawn(key: str, *records: Record) -> ET.Element:
    """The plot of that key."""
    roots = [ET.fromstring(svg) for svg in plots_of(figures_of(records), records)]
    return next(root for root in roots if root[0].get("id") == f"{key}-title")


def lines(root: ET.Element) -> list[list[tuple[float, float]]]:
    """The lines' points."""
    found = [node.get("points", "").split() for node in root.iter(f"{SVG}polyline")]
    return [[(float(x), float(y)) for x, y in (one.split(",") for one in points)] for points in found]


def texts(root: ET.Element) -> list[str]:
    """All that is written."""
    return [node.text or "" for node in root.iter(f"{SVG}text")]


def test_points_and_medians_by_length() -> None:
    """A point for each answered request, in its leg's colour, and a line through the lengths' medians."""
    records = [
        run_of("a", "b"),
        *(asked("a", turn, first_ms=ms, prompt_tokens=600) for turn, ms in enumerate((10.0, 20.0, 60.0))),
        asked("a", 3, first_ms=100.0, prompt_tokens=1500),
        asked("a", 4, first_ms=100.0, prompt_tokens=1500, status=500),
        asked("b", 0, first_ms=100.0, prompt_tokens=600),
    ]
    root = drawn("length", *records)
    paths = [node for node in root.iter(f"{SVG}path") if node.get("fill-opacity") == "0.4"]
    assert [path.get("fill") for path in paths] == list(COLOURS[:2])
    assert [path.get("d", "").count("M") for path in paths] == [4, 1]
    (ours, theirs) = lines(root)
    assert (len(ours), len(theirs)) == (2, 1)
    # 10 to 100 ms: the median of the short ones, 20, is 30 % of the way up, the other's at the top.
    assert ours[0][1] == pytest.approx(HEIGHT * 0.699, abs=1)
    assert ours[1][1] == pytest.approx(0, abs=0.1)


def test_prefill_is_stacked() -> None:
    """Computing from the axis on, reading back on top of it, for each leg and length."""
    records = [
        run_of("a", "b"),
        asked("a", prompt_tokens=600, compute_ms=30.0, transfer_ms=20.0),
        asked("b", prompt_tokens=600, compute_ms=50.0, transfer_ms=50.0),
        asked("b", prompt_tokens=600, compute_ms=900.0),
    ]
    bars = [node for node in drawn("split", *records).iter(f"{SVG}rect") if node.get("y") and node.get("x")]
    sides = [(float(node.get("y", "")), float(node.get("height", ""))) for node in bars]
    of_groups = [(top, HEIGHT - top - height) for top, height in sides if height != 11]
    # 100 ms are 300 high: each part's top from above, and how far from the axis it begins.
    assert of_groups == [(210, 0), (150, 90), (150, 0), (0, 150)]


def test_routes_have_their_legs_colour_and_their_own_dashes() -> None:
    """So that a leg is the same in all plots."""
    records = [run_of("a", "b")]
    for leg in "ab":
        records += [asked(leg, first_ms=5.0, route="return"), asked(leg, first_ms=7.0, route="prefill")]
    root = drawn("route", *records)
    nodes = list(root.iter(f"{SVG}polyline"))
    assert [node.get("stroke") for node in nodes] == [COLOURS[0]] * 2 + [COLOURS[1]] * 2
    dashes = [node.get("stroke-dasharray", "") for node in nodes]
    assert dashes == [DASHES[0], DASHES[1], DASHES[1], DASHES[2]]
    assert "a: return (1)" in texts(root)


def test_gaps_are_a_distribution() -> None:
    """It rises from the least to the most, and ends at a hundred."""
    (line,) = lines(drawn("between", run_of("a"), asked("a", between_ms=[30.0, 10.0, 20.0, 20.0])))
    assert [y for _, y in line] == pytest.approx([HEIGHT * share for share in (0.75, 0.5, 0.25, 0)])
    assert [x for x, _ in line] == sorted(x for x, _ in line)


def test_reuse_by_turn() -> None:
    """Percent of the prompt over the turn's number."""
    records = [asked("a", turn, prompt_tokens=100, cached_tokens=25 * turn) for turn in range(4)]
    (line,) = lines(drawn("reuse", run_of("a"), *records))
    assert [y for _, y in line] == pytest.approx([HEIGHT * share for share in (1, 0.75, 0.5, 0.25)])


def test_memory_over_a_legs_own_time() -> None:
    """Its windows one after the other, broken between them; the other leg's time is no part of it."""
    records = [
        run_of("a", "b"),
        held("a", 0.0, 0.0),
        held("a", 10.0, 10.0 * MIB),
        window("a", 10.0),
        held("b", 0.0, 5.0 * MIB),
        window("b", 500.0),
        held("a", 0.0, 10.0 * MIB, 1),
        held("a", 10.0, 0.0, 1),
        window("a", 10.0, 1),
        held("a", 0.0, 0.0, 2),
    ]
    first, second, third, other = lines(drawn("memory", *records))
    assert first[0] == (other[0][0], HEIGHT)
    assert first[1] == second[0]
    assert second[1] == third[0]
    assert second[1][0] - first[0][0] == pytest.approx(2 * (first[1][0] - first[0][0]), abs=0.3)


def test_what_nobody_told_is_not_drawn() -> None:
    """An endpoint that tells nothing but text has one plot."""
    records = [run_of("a"), asked("a", first_ms=5.0, planned_tokens=600)]
    (svg,) = plots_of(figures_of(records), records)
    assert re.search("TTFT against prompt length", svg)


@given(st.lists(st.tuples(st.integers(), st.integers()), max_size=60), st.integers(1, 10))
def test_thinning(points: list[tuple[float, float]], half: int) -> None:
    """Never more than asked for, in order, from the points themselves; the lowest and the highest stay."""
    thinned = with_peaks(sorted(points), 2 * half)
    assert len(thinned) <= max(2 * half, 0)
    assert thinned == sorted(thinned)
    assert set(thinned) <= set(points)
    if points:
        heights = [y for _, y in thinned]
        assert (min(heights), max(heights)) == (min(y for _, y in points), max(y for _, y in points))
    kept = every_so_many(points, half)
    assert len(kept) == min(half, len(points))


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.integers(2, 20))
def test_a_distribution_keeps_its_ends(values: list[float], most: int) -> None:
    """From the least to the most value, up to a hundred percent, and never falls."""
    line = distribution(sorted(values), most)
    assert len(line) <= most
    assert line[0][0] == min(values)
    assert line[-1] == (max(values), 100)
    assert line == sorted(line)
