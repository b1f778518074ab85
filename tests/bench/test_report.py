"""The verdicts: which figures meet which targets, and what the process then says."""

import json

import pytest

from kvloop.bench.report import Bound, Row, Target, as_json, exit_status, rounded, spread, table

NAN = float("nan")


@pytest.mark.parametrize(
    ("bound", "figure", "met"),
    [
        (Bound.AT_MOST, 1.9, True),
        (Bound.AT_MOST, 2.0, True),
        (Bound.AT_MOST, 2.1, False),
        (Bound.UNDER, 1.9, True),
        (Bound.UNDER, 2.0, False),
        (Bound.AT_LEAST, 2.0, True),
        (Bound.AT_LEAST, 1.9, False),
        (Bound.AT_MOST, NAN, False),
        (Bound.UNDER, NAN, False),
        (Bound.AT_LEAST, NAN, False),
    ],
)
def test_targets(bound: Bound, figure: float, met: bool) -> None:
    """The bound itself meets `at most` and `at least`, not `under`; a missing figure meets nothing."""
    row = Row("x", figure, "ms", Target(bound, 2.0))
    assert row.met is met
    assert row.verdict == ("met" if met else "MISSED")
    assert exit_status([row]) == (0 if met else 1)


def test_a_row_for_information_decides_nothing() -> None:
    """A figure without a target has no verdict, and alone it is no success."""
    information = Row("x", 1.0, "s")
    met = Row("y", 1.0, "s", Target(Bound.UNDER, 2.0))
    assert information.met is None
    assert information.verdict == "-"
    assert exit_status([information]) == 1
    assert exit_status([information, met]) == 0
    assert exit_status([]) == 1


def test_one_miss_is_a_failure() -> None:
    """However many targets are met, one that is missed fails the run."""
    good, bad = (Row("x", figure, "s", Target(Bound.AT_MOST, 2.0)) for figure in (1.0, 3.0))
    assert exit_status([good, bad, good]) == 1


def test_table() -> None:
    """Each row stands on a line of its own under the heading: figure, target, verdict, how."""
    text = table(
        [
            Row("first token", 0.41234, "s", Target(Bound.UNDER, 0.5), "3 samples"),
            Row("longest handle", 301, "B", Target(Bound.AT_MOST, 300)),
            Row("lost", NAN, "s", Target(Bound.AT_LEAST, 3.5)),
        ]
    )
    head, *lines = text.splitlines()
    assert head.split() == ["figure", "measured", "target", "verdict", "how"]
    assert [line.split() for line in lines] == [
        ["first", "token", "0.412", "s", "under", "0.5", "s", "met", "3", "samples"],
        ["longest", "handle", "301", "B", "at", "most", "300", "B", "MISSED"],
        ["lost", "none", "s", "at", "least", "3.5", "s", "MISSED"],
    ]


@pytest.mark.parametrize(
    ("figure", "text"),
    [
        (0.01234, "0.0123"),
        (1.2345, "1.23"),
        (26.12, "26.1"),
        (12345.6, "12346"),
        (0.0, "0"),
        (-1.234, "-1.23"),
    ],
)
def test_rounding(figure: float, text: str) -> None:
    """Three significant digits, and no digit before the point is lost."""
    assert rounded(figure) == text


def test_spread() -> None:
    """Median, range and count; nothing is hidden where there is nothing."""
    assert spread([3.0, 1.0, 2.0], "s") == "2.00 s (1.00 to 3.00, 3 samples)"
    assert spread([], "s") == "no samples"


def test_json() -> None:
    """The rows as JSON, strictly: a missing figure is null."""
    rows = [Row("x", NAN, "s", Target(Bound.UNDER, 2.0)), Row("y", 1.0, "s")]
    told = json.loads(as_json(rows, {"model": "tiny"}), parse_constant=lambda name: pytest.fail(name))
    assert told["model"] == "tiny"
    assert [(row["figure"], row["met"]) for row in told["rows"]] == [(None, False), (1.0, None)]
    assert told["rows"][0]["target"] == {"bound": "under", "value": 2.0}
