"""The report's plots: what is drawn of a raw file's records, and how much of it.

A plot is left out where no record tells what it shows. A leg has one number, colour, dash and marker through
all plots. Bounds: `MAX_DRAWN` legs, and so many points for a plot, whatever the file's size; what was
thinned says so, and lines are of all the values.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil

from kvloop.bench.load.figures import Figures
from kvloop.bench.load.leg import LegFigures, measured
from kvloop.bench.load.lengths import bucket_text, length_of
from kvloop.bench.load.plain import word
from kvloop.bench.load.record import Record, Request, Sample, Window
from kvloop.bench.load.sections import common_buckets
from kvloop.bench.load.spread import Spread, told, told_of
from kvloop.bench.load.thin import Point, distribution, every_so_many, with_peaks
from kvloop.bench.plot import COLOURS, Plot
from kvloop.bench.scale import doubling, linear, logarithmic, named

MAX_DRAWN = len(COLOURS)
MAX_POINTS = 6000  # of a plot, all legs together
MAX_LINE_POINTS = 240  # of a line
GAP = 0.2  # between groups of bars, of a group's width
MIB = 2**20
Points = Mapping[int, Sequence[Point]]


def plots_of(figures: Figures, records: Sequence[Record]) -> list[str]:
    """The SVGs, in the order in which a reader asks: how long, made of what, by which way, then what, at what
    price."""
    legs = figures.legs[:MAX_DRAWN]
    numbers = {leg.name: number for number, leg in enumerate(legs)}
    requests: dict[str, list[Request]] = {name: [] for name in numbers}
    for one in records:
        if isinstance(one, Request) and one.leg in requests:
            requests[one.leg].append(one)
    answered = {name: measured(some) for name, some in requests.items()}
    made = [
        _by_length(legs, answered),
        _split(legs),
        _by_route(legs, answered),
        _between(legs, answered),
        _reuse(legs),
        _memory(legs, records),
    ]
    drawn = [plot for plot in made if plot is not None]
    if len(figures.legs) > MAX_DRAWN:
        for plot in drawn:
            plot.note(f"Only the first {MAX_DRAWN} of {len(figures.legs):,} legs are drawn.")
    return [plot.svg() for plot in drawn]


def _by_length(legs: Sequence[LegFigures], answered: Mapping[str, Sequence[Request]]) -> Plot | None:
    found = {number: _length_and_ttft(answered[leg.name]) for number, leg in enumerate(legs)}
    values = [point for points in found.values() for point in points]
    if not values:
        return None
    medians = {
        number: [
            (bucket * 2**0.5, some.ttft_ms.median)
            for bucket, some in leg.by_bucket.items()
            if bucket and some.ttft_ms
        ]
        for number, leg in enumerate(legs)
    }
    plot = Plot(
        "length",
        "TTFT against prompt length",
        "Points: one request each. Lines: each leg's median of the prompts of like length. "
        + _medians(legs, lambda leg: leg.ttft_ms),
        doubling("prompt, tokens (1k = 1,024)", [x for x, _ in values]),
        logarithmic("time to the first token, ms", [y for _, y in values]),
    )
    most = MAX_POINTS // len(legs)
    for number, points in found.items():
        plot.points(number, every_so_many(points, most))
    for number, leg in enumerate(legs):
        if found[number]:
            plot.name(number, word(leg.name))
        plot.line(number, medians[number], marked=True)
    plot.note("Lines: medians by length, each at its bucket's middle, from 512 tokens on.")
    _say_thinned(plot, sum(map(len, found.values())), sum(min(most, len(some)) for some in found.values()))
    return plot


def _split(legs: Sequence[LegFigures]) -> Plot | None:
    buckets = [
        bucket
        for bucket in common_buckets(legs)
        if any(bucket in leg.by_bucket and leg.by_bucket[bucket].split for leg in legs)
    ]
    if not buckets:
        return None
    bars = [
        (place, number, some.compute_ms, some.transfer_ms)
        for place, bucket in enumerate(buckets)
        for number, leg in enumerate(legs)
        if (some := leg.by_bucket.get(bucket))
        and some.compute_ms is not None
        and some.transfer_ms is not None
    ]
    plot = Plot(
        "split",
        "Prefill: computing and reading back",
        "Stacked bars by prompt length and leg: what prefill computed, and above it what it read back. "
        + _medians(legs, lambda leg: leg.compute_ms),
        named("prompt, tokens", [bucket_text(bucket) for bucket in buckets]),
        linear("mean, ms", [compute + transfer for _, _, compute, transfer in bars]),
    )
    wide = (1 - GAP) / len(legs)
    for place, number, compute, transfer in bars:
        left = place + GAP / 2 + wide * number
        sides = left + wide * 0.06, left + wide * 0.94
        plot.bar(number, sides, (0, compute))
        plot.bar(number, sides, (compute, compute + transfer), faint=True)
    for number in sorted({number for _, number, _, _ in bars}):
        plot.name(number, word(legs[number].name), as_bar=True)
    plot.note("Solid: computing. Faint, above it: reading back. Means, so that the two add up.")
    return plot


def _by_route(legs: Sequence[LegFigures], answered: Mapping[str, Sequence[Request]]) -> Plot | None:
    taken = Counter({(leg.name, route): some.n for leg in legs for route, some in leg.by_route.items()})
    drawn = {leg_and_route for leg_and_route, _ in taken.most_common(MAX_DRAWN)}
    found: dict[tuple[str, str], list[float | None]] = {}
    for leg, some in answered.items():
        for one in some:
            if one.route is not None and (leg, one.route) in drawn:
                found.setdefault((leg, one.route), []).append(one.first_ms)
    numbers = {leg.name: number for number, leg in enumerate(legs)}
    routes = sorted({route for _, route in found})
    plot = _distributions(
        "route",
        "TTFT by route",
        "time to the first token, ms",
        {
            numbers[leg] + len(COLOURS) * routes.index(route): (f"{word(leg)}: {word(route)}", told_of(some))
            for (leg, route), some in sorted(
                found.items(), key=lambda item: (numbers[item[0][0]], item[0][1])
            )
        },
        "Each line: which percent of a leg's requests that went this way had their first token by then.",
    )
    if plot is not None and len(taken) > len(drawn):
        plot.note(f"{len(taken) - len(drawn):,} more routes, taken less, are not drawn.")
    return plot


def _between(legs: Sequence[LegFigures], answered: Mapping[str, Sequence[Request]]) -> Plot | None:
    found = {
        number: (word(leg.name), told_of(gap for one in answered[leg.name] for gap in one.between_ms))
        for number, leg in enumerate(legs)
    }
    return _distributions(
        "between",
        "Inter-token latency",
        "between two tokens, ms",
        {number: some for number, some in found.items() if some[1]},
        "Each line: which percent of the leg's gaps were no longer.",
    )


def _distributions(
    key: str, title: str, across: str, found: Mapping[int, tuple[str, list[float]]], said: str
) -> Plot | None:
    if not found:
        return None
    drawn = {number: distribution(sorted(values), MAX_LINE_POINTS) for number, (_, values) in found.items()}
    medians = ", ".join(f"{name} {_middle(drawn[number]):.4g} ms" for number, (name, _) in found.items())
    plot = Plot(
        key,
        title,
        f"{said} Medians: {medians}.",
        logarithmic(across, [x for points in drawn.values() for x, _ in points]),
        linear("percent", [], most=100),
    )
    for number, (name, values) in found.items():
        plot.name(number, f"{name} ({len(values):,})")
        plot.line(number, drawn[number])
    plot.note(said)
    return plot


def _reuse(legs: Sequence[LegFigures]) -> Plot | None:
    found: Points = {
        number: [
            (turn, 100 * share) for key, share in leg.share_by_turn.items() if (turn := told(key)) is not None
        ]
        for number, leg in enumerate(legs)
    }
    if not any(found.values()):
        return None
    plot = Plot(
        "reuse",
        "Reuse: prompt tokens that were not computed",
        "Each line: a leg's share of cached prompt tokens by the number of the turn. "
        + "; ".join(
            f"{word(leg.name)} {100 * leg.tokens.share:.1f} % in all"
            for leg in legs
            if leg.tokens.share is not None
        ),
        linear("turn of the conversation", [x for points in found.values() for x, _ in points], whole=True),
        linear("percent of the prompt's tokens", [], most=100),
    )
    for number, points in found.items():
        if points:
            plot.name(number, word(legs[number].name))
            plot.line(number, every_so_many(points, MAX_LINE_POINTS), marked=len(points) <= 40)
    return plot


def _memory(legs: Sequence[LegFigures], records: Sequence[Record]) -> Plot | None:
    found = {number: list(_stretches(leg.name, records)) for number, leg in enumerate(legs)}
    values = [point for stretches in found.values() for points in stretches for point in points]
    if not values:
        return None
    plot = Plot(
        "memory",
        "Memory held for conversations",
        "Each line: what a leg's decode engines held, over the leg's own time. "
        + "; ".join(
            f"{word(leg.name)} at most {leg.held.most_bytes / MIB:.4g} MiB"
            for leg in legs
            if leg.held.most_bytes
        ),
        linear("the leg's own time, all its windows joined, s", [x for x, _ in values]),
        linear("MiB", [y for _, y in values]),
    )
    for number, stretches in found.items():
        if stretches:
            plot.name(number, word(legs[number].name))
        most = 2 * max(1, MAX_LINE_POINTS // max(1, len(stretches)))
        for points in every_so_many(stretches, MAX_LINE_POINTS):
            plot.line(number, with_peaks(points, most))
    plot.note("A line is broken where another leg had its turn.")
    return plot


def _stretches(leg: str, records: Sequence[Record]) -> Iterator[list[Point]]:
    """What was held in each of the leg's windows that has samples, one after the other in the leg's time."""
    samples: dict[int, list[Point]] = {}
    took_s: dict[int, float] = {}
    for one in records:
        if isinstance(one, Sample) and one.leg == leg:
            at_s, held = told(one.at_s), told(one.held_bytes)
            if at_s is not None and held is not None:
                samples.setdefault(one.round, []).append((at_s, held / MIB))
        elif isinstance(one, Window) and one.leg == leg:
            took_s[one.round] = took_s.get(one.round, 0.0) + (told(one.took_s) or 0.0)
    began_s = 0.0
    for number in sorted(samples.keys() | took_s.keys()):
        points = sorted(samples.get(number, []))
        if points:
            yield [(began_s + at_s, held) for at_s, held in points]
        began_s += max(took_s.get(number, 0.0), points[-1][0] if points else 0.0)


def _length_and_ttft(requests: Sequence[Request]) -> list[Point]:
    pairs = [(length_of(one), told(one.first_ms)) for one in requests]
    return [(length, first_ms) for length, first_ms in pairs if length is not None and first_ms is not None]


def _medians(legs: Sequence[LegFigures], pick: Callable[[LegFigures], Spread | None]) -> str:
    """The legs' medians in words, for readers that do not see the plot."""
    spreads = [(word(leg.name), pick(leg)) for leg in legs]
    return f"Medians: {', '.join(f'{name} {some.median:.4g} ms' for name, some in spreads if some)}."


def _middle(points: Sequence[Point]) -> float:
    return points[ceil(len(points) / 2) - 1][0]


def _say_thinned(plot: Plot, all_of_them: int, drawn: int) -> None:
    if drawn < all_of_them:
        plot.note(f"{drawn:,} of {all_of_them:,} points are drawn; lines and figures are of all.")
