"""Tables out of raw files: medians, counts and ratios, as Markdown."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

from kvloop.bench.load.figures import Figures, figures_of
from kvloop.bench.load.record import Record, Request, Run


def by_size(records: Sequence[Record]) -> dict[tuple[str, int], list[Request]]:
    """The measured second turns of each leg and planned length."""
    found: dict[tuple[str, int], list[Request]] = {}
    for one in records:
        if isinstance(one, Request) and one.turn and not one.warm_up and one.planned_tokens:
            found.setdefault((one.leg, one.planned_tokens), []).append(one)
    return found


def first_tokens(records: Sequence[Record]) -> Iterator[str]:
    """Medians of the time to first token, seconds, and how far each leg is from the floor."""
    legs, found = _legs(records), by_size(records)
    sizes = sorted({size for _, size in found})
    pairs = (("return", "aggregated"), ("return", "upstream"), ("one-way", "return"))
    heads = ["prompt tokens", *legs, *(f"{ours} / {theirs}" for ours, theirs in pairs)]
    yield "| " + " | ".join(heads) + " |"
    yield "|---:" * (len(legs) + 4) + "|"
    for size in sizes:
        medians = {leg: _median(found.get((leg, size), ())) for leg in legs}
        cells = [_seconds(found.get((leg, size), ())) for leg in legs]
        cells += [_ratio(medians, *pair) for pair in pairs]
        yield f"| {size:,} | " + " | ".join(cells) + " |"
    yield ""
    yield from _routes(records)
    yield from _transfers(figures_of(records))


def between_tokens(records: Sequence[Record]) -> Iterator[str]:
    """The time between tokens while others are under way."""
    yield "| | " + " | ".join(_legs(records)) + " |"
    yield "|---" + "|---:" * len(_legs(records)) + "|"
    figures = figures_of(records)
    for what, part in (("median", "median"), ("99 % are below", "p99")):
        cells = [
            "-" if leg.between_ms is None else f"{getattr(leg.between_ms, part):.0f} ms"
            for leg in figures.legs
        ]
        yield f"| between tokens, {what} | " + " | ".join(cells) + " |"
    cells = ["-" if leg.ttft_ms is None else f"{leg.ttft_ms.median / 1000:.2f} s" for leg in figures.legs]
    yield "| first token, median | " + " | ".join(cells) + " |"


def crowd(records: Sequence[Record]) -> Iterator[str]:
    """Both."""
    yield from first_tokens(records)
    yield ""
    yield from between_tokens(records)


def wrong(records: Sequence[Record]) -> Iterator[str]:
    """How many outputs differ from those of the leg that reuses nothing."""
    figures = figures_of(records)
    yield "| | " + " | ".join(leg.name for leg in figures.legs) + " |"
    yield "|---" + "|---:" * len(figures.legs) + "|"
    yield "| outputs compared | " + " | ".join(str(leg.compared) for leg in figures.legs) + " |"
    yield "| of these wrong | " + " | ".join(str(leg.differing) for leg in figures.legs) + " |"
    shares = ["-" if leg.tokens.share is None else f"{leg.tokens.share:.0%}" for leg in figures.legs]
    yield "| prompt tokens not computed | " + " | ".join(shares) + " |"


def held(records: Sequence[Record]) -> Iterator[str]:
    """What decode keeps, and what the processes take."""
    figures = figures_of(records)
    yield "| | " + " | ".join(leg.name for leg in figures.legs) + " |"
    yield "|---" + "|---:" * len(figures.legs) + "|"
    rows: Mapping[str, Callable[[int], str]] = {
        "held for conversations, mean": lambda at: _mib(figures.legs[at].held.mean_bytes),
        "most": lambda at: _mib(figures.legs[at].held.most_bytes),
        "KV cache in use, mean": lambda at: _share(figures.legs[at].held.mean_usage),
        "CPU seconds for 1,000 requests": lambda at: _whole(figures.legs[at].rates.cpu_s_per_1000),
    }
    for what, cell in rows.items():
        yield f"| {what} | " + " | ".join(cell(at) for at in range(len(figures.legs))) + " |"


def _legs(records: Sequence[Record]) -> list[str]:
    return [leg.name for one in records if isinstance(one, Run) for leg in one.legs]


def _times_s(requests: Sequence[Request]) -> list[float]:
    return [one.first_ms / 1000 for one in requests if one.first_ms is not None and one.error is None]


def _median(requests: Sequence[Request]) -> float | None:
    times = _times_s(requests)
    return statistics.median(times) if times else None


def _seconds(requests: Sequence[Request]) -> str:
    median = _median(requests)
    return "-" if median is None else f"{median:.2f} s ({len(_times_s(requests))})"


def _ratio(medians: Mapping[str, float | None], ours: str, theirs: str) -> str:
    above, below = medians.get(ours), medians.get(theirs)
    return "-" if above is None or not below else f"{above / below:.2f}"


def _routes(records: Sequence[Record]) -> Iterator[str]:
    taken: dict[str, int] = {}
    for one in records:
        if isinstance(one, Request) and one.leg == "kvloop" and one.turn and not one.warm_up and one.route:
            taken[one.route] = taken.get(one.route, 0) + 1
    if taken:
        ways = ", ".join(f"{route} {count}" for route, count in sorted(taken.items()))
        yield f"Routes that `kvloop` took: {ways}."


def _transfers(figures: Figures) -> Iterator[str]:
    copy = figures.copy_bytes_per_s
    for leg in figures.legs:
        rate = leg.rates.transfer_bytes_per_s
        if leg.name == "return" and copy and rate:
            yield (
                f"KV moved at {rate / 1e9:.1f} GB/s, both ways together; a plain copy between "
                f"two processes reached {copy / 1e9:.1f} GB/s ({rate / copy:.0%})."
            )


def _mib(value: float | None) -> str:
    return "-" if value is None else f"{value / 2**20:.0f} MiB"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
