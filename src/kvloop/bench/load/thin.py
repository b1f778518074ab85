"""Fewer points where there are more than can be seen, so that a page's size does not follow its file's."""

from collections.abc import Sequence
from typing import TypeVar

from kvloop.bench.load.spread import quantile

T = TypeVar("T")
Point = tuple[float, float]


def every_so_many(values: Sequence[T], most: int) -> Sequence[T]:
    """At most `most` of them, evenly out of their order; all, where they are no more."""
    if len(values) <= most:
        return values
    return [values[number * len(values) // most] for number in range(most)]


def with_peaks(points: Sequence[Point], most: int) -> list[Point]:
    """At most `most` points of a line (an even number): of each stretch the lowest and the highest, in their
    order, so that no peak is lost."""
    if len(points) <= most:
        return list(points)
    stretches = most // 2
    kept: list[Point] = []
    for number in range(stretches):
        part = points[number * len(points) // stretches : (number + 1) * len(points) // stretches]
        kept += sorted({min(part, key=_height), max(part, key=_height)})
    return kept


def distribution(ordered: Sequence[float], most: int) -> list[Point]:
    """The cumulated distribution as `(value, percent that is not above it)`, from the least to the most."""
    if len(ordered) <= most:
        return [(value, 100 * (place + 1) / len(ordered)) for place, value in enumerate(ordered)]
    return [(quantile(ordered, step / (most - 1)), 100 * step / (most - 1)) for step in range(most)]


def _height(point: Point) -> float:
    return point[1]
