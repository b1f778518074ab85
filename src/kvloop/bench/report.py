"""Figures with targets: one row each, a verdict for every row that has one, and an exit status for all.

A figure without a target is there for information and decides nothing. A figure that could not be measured
is NaN, and NaN meets no target: a benchmark that failed to look must not pass.
"""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum


class Bound(StrEnum):
    """On which side of its target a figure has to lie."""

    AT_MOST = "at most"
    UNDER = "under"
    AT_LEAST = "at least"


@dataclass(frozen=True, slots=True)
class Target:
    """What a figure must be, in the figure's own unit."""

    bound: Bound
    value: float

    def is_met(self, figure: float) -> bool:
        """Whether `figure` is on the right side. NaN is on neither."""
        match self.bound:
            case Bound.AT_MOST:
                return figure <= self.value
            case Bound.UNDER:
                return figure < self.value
            case Bound.AT_LEAST:
                return figure >= self.value


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `detail` says what it is made of: medians, spread, how many samples."""

    what: str
    figure: float
    unit: str
    target: Target | None = None
    detail: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        return None if self.target is None else self.target.is_met(self.figure)

    @property
    def verdict(self) -> str:
        """The same in a word; `-` for a figure without a target."""
        return {None: "-", True: "met", False: "MISSED"}[self.met]


def exit_status(rows: Sequence[Row]) -> int:
    """0 if every target was met and there was at least one, else 1."""
    verdicts = [row.met for row in rows if row.target is not None]
    return 0 if verdicts and all(verdicts) else 1


_HEAD = ("figure", "measured", "target", "verdict", "how")


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text, one line each, with a heading and a line break at the end."""
    return aligned([_HEAD, *(_cells(row) for row in rows)])


def aligned(lines: Sequence[Sequence[str]], numbers: bool = False) -> str:
    """Lines of equally many cells as columns. `numbers`: all but the first column are set to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "".join(
        "  ".join(
            cell.rjust(width) if numbers and column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        + "\n"
        for line in lines
    )


def _cells(row: Row) -> tuple[str, str, str, str, str]:
    target = "" if row.target is None else f"{row.target.bound} {row.target.value:g} {row.unit}".rstrip()
    return row.what, f"{rounded(row.figure)} {row.unit}".rstrip(), target, row.verdict, row.detail


def rounded(figure: float) -> str:
    """Three significant digits, or what a whole number has; `none` for NaN."""
    if math.isnan(figure):
        return "none"
    if figure and math.isfinite(figure):
        digits = max(0, 2 - math.floor(math.log10(abs(figure))))
        return f"{figure:.{digits}f}"
    return f"{figure:g}"


def spread(values: Sequence[float], unit: str) -> str:
    """Median, range and count of `values` in words."""
    if not values:
        return "no samples"
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{rounded(middle)} {unit} ({rounded(low)} to {rounded(high)}, {len(values)} samples)"


def as_json(rows: Sequence[Row], facts: dict[str, object]) -> str:
    """The rows and what was true of the run, for later comparison. NaN becomes null."""
    listed = [
        asdict(row) | {"figure": None if math.isnan(row.figure) else row.figure, "met": row.met}
        for row in rows
    ]
    return json.dumps(facts | {"rows": listed}, indent=2) + "\n"
