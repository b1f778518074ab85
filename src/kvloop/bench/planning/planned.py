"""A plan: the figures side by side, the settings to choose, why, and what of it all is extrapolated."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from kvloop.bench.planning.arrangement import one_way
from kvloop.bench.planning.choose import Chosen
from kvloop.bench.planning.run import Came, Runs
from kvloop.bench.planning.settings import lines
from kvloop.bench.planning.tables import as_json, settings_as_json, table

FORMAT = 1
WIDTH = 110


@dataclass(frozen=True, slots=True)
class Planned:
    """What is told. `columns`: the runs that are compared, each with its heading; of all others only what
    they decided is told, in `chosen`."""

    profile: str
    runs: Runs
    columns: Sequence[tuple[str, Came]]
    chosen: Sequence[Chosen]
    extrapolated: Sequence[str]

    def text(self, minutes: float) -> str:
        """For people. `minutes`: how long it took."""
        runs, traffic = self.runs, self.runs.traffic
        cache = "on" if runs.prefill_cache else "off"
        head = (
            f"{traffic.source}\n{len(traffic.sessions):,} conversations played, {traffic.turns:,} turns, "
            f"{traffic.prompt_tokens:,} prompt tokens, {traffic.per_hour:,.0f} conversations an hour\n"
            f"{self.profile}: {runs.profile.title}; prefill's own cache is {cache}\n"
        )
        figures = table(self.columns, self._floor, runs.profile.kv_token_bytes)
        settings = "".join(f"  {line}\n" for line in lines(self.chosen[-1].came.arrangement))
        reasons = "".join(_point(f"{one.what}: {one.why}") for one in self.chosen)
        parts = [
            head,
            figures,
            f"Settings for this traffic:\n\n{settings}",
            f"Why:\n\n{reasons}",
            f"Extrapolated, or not known:\n\n{''.join(map(_point, self.extrapolated))}",
            f"{len(runs.played)} runs, one setting changed at a time, in {minutes:.1f} minutes.\n",
        ]
        return "\n" + "\n".join(parts)

    def as_json(self) -> dict[str, Any]:
        """For programs: every run, those that only decided something too."""
        runs, traffic = self.runs, self.runs.traffic
        headings = {came.arrangement: heading for heading, came in self.columns}
        return {
            "format": FORMAT,
            "kvloop": version("kvloop"),
            "source": traffic.source,
            "workload": traffic.workload,
            "profile": self.profile,
            "prefill_cache": runs.prefill_cache,
            "seed": runs.seed,
            "conversations": {"played": len(traffic.sessions), "recorded": traffic.recorded},
            "turns": {"played": traffic.turns, "recorded": traffic.recorded_turns},
            "conversations_per_hour": traffic.per_hour,
            "runs": [
                as_json(
                    headings.get(one.arrangement, "tried"), one, self._floor(one), runs.profile.kv_token_bytes
                )
                for one in runs.played.values()
            ],
            "settings": settings_as_json(self.chosen[-1].came),
            "reasons": {one.what: one.why for one in self.chosen},
            "extrapolated": list(self.extrapolated),
        }

    def _floor(self, came: Came) -> Came | None:
        """The one-way run with as many engines of each kind, if there is one."""
        return self.runs.played.get(one_way(came.arrangement.prefill, came.arrangement.decode))


def _point(text: str) -> str:
    return (
        textwrap.fill(text, WIDTH, initial_indent="  * ", subsequent_indent="    ", break_on_hyphens=False)
        + "\n"
    )
