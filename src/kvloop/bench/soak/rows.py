"""The verdicts of a soak, and its counts.

Memory is compared from when a third of the turns were asked (tables that fill have filled, pools have grown)
to when the last has ended. What a router may have gained until then is a constant, not a share: tables are
bounded, and as many conversations are alive at either time.
"""

from collections import Counter
from dataclasses import dataclass, field
from math import nan

from kvloop.bench.report import Bound, Row, Target
from kvloop.bench.soak.faults import Fault, Trouble
from kvloop.bench.soak.home import Held
from kvloop.bench.soak.stack import DECODE, Samples, total
from kvloop.bench.soak.tally import ERRORS, FAILURES, Outcome, Tally

PARTS = 12  # of the turns, after each of which memory is looked at
MOST_GROWTH_MIB = 10.0  # 2 KB for each turn that is asked after the first third
CONTROL_FILES = 5  # of the control channel, for each engine that ever granted a lease; kept
LONG_S = 150.0  # some ten seconds for each kind, and half a minute
MOST_TROUBLED = 0.85  # of the time: outside of windows there has to be enough to see errors in
NONE = Target(Bound.AT_MOST, 0)


@dataclass
class Sizes:
    """The router's process over the run: open files, resident memory, and how long it took at most to answer
    on its other port (`slowest_late_s`: this program's own lateness then, for the machine may be busy).
    """

    files_begin: int
    files_peak: int = 0
    files_end: int = 0
    slowest_s: float = 0.0
    slowest_at_s: float = 0.0
    slowest_late_s: float = 0.0
    memory_mib: list[float] = field(default_factory=list)

    @property
    def growth_mib(self) -> float:
        """From a third of the turns on; NaN where it was not looked at often enough."""
        early = self.memory_mib[: PARTS // 3]
        return self.memory_mib[-1] - early[-1] if len(self.memory_mib) > PARTS // 3 else nan


@dataclass(frozen=True)
class Ran:
    """A run that has ended. `held`: what had not come home."""

    speed: float
    turns: int
    began_s: float
    asked_s: float
    tally: Tally
    trouble: Trouble
    sizes: Sizes
    held: Held
    router: Samples
    tracebacks: int
    wrong_answers: float
    log_tail: str = field(repr=False, default="")

    def faults(self) -> Counter[str]:
        """How many of each kind."""
        return Counter(str(window.fault) for window in self.trouble.windows)

    @property
    def every_kind(self) -> bool:
        """Whether it was long enough for all kinds of faults."""
        return self.asked_s - self.began_s > LONG_S

    @property
    def troubled(self) -> float:
        """The share of the time that was in windows."""
        return self.trouble.share(self.began_s, self.asked_s)


def rows_of(ran: Ran) -> list[Row]:
    """All figures."""
    return [*_answers(ran), *_home(ran), *_process(ran)]


def _answers(ran: Ran) -> list[Row]:
    tally, outcomes = ran.tally, ran.tally.outcomes()
    rows = [
        Row(
            "turns",
            len(tally.reports),
            "",
            Target(Bound.AT_LEAST, ran.turns),
            f"{ran.turns / 2 / 60:.3g} minutes of traffic in {(ran.asked_s - ran.began_s) / 60:.2f}",
        ),
        Row("right answers", outcomes[Outcome.RIGHT], "", None, _by_path(ran)),
    ]
    rows += [Row(str(outcome), outcomes[outcome], "", NONE) for outcome in FAILURES]
    unexplained = tally.unexplained(ran.trouble.explains)
    rows.append(Row("errors that no fault explains", len(unexplained), "", NONE))
    explained = tally.by_fault(ran.trouble.explains)
    errors = sum(outcomes[outcome] for outcome in ERRORS) - len(unexplained)
    rows.append(Row("errors that a fault explains", errors, "", None, _listed(explained)))
    refused = {"refused", "garbage"}
    odd = {what: count for what, count in tally.hostile.items() if what not in refused}
    rows.append(Row("hostile requests not refused", sum(odd.values()), "", NONE, _listed(odd)))
    rows.append(Row("answers of engines from wrong KV", ran.wrong_answers, "", NONE, "of those still alive"))
    target = Target(Bound.AT_LEAST, len(Fault) if ran.every_kind else 1)
    rows.append(Row("kinds of faults", len(ran.faults()), "", target, _listed(ran.faults())))
    share = Target(Bound.AT_MOST, MOST_TROUBLED) if ran.every_kind else None
    rows.append(Row("share of the time in faults' windows", ran.troubled, "", share))
    return rows


def _home(ran: Ran) -> list[Row]:
    held = ran.held
    return [
        Row("left at the router: hops under way", held.in_flight, "", NONE),
        Row("left at the router: turns and their keys", held.conversations + held.keys, "", NONE),
        Row("left at the router: responses", held.responses, "", NONE),
        Row("left at the router: leases", held.leases, "", NONE),
        Row("left at the router: clients' connections", held.clients, "", NONE),
        Row("left at the router: idle connections with engines", held.idle, "", NONE),
        Row("left at engines: requests", held.running, "", NONE),
        Row("left at engines: leases and claims", held.engine_leases, "", NONE),
        Row("left at engines: share of blocks", held.blocks, "", NONE),
        Row("left at engines: unbalanced blocks", held.unbalanced, "", NONE),
    ]


def _process(ran: Ran) -> list[Row]:
    sizes = ran.sizes
    return [
        Row(
            "router's open files, beyond its first",
            sizes.files_end - sizes.files_begin,
            "",
            Target(Bound.AT_MOST, CONTROL_FILES * DECODE),
            f"{sizes.files_begin} before, {sizes.files_peak} at most, {sizes.files_end} in the end",
        ),
        Row(
            "router's memory, from a third of the turns on",
            sizes.growth_mib,
            "MiB",
            Target(Bound.AT_MOST, MOST_GROWTH_MIB),
            "by twelfths: " + " ".join(f"{mib:.1f}" for mib in sizes.memory_mib),
        ),
        Row(
            "router's slowest word on its health",
            sizes.slowest_s,
            "s",
            None,
            f"asked {sizes.slowest_late_s:.2f} s late",
        ),
        Row("tracebacks in the router's log", ran.tracebacks, "", NONE),
    ]


def told(ran: Ran) -> str:
    """The counts that are no figures, and examples of what went wrong."""
    tally, router = ran.tally, ran.router
    lines = [
        f"routes: {_listed(tally.routes())}",
        f"outcomes: {_listed(tally.outcomes())}",
        f"forks {tally.forks:,}, edited histories {tally.edits:,}, slow readers {tally.slow:,}",
        f"hostile: {_listed(tally.hostile)}",
        f"router: {_listed(_counted(router))}",
        *tally.examples(),
    ]
    if ran.tracebacks:
        lines += ["the end of the router's log:", ran.log_tail]
    return "\n".join(lines) + "\n"


def facts_of(ran: Ran) -> dict[str, object]:
    """The same, for the JSON file."""
    tally = ran.tally
    return {
        "speed": ran.speed,
        "routes": dict(tally.routes()),
        "outcomes": {str(outcome): count for outcome, count in tally.outcomes().items()},
        "by_path": _paths(ran),
        "errors_by_fault": dict(tally.by_fault(ran.trouble.explains)),
        "faults": dict(ran.faults()),
        "hostile": dict(tally.hostile),
        "forks": tally.forks,
        "edits": tally.edits,
        "slow_readers": tally.slow,
        "router": _counted(ran.router),
        "files_begin": ran.sizes.files_begin,
        "files_peak": ran.sizes.files_peak,
        "files_end": ran.sizes.files_end,
        "memory_mib": ran.sizes.memory_mib,
        "examples": tally.examples(),
    }


def _counted(router: Samples) -> dict[str, float]:
    """What the router counted itself."""
    names = {
        "hops replaced": "kvloop_router_fallbacks_total",
        "answers cut by engines": "kvloop_router_answers_cut_total",
        "clients gone": "kvloop_router_clients_gone_total",
        "answers continued": "kvloop_router_streams_continued_total",
        "breakers opened": "kvloop_router_breaker_openings_total",
        "handles filed": "kvloop_router_handles_filed_total",
    }
    return {what: total(router, name) for what, name in names.items()}


def _paths(ran: Ran) -> dict[str, int]:
    counted = Counter(
        f"{report.path}{' streamed' if report.streamed else ''}"
        for report in ran.tally.reports
        if report.outcome is Outcome.RIGHT
    )
    return dict(sorted(counted.items()))


def _by_path(ran: Ran) -> str:
    return _listed({path.removeprefix("/v1/"): count for path, count in _paths(ran).items()})


def _listed(counts: "Counter[str] | Counter[Outcome] | dict[str, int] | dict[str, float]") -> str:
    return ", ".join(f"{what} {count:,.0f}" for what, count in counts.items()) or "none"
