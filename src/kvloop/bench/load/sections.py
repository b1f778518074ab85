"""The figures as tables: a column for each leg, a row for each figure, rows that nobody fills left out.

The terminal and the page show the same ones. What a table cannot hold is left out of it in the open: more
legs, routes or prompt lengths than there is room for are named by their number.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvloop.bench.load.figures import Figures
from kvloop.bench.load.leg import LegFigures
from kvloop.bench.load.lengths import bucket_text
from kvloop.bench.load.pairs import ALL_TURNS, FLOOR, LATER_TURNS, Comparison
from kvloop.bench.load.plain import word
from kvloop.bench.load.spread import Spread, ratio
from kvloop.bench.report import rounded

MAX_LEGS = 12
MAX_ROUTES = 8
MAX_BUCKETS = 10
NONE = "-"
MIB, GB = 2**20, 1e9


@dataclass(frozen=True, slots=True)
class Section:
    """A table. `rows`: what it is, and a cell for each leg of `head`."""

    title: str
    head: list[str]
    rows: list[tuple[str, list[str]]]


Figure = Callable[[LegFigures], str]


def sections(figures: Figures) -> list[Section]:
    """The tables that have anything in them."""
    legs = figures.legs[:MAX_LEGS]
    head = [word(leg.name) for leg in legs]
    made = [
        _section("requests", head, legs, _REQUESTS),
        _section("time to the first token (TTFT), ms", head, legs, _TTFT),
        _section("TTFT by prompt length, ms: median (requests)", head, legs, _by_bucket(legs)),
        _section("TTFT by route, ms: median (requests)", head, legs, _by_route(legs)),
        _section("after the first token, ms", head, legs, _AFTER),
        _section("rates", head, legs, _RATES),
        _section("prompts, tokens", head, legs, _TOKENS),
        _section("prefill, ms", head, legs, [*_PREFILL, *_of_a_copy(figures)]),
        _section("memory held for conversations", head, legs, _HELD),
    ]
    bases = dict.fromkeys(one.base for one in figures.comparisons)
    made += [_against(base, head, legs, figures.comparisons) for base in bases]
    return [section for section in made if section.rows]


def shown(value: float | None, scale: float = 1.0) -> str:
    """A figure in three digits, or a dash."""
    if value is None:
        return NONE
    scaled = value / scale
    return rounded(scaled) if abs(scaled) >= 1e-3 or scaled == 0 else f"{scaled:.1e}"


def common_buckets(legs: Sequence[LegFigures]) -> list[int]:
    """The prompt lengths that there is room for: those of most requests, in order."""
    counted: Counter[int] = Counter()
    for leg in legs:
        for bucket, some in leg.by_bucket.items():
            counted[bucket] += some.ttft_ms.n if some.ttft_ms else 0
    return sorted(bucket for bucket, _ in counted.most_common(MAX_BUCKETS))


def common_routes(legs: Sequence[LegFigures]) -> list[str]:
    """The routes that there is room for: those that were taken most."""
    counted: Counter[str] = Counter()
    for leg in legs:
        for route, some in leg.by_route.items():
            counted[route] += some.n
    return [route for route, _ in counted.most_common(MAX_ROUTES)]


def _section(
    title: str, head: list[str], legs: Sequence[LegFigures], rows: Sequence[tuple[str, Figure]]
) -> Section:
    filled = [(what, [figure(leg) for leg in legs]) for what, figure in rows]
    return Section(title, head, [(what, cells) for what, cells in filled if any(c != NONE for c in cells)])


def _of(pick: Callable[[LegFigures], float | None], scale: float = 1.0) -> Figure:
    return lambda leg: shown(pick(leg), scale)


def _whole(pick: Callable[[LegFigures], int | None]) -> Figure:
    def figure(leg: LegFigures) -> str:
        count = pick(leg)
        return NONE if count is None else f"{count:,}"

    return figure


def _percent(pick: Callable[[LegFigures], float | None]) -> Figure:
    def figure(leg: LegFigures) -> str:
        share = pick(leg)
        return NONE if share is None else f"{100 * share:.1f} %"

    return figure


def _spread(pick: Callable[[LegFigures], Spread | None], show: Callable[[Spread], str]) -> Figure:
    def figure(leg: LegFigures) -> str:
        spread = pick(leg)
        return NONE if spread is None else show(spread)

    return figure


def _median(spread: Spread) -> str:
    return shown(spread.median)


def _middle(spread: Spread) -> str:
    return f"{shown(spread.q1)} to {shown(spread.q3)}"


def _p99(spread: Spread) -> str:
    return shown(spread.p99)


def _count(spread: Spread) -> str:
    return f"{spread.n:,}"


def _median_and_count(spread: Spread | None) -> str:
    return NONE if spread is None else f"{shown(spread.median)} ({spread.n:,})"


def _differing(leg: LegFigures) -> str:
    return f"{leg.differing:,} of {leg.compared:,}" if leg.compared else "not compared"


def _by_bucket(legs: Sequence[LegFigures]) -> list[tuple[str, Figure]]:
    def figure(bucket: int) -> Figure:
        return lambda leg: (
            _median_and_count(leg.by_bucket[bucket].ttft_ms) if bucket in leg.by_bucket else NONE
        )

    rows = [(bucket_text(bucket), figure(bucket)) for bucket in common_buckets(legs)]
    return rows + _left_out(lambda leg: len(leg.by_bucket.keys() - set(common_buckets(legs))), legs)


def _by_route(legs: Sequence[LegFigures]) -> list[tuple[str, Figure]]:
    def figure(route: str) -> Figure:
        return lambda leg: _median_and_count(leg.by_route.get(route))

    routes = common_routes(legs)
    rows = [(word(route), figure(route)) for route in routes]
    return rows + _left_out(lambda leg: len(leg.by_route.keys() - set(routes)), legs)


def _of_a_copy(figures: Figures) -> list[tuple[str, Figure]]:
    copy = figures.copy_bytes_per_s
    share = _percent(lambda leg: ratio(leg.rates.transfer_bytes_per_s, copy))
    return [("  of a plain copy between processes", share)]


def _left_out(count: Callable[[LegFigures], int], legs: Sequence[LegFigures]) -> list[tuple[str, Figure]]:
    return [("(others, not shown)", _whole(count))] if any(map(count, legs)) else []


def _against(
    base: str, head: list[str], legs: Sequence[LegFigures], comparisons: Sequence[Comparison]
) -> Section:
    found = {(one.leg, one.part): one for one in comparisons if one.base == base}
    parts = [part for part in dict.fromkeys(one.part for one in found.values()) if part != ALL_TURNS]
    buckets = [part for part in parts if part != LATER_TURNS][:MAX_BUCKETS]

    def row(part: str, show: Callable[[Comparison], str]) -> list[str]:
        return [show(found[leg.name, part]) if (leg.name, part) in found else NONE for leg in legs]

    rows = list(_whole_parts(row, [part for part in (ALL_TURNS, LATER_TURNS) if part not in buckets]))
    rows += [
        (f"{LATER_TURNS}, {part}: ratio (pairs)", row(part, lambda c: f"{shown(c.median_ratio)} ({c.n:,})"))
        for part in buckets
    ]
    floor = ", the floor" if base == FLOOR else ""
    title = f"TTFT against {word(base)}{floor}: each turn by the same turn there"
    return Section(title, head, [(what, cells) for what, cells in rows if any(c != NONE for c in cells)])


def _whole_parts(
    row: Callable[[str, Callable[[Comparison], str]], list[str]], parts: Sequence[str]
) -> Iterator[tuple[str, list[str]]]:
    for part in parts:
        yield f"{part}: median ratio", row(part, lambda one: shown(one.median_ratio))
        yield "  half of the ratios", row(part, lambda one: f"{shown(one.q1)} to {shown(one.q3)}")
        yield "  ratio of the medians", row(part, lambda one: shown(one.ratio_of_medians))
        yield "  median distance, ms", row(part, lambda one: shown(one.distance_ms))
        yield "  pairs", row(part, lambda one: f"{one.n:,}")


_REQUESTS: list[tuple[str, Figure]] = [
    ("measured", _whole(lambda leg: leg.asked)),
    ("warm-up, left out", _whole(lambda leg: leg.warm_up)),
    ("failed", _whole(lambda leg: leg.failed)),
    ("answers that differ", _differing),
]
_TTFT: list[tuple[str, Figure]] = [
    ("median", _spread(lambda leg: leg.ttft_ms, _median)),
    ("  half of the requests", _spread(lambda leg: leg.ttft_ms, _middle)),
    ("90 % are below", _spread(lambda leg: leg.ttft_ms, lambda one: shown(one.p90))),
    ("99 % are below", _spread(lambda leg: leg.ttft_ms, _p99)),
    ("  requests", _spread(lambda leg: leg.ttft_ms, _count)),
    (f"{LATER_TURNS}: median", _spread(lambda leg: leg.later_ttft_ms, _median)),
    ("  half of the requests", _spread(lambda leg: leg.later_ttft_ms, _middle)),
    ("  requests", _spread(lambda leg: leg.later_ttft_ms, _count)),
]
_AFTER: list[tuple[str, Figure]] = [
    ("between tokens (ITL): median", _spread(lambda leg: leg.between_ms, _median)),
    ("  half of the gaps", _spread(lambda leg: leg.between_ms, _middle)),
    ("  mean", _spread(lambda leg: leg.between_ms, lambda one: shown(one.mean))),
    ("  99 % are below", _spread(lambda leg: leg.between_ms, _p99)),
    ("  gaps", _spread(lambda leg: leg.between_ms, _count)),
    ("per token (TPOT): median", _spread(lambda leg: leg.per_token_ms, _median)),
    ("  half of the requests", _spread(lambda leg: leg.per_token_ms, _middle)),
    ("whole request: median", _spread(lambda leg: leg.took_ms, _median)),
    ("  99 % are below", _spread(lambda leg: leg.took_ms, _p99)),
]
_RATES: list[tuple[str, Figure]] = [
    ("requests/s", _of(lambda leg: leg.rates.requests_per_s)),
    ("answer tokens/s", _of(lambda leg: leg.rates.answer_tokens_per_s)),
    ("  over windows of together, s", _of(lambda leg: leg.rates.took_s or None)),
    ("  windows", _whole(lambda leg: leg.rates.windows or None)),
    ("CPU seconds per 1,000 requests", _of(lambda leg: leg.rates.cpu_s_per_1000)),
    ("the client's share of a core", _percent(lambda leg: leg.rates.client_share)),
    ("sent too late, ms: 99 % are below", _spread(lambda leg: leg.late_ms, _p99)),
]
_TOKENS: list[tuple[str, Figure]] = [
    ("all", _whole(lambda leg: leg.tokens.prompt or None)),
    ("computed", _whole(lambda leg: leg.tokens.computed)),
    ("cached", _whole(lambda leg: leg.tokens.cached)),
    ("  of them read back from decode", _whole(lambda leg: leg.tokens.reused)),
    ("share cached", _percent(lambda leg: leg.tokens.share)),
]
_PREFILL: list[tuple[str, Figure]] = [
    ("computing: median", _spread(lambda leg: leg.compute_ms, _median)),
    ("  half of the requests", _spread(lambda leg: leg.compute_ms, _middle)),
    ("reading back: median", _spread(lambda leg: leg.transfer_ms, _median)),
    ("  half of the requests", _spread(lambda leg: leg.transfer_ms, _middle)),
    ("  requests", _spread(lambda leg: leg.transfer_ms, _count)),
    ("read back, GB/s", _of(lambda leg: leg.rates.transfer_bytes_per_s, GB)),
]
_HELD: list[tuple[str, Figure]] = [
    ("mean, MiB", _of(lambda leg: leg.held.mean_bytes, MIB)),
    ("most, MiB", _of(lambda leg: leg.held.most_bytes, MIB)),
    ("KV cache in use: mean", _percent(lambda leg: leg.held.mean_usage)),
    ("  most", _percent(lambda leg: leg.held.most_usage)),
    ("  samples", _whole(lambda leg: leg.held.samples or None)),
]
