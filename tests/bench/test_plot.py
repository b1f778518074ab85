"""Plots and their axes: where values stand, that texts do not meet, that colours are told apart."""

import re
import xml.etree.ElementTree as ET
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloop.bench.plot import (
    COLOURS,
    DARK_COLOURS,
    DASHES,
    INK,
    MARKERS,
    PAPER,
    WIDTH,
    Plot,
    Series,
    log_plot,
    text_width,
    wrapped,
)
from kvloop.bench.scale import doubling, linear, logarithmic, named, number_text, tokens_text

SVG = "{http://www.w3.org/2000/svg}"
Box = tuple[float, float, float, float]


def text_boxes(svg: str) -> list[Box]:
    """Left, top, right and bottom of each text, as wide as it is at most."""
    found: list[Box] = []

    def walk(node: ET.Element, down: float) -> None:
        moved = re.fullmatch(r"translate\(0 ([\d.]+)\)", node.get("transform", ""))
        down += float(moved.group(1)) if moved else 0
        if node.tag == f"{SVG}text":
            size = int(node.get("font-size", "0"))
            wide = text_width(node.text or "", size)
            left = (
                float(node.get("x", "0"))
                - {"start": 0.0, "middle": wide / 2, "end": wide}[node.get("text-anchor", "")]
            )
            base = float(node.get("y", "0")) + down
            found.append((left, base - 0.75 * size, left + wide, base + 0.25 * size))
        for child in node:
            walk(child, down)

    walk(ET.fromstring(svg), 0.0)
    return found


def assert_legible(svg: str) -> None:
    """Every text is inside the picture, and none touches another."""
    height = float((ET.fromstring(svg).get("viewBox") or "").split()[3])
    boxes = text_boxes(svg)
    assert boxes
    for left, top, right, bottom in boxes:
        assert left >= 0
        assert top >= 0
        assert right <= WIDTH
        assert bottom <= height
    for one, other in combinations(boxes, 2):
        apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
        assert apart, (one, other)


def contrast(one: str, other: str) -> float:
    """WCAG's contrast of two colours, from 1 to 21."""

    def light(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)


def test_colours_stand_out_on_their_page() -> None:
    """Marks have a contrast of three, text of seven, light and dark; no two series share dashes or marker."""
    for colours, paper, ink in zip((COLOURS, DARK_COLOURS), PAPER, INK, strict=True):
        assert all(contrast(colour, paper) >= 3 for colour in colours)
        assert contrast(ink, paper) >= 7
    assert len(COLOURS) == len(DARK_COLOURS) == len(set(DASHES)) == len(set(MARKERS))


def test_where_values_stand() -> None:
    """Ends at the ends, the middle in the middle; what is beyond an end is drawn at it."""
    straight, log = linear("s", [9.5]), logarithmic("ms", [1, 100])
    assert (straight.low, straight.high) == (0, 10)
    assert [straight.share(value) for value in (0, 5, 10, 99)] == [0, 0.5, 1, 1]
    assert (log.low, log.high) == (1, 100)
    assert log.share(10) == pytest.approx(0.5)
    assert (log.share(0), log.share(1e9)) == (0, 1)


def test_ticks() -> None:
    """Round numbers: whole ones where they count something, powers of two for tokens, 1-2-5 where few."""
    assert [tick.text for tick in linear("turn", [3], whole=True).ticks] == ["0", "1", "2", "3"]
    assert [tick.text for tick in linear("percent", [], most=100).ticks] == [
        "0", "20", "40", "60", "80", "100",
    ]  # fmt: skip
    assert [tick.text for tick in doubling("tokens", [600, 5600]).ticks] == ["0.5k", "1k", "2k", "4k", "8k"]
    assert [tick.text for tick in logarithmic("ms", [30, 300]).ticks] == ["20", "50", "100", "200", "500"]
    assert [tick.text for tick in logarithmic("ms", [1, 1e5]).ticks] == [
        "1", "10", "100", "1,000", "10,000", "100,000",
    ]  # fmt: skip
    assert [number_text(value) for value in (0, 0.001, 2e6, 1e-7)] == ["0", "0.001", "2e6", "1e-7"]
    assert [tokens_text(1 << power) for power in (8, 9, 10, 20, 50)] == ["256", "0.5k", "1k", "1M", "1P"]


finite = st.floats(0, 1e15, allow_subnormal=False).map(lambda value: value if value > 1e-9 else 0.0)


@settings(max_examples=60, deadline=None)
@given(
    across=st.sampled_from([linear, logarithmic, doubling]),
    up=st.sampled_from([linear, logarithmic]),
    points=st.lists(st.tuples(finite, finite), min_size=1, max_size=8),
    names=st.lists(st.text(max_size=32), max_size=8),
)
def test_any_plot_is_legible(across, up, points, names) -> None:
    """Whatever the values and the names: well-formed, all texts inside and apart."""
    plot = Plot(
        "p",
        "A title",
        "what it is",
        across("across", [x for x, _ in points]),
        up("up", [y for _, y in points]),
    )
    for number, name in enumerate(names):
        plot.name(number, "".join(letter if letter.isprintable() else "?" for letter in name))
    plot.line(0, points, marked=True)
    plot.points(1, points)
    plot.note("A note that is longer than the plot is wide, so that it has to go on in a second line below.")
    assert_legible(plot.svg())
    numbers = [float(value) for value in re.findall(r"[ML](-?[\d.]+) ", plot.svg())]
    assert all(-1 <= value <= WIDTH + 1 for value in numbers)


@pytest.mark.parametrize("across", [doubling, logarithmic, linear])
@pytest.mark.parametrize("up", [doubling, logarithmic, linear])
def test_ticks_that_would_meet_are_left_out(across, up) -> None:
    """However many an axis has: fifty doublings are not all written."""
    values = [1.0, 1e14, 123456.0]
    svg = Plot("p", "t", "d", across("across", values), up("up", values)).svg()
    assert_legible(svg)
    assert 6 < len(text_boxes(svg)) < 60


def test_groups_of_bars() -> None:
    """A bar stands on the one below it, in its group; a faint one is seen through."""
    plot = Plot("p", "t", "d", named("tokens", ["0.5k-1k", "1k-2k"]), linear("ms", [100]))
    plot.bar(0, (0.2, 0.8), (0, 60))
    plot.bar(0, (0.2, 0.8), (60, 100), faint=True)
    low, high = (node for node in ET.fromstring(plot.svg()).iter(f"{SVG}rect") if node.get("x"))
    assert float(high.get("y", "")) + float(high.get("height", "")) == pytest.approx(float(low.get("y", "")))
    assert float(low.get("height", "")) == pytest.approx(180)
    assert (low.get("fill-opacity"), high.get("fill-opacity")) == ("1", "0.4")
    assert_legible(plot.svg())


def test_readers_that_do_not_see_it() -> None:
    """Title and description come first and are what the picture is labelled by; texts are escaped."""
    svg = log_plot("a < b", "engines & more", [Series("<one>", [1, 10], [0.01, 5]), Series("two", [1], [2])])
    root = ET.fromstring(svg)
    title, desc = root[0], root[1]
    assert (title.tag, title.text) == (f"{SVG}title", "a < b")
    assert desc.tag == f"{SVG}desc"
    assert root.get("aria-labelledby") == f"{title.get('id')} {desc.get('id')}"
    assert "<one>" in "".join(desc.itertext())
    assert len(root.findall(f".//{SVG}polyline")) == 2


def test_words_are_wrapped() -> None:
    """No line is wider than asked for, and no word is lost."""
    lines = wrapped("one two three four five six seven", 80)
    assert " ".join(lines) == "one two three four five six seven"
    assert len(lines) > 1
    assert all(text_width(line) <= 80 for line in lines)
    assert wrapped("", 80) == []
