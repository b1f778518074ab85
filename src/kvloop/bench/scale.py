"""Axes: from values to where they stand between an axis's ends, and which values are written beside it.

A logarithmic axis spans nine powers of ten at most, counted from its largest value: what is smaller stands
at its low end. Every value is finite; the caller has seen to that.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor, log, log2, log10

MOST_DECADES = 9
FEW_DECADES = 3  # up to here 2 and 5 are written too
TICKS = 5
TOKENS_PER_K = 1024


@dataclass(frozen=True, slots=True)
class Tick:
    """A value that is written beside the axis, and how."""

    value: float
    text: str


@dataclass(frozen=True, slots=True)
class Axis:
    """What it shows, with its unit; the values at its ends, of which a logarithmic axis's are positive."""

    label: str
    low: float
    high: float
    ticks: tuple[Tick, ...]
    is_log: bool = False
    is_grouped: bool = False

    def share(self, value: float) -> float:
        """Where the value stands: 0 at the low end, 1 at the high one. What is beyond an end stands at it."""
        held = min(max(value, self.low), self.high)
        if self.is_log:
            return log(held / self.low) / log(self.high / self.low)
        return (held - self.low) / (self.high - self.low)


def linear(label: str, values: Iterable[float], whole: bool = False, most: float | None = None) -> Axis:
    """From zero to `most`, or to a round number that is not below any value. `whole`: only whole numbers are
    written."""
    top = max(values, default=0.0) if most is None else most
    step = _step(top / TICKS if top > 0 else 1 / TICKS)
    step = max(1.0, step) if whole else step
    count = max(1, ceil(top / step - 1e-9))
    ticks = tuple(Tick(number * step, number_text(number * step)) for number in range(count + 1))
    return Axis(label, 0.0, count * step if most is None else most, ticks)


def logarithmic(label: str, values: Iterable[float], smallest: float = 0.0) -> Axis:
    """Around the values that are positive, in steps of 1, 2 and 5; nothing below `smallest` is told apart."""
    positive = [value for value in values if value > 0] or [1.0]
    high = max(*positive, smallest)
    low = max(min(positive), smallest, high / 10**MOST_DECADES)
    ladder = list(_ladder(floor(log10(low)) - 1, ceil(log10(high)) + 1))
    low = max(step for step in ladder if step <= low * (1 + 1e-9))
    high = min(step for step in ladder if step >= high * (1 - 1e-9) and step > low)
    inside = [step for step in ladder if low <= step <= high]
    if log10(high / low) > FEW_DECADES:
        inside = [step for step in inside if abs(log10(step) - round(log10(step))) < 1e-6]
    return Axis(label, low, high, tuple(Tick(step, number_text(step)) for step in inside), is_log=True)


def doubling(label: str, values: Iterable[float]) -> Axis:
    """Powers of two around the values: for lengths in tokens."""
    positive = [value for value in values if value >= 1] or [1.0]
    low, high = floor(log2(min(positive))), ceil(log2(max(positive)))
    powers = range(low, max(high, low + 1) + 1)
    ticks = tuple(Tick(2.0**power, tokens_text(2**power)) for power in powers)
    return Axis(label, ticks[0].value, ticks[-1].value, ticks, is_log=True)


def named(label: str, names: Sequence[str]) -> Axis:
    """Groups side by side, each of width one: group `n` from `n` to `n + 1`."""
    ticks = tuple(Tick(number + 0.5, name) for number, name in enumerate(names))
    return Axis(label, 0.0, float(max(1, len(names))), ticks, is_grouped=True)


def kept(ticks: Sequence[Tick], extent: Callable[[Tick], tuple[float, float]], gap: float) -> list[Tick]:
    """Those that can be written without touching each other, from the first on; `extent` is a tick's from and
    to, in the direction in which they follow each other."""
    chosen: list[Tick] = []
    free_from = float("-inf")
    for tick in ticks:
        begins, ends = extent(tick)
        if begins >= free_from:
            chosen.append(tick)
            free_from = ends + gap
    return chosen


def number_text(value: float) -> str:
    """A tick's number: short, exact for the round numbers that ticks are."""
    if abs(value) >= 1e6:
        return f"{value:.3g}".replace("e+0", "e").replace("e+", "e")
    return f"{value:,.10g}" if abs(value) >= 1e-4 or value == 0 else f"{value:.3g}".replace("e-0", "e-")


def tokens_text(tokens: int) -> str:
    """A power of two as people say it: 1k is 1,024."""
    if tokens < TOKENS_PER_K // 2:
        return str(tokens)
    scaled, suffixes = tokens / TOKENS_PER_K, iter("kMGTPEZY")
    suffix = next(suffixes)
    while scaled >= TOKENS_PER_K:
        scaled, suffix = scaled / TOKENS_PER_K, next(suffixes)
    return f"{scaled:g}{suffix}"


def _step(rough: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is not below."""
    power = floor(log10(rough))
    return next(step for step in _ladder(power, power + 1) if step >= rough * (1 - 1e-9))


def _ladder(first: int, last: int) -> Iterator[float]:
    for power in range(first, last + 1):
        for factor in (1, 2, 5):
            yield float(f"{factor}e{power}")
