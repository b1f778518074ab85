"""How values spread, without a model of them: count, mean, quantiles.

A quantile lies between the two values around it in proportion, which is how `vllm bench serve` (numpy's
default) has them, so that figures can be laid side by side. A raw file may come from anywhere: what no clock
or counter can have said (below zero, or beyond `MAX_TOLD`, a quadrillion) counts as not told.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import fsum

MAX_TOLD = 1e15
LEAST_TOLD = 1e-9  # what is less is zero


@dataclass(frozen=True, slots=True)
class Spread:
    """Some values, in their own unit. `q1` and `q3`: half of them lie between the two."""

    n: int
    mean: float
    q1: float
    median: float
    q3: float
    p90: float
    p99: float
    most: float


def told(value: float | None) -> float | None:
    """The value, if it is one that can be."""
    if value is None or not 0 <= value <= MAX_TOLD:
        return None
    return float(value) if value >= LEAST_TOLD else 0.0


def told_of(values: Iterable[float | None]) -> list[float]:
    """Those that can be, as `told` has them; a call for each would take longer than all the rest."""
    return [
        float(value) if value >= LEAST_TOLD else 0.0
        for value in values
        if value is not None and 0 <= value <= MAX_TOLD
    ]


def spread_of(values: Iterable[float | None]) -> Spread | None:
    """None where nothing is told."""
    ordered = sorted(told_of(values))
    if not ordered:
        return None
    return Spread(
        n=len(ordered),
        mean=fsum(ordered) / len(ordered),
        q1=quantile(ordered, 0.25),
        median=quantile(ordered, 0.5),
        q3=quantile(ordered, 0.75),
        p90=quantile(ordered, 0.9),
        p99=quantile(ordered, 0.99),
        most=ordered[-1],
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value that this share of them lies below. `ordered` has one at least."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def ratio(one: float | None, other: float | None) -> float | None:
    """None where either is not told, or there is nothing to divide by."""
    return None if one is None or not other else one / other
