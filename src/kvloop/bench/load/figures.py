"""What a raw file comes to: figures for each leg, and legs against each other.

A warm-up request is left out of all times. One that fails, or is answered otherwise than by the other legs,
counts as one: what is wrong is wrong from the first request on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvloop.bench.load.leg import LegFigures, leg_figures, measured
from kvloop.bench.load.mismatch import Failure, Mismatch, failures_of, mismatches_of
from kvloop.bench.load.pairs import Comparison, compared
from kvloop.bench.load.record import End, Record, Request, Run, Sample, Window
from kvloop.bench.load.spread import told

DONE = "done"
COPY_RATE = "copy_bytes_per_s"
"""Among the facts of the machine."""


@dataclass(frozen=True, slots=True)
class Figures:
    """All of it. `ended` is what the last line says, None where the file has none: it was cut off."""

    run: Run | None
    ended: str | None
    legs: list[LegFigures]
    comparisons: list[Comparison]
    mismatches: list[Mismatch]
    failures: list[Failure]

    @property
    def copy_bytes_per_s(self) -> float | None:
        """What a plain copy between two processes of the machine reaches, where the run tells it."""
        known = self.run.machine.get(COPY_RATE) if self.run else None
        return told(known) if isinstance(known, int | float) else None

    @property
    def cut_off(self) -> str | None:
        """Why this is not the whole run; None where it is."""
        if self.ended is None:
            return "the file ends before the run does"
        return None if self.ended == DONE else self.ended


def figures_of(records: Sequence[Record]) -> Figures:
    """The figures of a raw file's records, whatever there is of them."""
    run = next((one for one in records if isinstance(one, Run)), None)
    end = next((one for one in reversed(records) if isinstance(one, End)), None)
    described = {leg.name: leg.description for leg in run.legs} if run else {}
    requests: dict[str, list[Request]] = {name: [] for name in described}
    samples: dict[str, list[Sample]] = {}
    windows: dict[str, list[Window]] = {}
    for one in records:
        if isinstance(one, Request):
            requests.setdefault(one.leg, []).append(one)
        elif isinstance(one, Sample):
            samples.setdefault(one.leg, []).append(one)
        elif isinstance(one, Window):
            windows.setdefault(one.leg, []).append(one)
    return Figures(
        run=run,
        ended=end.why if end else None,
        legs=[
            leg_figures(name, described.get(name, ""), asked, windows.get(name, []), samples.get(name, []))
            for name, asked in requests.items()
        ],
        comparisons=compared({name: measured(asked) for name, asked in requests.items()}),
        mismatches=mismatches_of(requests),
        failures=failures_of(requests),
    )


def is_sound(figures: Figures) -> bool:
    """Whether the figures may be believed: there is a leg, each answered what was asked of it and measured
    something, and no two answered differently."""
    return bool(figures.legs) and all(
        leg.asked and not leg.failed and not leg.differing for leg in figures.legs
    )
