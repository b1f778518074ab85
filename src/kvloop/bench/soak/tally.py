"""What a soak's clients report, and what the reports come to once all windows of faults are known."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from kvloop.bench.soak.faults import Fault

MAX_EXAMPLES = 20


class Outcome(StrEnum):
    """What came of one turn."""

    RIGHT = "right"
    LEFT = "client left"
    REFUSED = "error before the first byte"
    ENDED = "error event in a stream"
    WRONG = "wrong text"
    SILENT = "stopped without an end"
    LOST = "no answer"
    STUCK = "did not end in time"
    LEAKED = "block metadata"


FAILURES = (Outcome.WRONG, Outcome.SILENT, Outcome.LOST, Outcome.STUCK, Outcome.LEAKED)
"""What no fault excuses."""
ERRORS = (Outcome.REFUSED, Outcome.ENDED)
"""What one may excuse."""


@dataclass(frozen=True, slots=True)
class Report:
    """One turn: when, how it was asked, what came of it, and in what words."""

    began_s: float
    ended_s: float
    path: str
    streamed: bool
    outcome: Outcome
    route: str = ""
    words: str = ""


@dataclass
class Tally:
    """All reports, and the hostile requests by what came of them."""

    reports: list[Report] = field(default_factory=list)
    hostile: Counter[str] = field(default_factory=Counter)
    forks: int = 0
    edits: int = 0
    slow: int = 0

    def outcomes(self) -> Counter[Outcome]:
        """How many of each."""
        return Counter(report.outcome for report in self.reports)

    def routes(self) -> Counter[str]:
        """Answers by route."""
        return Counter(report.route for report in self.reports if report.route)

    def unexplained(self, explains: Callable[[float, float], Fault | None]) -> list[Report]:
        """Errors outside of all windows."""
        return [
            report
            for report in self.reports
            if report.outcome in ERRORS and explains(report.began_s, report.ended_s) is None
        ]

    def by_fault(self, explains: Callable[[float, float], Fault | None]) -> Counter[str]:
        """Errors by their fault and kind."""
        return Counter(
            f"{explains(report.began_s, report.ended_s) or 'no fault'}: {report.outcome}"
            for report in self.reports
            if report.outcome in ERRORS
        )

    def examples(self) -> list[str]:
        """Words of what went wrong, the first few of each kind."""
        seen: Counter[Outcome] = Counter()
        told = []
        for report in self.reports:
            if report.outcome in (*FAILURES, *ERRORS):
                seen[report.outcome] += 1
                if seen[report.outcome] <= MAX_EXAMPLES:
                    how = "streamed" if report.streamed else "whole"
                    told.append(f"{report.began_s:.2f} {report.path} {how}: {report.outcome}: {report.words}")
        return told
