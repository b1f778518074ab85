"""The figures in docs/protocol.md are the code's."""

import re
from pathlib import Path

import pytest

from kvloop.core import life_table, returns, soft, worth
from kvloop.core.claim import MAX_QUESTIONS
from kvloop.core.keeper import KeeperTimes
from kvloop.core.life_table import Ending
from kvloop.core.returns import ReturnModel

PAGE = " ".join((Path(__file__).parents[2] / "docs" / "protocol.md").read_text().split())
S = 1_000_000_000
TIMES = KeeperTimes()
SHOWN_S = (4, 8, 15, 27, 64, 150, 360, 480)


def recorded_table() -> str:
    """How many of a hundred waits have ended by a return, by age; and when a new caller's lease is let go."""
    model = ReturnModel(TIMES.ttl_ns)
    rows = [
        "| after | " + " | ".join(f"{age} s" for age in SHOWN_S) + " | let go at |",
        "|---|" + "---:|" * (len(SHOWN_S) + 1),
    ]
    for ending in (Ending.TOOL_CALLS, Ending.STOP):
        chances = [model.chance("", ending, 0, age * S) for age in SHOWN_S]
        until = model.keep_until("", ending, 0) // S
        rows.append(
            f"| `{ending}` | " + " | ".join(f"{one / 10:.0f} %" for one in chances) + f" | {until} s |"
        )
    return "\n".join(rows)


def test_the_page_shows_the_recorded_sessions() -> None:
    """To mend it, paste what this test expects over the table in the page."""
    page = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
    assert recorded_table() in page, f"docs/protocol.md wants:\n{recorded_table()}"


@pytest.mark.parametrize(
    "stated",
    [
        f"ticks of `interval` ({TIMES.interval_ns // S} s) for terms of `term` ({TIMES.term_ns // S} s)",
        f"past `ttl` ({TIMES.ttl_ns // S} s) since the last use",
        "per engine and second" if TIMES.drop_every_ns == S else "?",
        f"with a new deadline, up to {MAX_QUESTIONS} times in all.",
        f"The default break-even time is {returns.DEFAULT_BREAK_EVEN_NS // S} s.",
        f"it has seen {life_table.FADE_WEIGHT // life_table.OBSERVATION} waits",
        f"with the weight of {returns.SHRINK_WEIGHT // life_table.OBSERVATION} waits",
        f"with the weight of {returns.PRIOR_WEIGHT // life_table.OBSERVATION}.",
        f"up to {soft.MAX_SOFT_LEASES:,} leases or {soft.MAX_SOFT_BYTES >> 20} MiB are",
        f"an even chance ({worth.UNRATED_CHANCE} permille)",
    ],
)
def test_the_page_states_the_defaults(stated: str) -> None:
    """Each where it is explained."""
    assert stated in PAGE


@pytest.mark.parametrize("ending", Ending)
def test_the_page_names_every_ending(ending: Ending) -> None:
    """An operator who sees one in a metric finds it explained."""
    assert re.search(rf"`{ending}`", PAGE)
