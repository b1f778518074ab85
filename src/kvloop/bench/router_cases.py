"""What is measured of routers, and what kvloop's has to reach beside the others: cases, ratios, verdicts.

A ratio is of medians over the rounds of one run. What could not be measured is NaN, which meets no target.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvloop.bench.peers import KVLOOP, NAMES, SMG, VLLM_ROUTER
from kvloop.bench.report import Bound, Row, Target, rounded, spread
from kvloop.bench.router_load import Load, Sample

LOAD, PACED, MANY, IDLE = "load", "paced", "many", "idle"
INTERVAL_US = 50_000
ENDLESS_TOKENS = 1_000_000
HOUR_US = 3_600_000_000
MOST_LATE_SHARE = 0.001  # more than an interval behind: a router that keeps up has next to none
LEAST_DELIVERED_SHARE = 0.99
WANTED_IDLE = 10_000
WANTED_PACED = 1_500
_NAN = float("nan")
_MEANT = 1e6 / INTERVAL_US

Samples = dict[str, dict[str, list[Sample]]]
"""Of each case and router, one for each round."""

Figure = Callable[[Sample], float]


@dataclass(frozen=True, slots=True)
class Case:
    """One load, for so long after so much warm-up, at most so often."""

    name: str
    part: str
    load: Load
    seconds: float = 2.0
    warm_s: float = 0.5
    most_rounds: int = 1000

    def fitting(self, most_streams: int) -> "Case":
        """The same with no more streams than there can be."""
        return replace(self, load=replace(self.load, clients=min(self.load.clients, most_streams)))

    def said(self, sample: Sample) -> str:
        """A sample in a few words."""
        if self.part == LOAD:
            rate = f"{sample.requests / sample.seconds:,.0f} requests/s, median {sample.p50_ms:.2f} ms"
            return f"{rate}, {per_thousand(sample):.3f} CPU s per 1,000"
        if self.part == IDLE:
            return f"{sample.clients:,} streams, {per_stream(sample):.1f} KiB each"
        return f"{per_event_us(sample):.1f} µs an event, {sample.late:,} of {sample.events:,} late"


def per_second(sample: Sample) -> float:
    """Requests a second."""
    return sample.requests / sample.seconds


def events_per_second(sample: Sample) -> float:
    """Events a second that reached the clients."""
    return sample.events / sample.seconds


def per_thousand(sample: Sample) -> float:
    """CPU seconds for 1,000 requests."""
    return 1000 * sample.cpu_s / sample.requests if sample.requests else _NAN


def per_event_us(sample: Sample) -> float:
    """CPU microseconds for an event."""
    return 1e6 * sample.cpu_s / sample.events if sample.events else _NAN


def per_stream(sample: Sample) -> float:
    """Resident KiB for an open stream."""
    return sample.rss_kib / sample.clients if sample.clients else _NAN


def _cases(quick: bool) -> tuple[Case, ...]:
    seconds, warm_s = (0.3, 0.1) if quick else (2.0, 0.5)
    paced_s, streams, many, idle = (0.5, 20, 50, 100) if quick else (5.0, 300, WANTED_PACED, WANTED_IDLE)
    endless = Load(streams, 2048, True, ENDLESS_TOKENS, INTERVAL_US, whole=False)
    return (
        Case("plain 2 KB, 1 client", LOAD, Load(1, 2048), seconds, warm_s),
        Case("plain 2 KB, 16 clients", LOAD, Load(16, 2048), seconds, warm_s),
        Case("stream 2 KB, 16 clients", LOAD, Load(16, 2048, True), seconds, warm_s),
        Case("plain 64 KB, 16 clients", LOAD, Load(16, 65536), seconds, warm_s),
        Case("stream 64 KB, 16 clients", LOAD, Load(16, 65536, True), seconds, warm_s),
        Case("paced streams", PACED, endless, paced_s, warm_s),
        Case("many paced streams", MANY, replace(endless, clients=many), 2 * paced_s, 4 * warm_s, 2),
        Case(
            "idle streams", IDLE, replace(endless, clients=idle, interval_us=HOUR_US), seconds, 2 * warm_s, 1
        ),
    )


CASES, QUICK = _cases(quick=False), _cases(quick=True)


def medians(by_router: dict[str, list[Sample]], figure: Figure) -> dict[str, float]:
    """A figure of each router."""
    return {name: statistics.median(map(figure, several)) for name, several in by_router.items() if several}


def figures(samples: Samples) -> str:
    """All medians as text: a line for each case and router."""
    heads = (
        "case",
        "router",
        "requests/s",
        "median ms",
        "p99 ms",
        "events/s",
        "CPU s/1,000",
        "µs/event",
        "MiB",
    )
    lines: list[tuple[str, ...]] = [heads]
    for case, by_router in samples.items():
        for name in [name for name in NAMES if name in by_router]:
            several = by_router[name]
            cells = [
                statistics.median(map(figure, several))
                for figure in (
                    per_second,
                    lambda one: one.p50_ms,
                    lambda one: one.p99_ms,
                    events_per_second,
                    per_thousand,
                    per_event_us,
                    lambda one: one.rss_kib / 1024,
                )
            ]
            lines.append(
                (case, name, *("-" if not cell or math.isnan(cell) else rounded(cell) for cell in cells))
            )
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    return "".join(
        "  ".join([cell.ljust(width) for cell, width in zip(line, widths, strict=True)]).rstrip() + "\n"
        for line in lines
    )


def rows_of(cases: Sequence[Case], samples: Samples, most_streams: int) -> list[Row]:
    """The verdicts on the cases that were to be measured."""
    by_name = {case.name: samples.get(case.name, {}) for case in cases}
    rows = _load_rows(by_name)
    for case in cases:
        of_case = by_name[case.name]
        if case.part == PACED:
            rows.append(_against_best("CPU for an event, paced streams", of_case, per_event_us, "µs", 0.9))
        elif case.part == MANY:
            rows += _many_rows(case, of_case)
        elif case.part == IDLE:
            rows += _idle_rows(case, of_case, most_streams)
    return rows


def _load_rows(by_name: dict[str, dict[str, list[Sample]]]) -> list[Row]:
    rows = []
    for case, figure, unit, least in (
        ("plain 2 KB, 16 clients", per_second, "requests/s", 2.0),
        ("stream 2 KB, 16 clients", events_per_second, "events/s", 1.5),
        ("plain 64 KB, 16 clients", per_second, "requests/s", 1.3),
        ("stream 64 KB, 16 clients", events_per_second, "events/s", 1.3),
    ):
        if case in by_name:
            what = f"{case}: {unit}, ÷ {VLLM_ROUTER}'s"
            rows.append(_ratio(what, by_name[case], figure, unit, VLLM_ROUTER, Target(Bound.AT_LEAST, least)))
            rows.append(_ratio(f"{case}: {unit}, ÷ {SMG}'s", by_name[case], figure, unit, SMG, None))
    one = "plain 2 KB, 1 client"
    if one in by_name:
        rows.append(
            _against_best(f"{one}: median latency", by_name[one], lambda each: each.p50_ms, "ms", 1.0)
        )
    return rows


def _many_rows(case: Case, by_router: dict[str, list[Sample]]) -> list[Row]:
    def late(sample: Sample) -> float:
        return 100 * sample.late / sample.events if sample.events else _NAN

    def delivered(sample: Sample) -> float:
        return sample.events / (_MEANT * case.load.clients * sample.seconds)

    rows = []
    for name in [name for name in NAMES if name == KVLOOP or name in by_router]:
        several = by_router.get(name, [])
        mine = name == KVLOOP
        behind = spread([sample.behind_ms for sample in several], "ms") + " behind at the worst"
        of_one = f"{case.load.clients:,} streams of {_MEANT:g} events/s, {name}"
        rows.append(
            Row(
                f"{of_one}: events over an interval late",
                _median(several, late),
                "%",
                Target(Bound.AT_MOST, 100 * MOST_LATE_SHARE) if mine else None,
                behind,
            )
        )
        cpu = "CPU: " + spread([per_event_us(sample) for sample in several], "µs an event")
        least = Target(Bound.AT_LEAST, LEAST_DELIVERED_SHARE) if mine else None
        rows.append(Row(f"{of_one}: events that came ÷ due", _median(several, delivered), "", least, cpu))
    return rows


def _idle_rows(case: Case, by_router: dict[str, list[Sample]], most_streams: int) -> list[Row]:
    wanted = case.load.clients
    detail = ""
    if wanted == most_streams:
        detail = f"a process may have no more files here than {wanted:,} streams take"
    mine = by_router.get(KVLOOP, [])
    rows = [
        Row(
            "idle streams held open",
            _median(mine, lambda one: float(one.clients)),
            "",
            Target(Bound.AT_LEAST, wanted),
            detail,
        )
    ]
    for name, several in by_router.items():
        each = spread([per_stream(one) for one in several], "KiB")
        rows.append(Row(f"memory of an idle stream, {name}", _median(several, per_stream), "KiB", None, each))
    return rows


def _median(several: Sequence[Sample], figure: Figure) -> float:
    return statistics.median(map(figure, several)) if several else _NAN


def _ratio(
    what: str,
    by_router: dict[str, list[Sample]],
    figure: Figure,
    unit: str,
    other: str,
    target: Target | None,
) -> Row:
    ours, theirs = by_router.get(KVLOOP, []), by_router.get(other, [])
    detail = f"{KVLOOP} {spread([*map(figure, ours)], unit)}; {other} {spread([*map(figure, theirs)], unit)}"
    below = _median(theirs, figure)
    return Row(what, _median(ours, figure) / below if below else _NAN, "x", target, detail)


def _against_best(
    what: str, by_router: dict[str, list[Sample]], figure: Figure, unit: str, most: float
) -> Row:
    """Against the other router that has the least."""
    theirs = {name: value for name, value in medians(by_router, figure).items() if name != KVLOOP}
    best = min(theirs, key=lambda name: theirs[name], default="no other router")
    target = Target(Bound.AT_MOST, most)
    return _ratio(f"{what}, ÷ the best other's ({best})", by_router, figure, unit, best, target)
