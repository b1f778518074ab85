"""Recorded agent sessions, read for replay (see `traces/README.md` for where they are from and the format).

A session is a row of turns, each a request with its prompt's content as ids of stretches of `UNIT_TOKENS`
tokens: two prompts of a session share as many tokens as the ids they begin with. A subagent is a session of
its own. What a turn's answer contains is not recorded, only its length.
"""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from kvloop.core.chain import SEGMENT_TOKENS
from kvloop.core.returns import Ending
from kvloop.errors import UserError

DEFAULT_TRACE = Path(__file__).parent / "traces" / "agent-sessions.jsonl.gz"
UNIT_SEGMENTS = 8
UNIT_TOKENS = UNIT_SEGMENTS * SEGMENT_TOKENS
UNRECORDED_FIRST_S = 2.34
"""Taken for the time to an answer's first byte where it is not recorded: the median of the 1,016 that are."""
_ENDINGS = {"tool_use": Ending.TOOL_CALLS, "max_tokens": Ending.LENGTH}


@dataclass(frozen=True, slots=True)
class TraceTurn:
    """One request: when it starts, seconds after its session's first, and how long it takes, to its answer's
    first byte and in all."""

    start_s: float
    first_s: float
    took_s: float
    units: tuple[int, ...]
    input_tokens: int
    output_tokens: int
    ending: Ending


@dataclass(frozen=True, slots=True)
class TraceSession:
    """A conversation's requests in order of start."""

    name: str
    turns: tuple[TraceTurn, ...]


def read_sessions(path: Path = DEFAULT_TRACE) -> list[TraceSession]:
    """All sessions of a trace, subagents behind their parents. UserError for a file that is no trace."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            return [found for line in lines for found in _sessions(json.loads(line))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a trace of agent sessions: {error}") from error


def _sessions(record: dict[str, Any]) -> Iterator[TraceSession]:
    yield from _conversation(str(record["id"]), record["requests"])


def _conversation(name: str, requests: list[dict[str, Any]]) -> Iterator[TraceSession]:
    turns = [_turn(request) for request in requests if "in" in request]
    if turns:
        yield TraceSession(name, tuple(sorted(turns, key=lambda turn: turn.start_s)))
    for number, request in enumerate(requests):
        if request.get("type") == "subagent":
            yield from _conversation(f"{name}/{number}", request.get("requests", []))


def _turn(request: dict[str, Any]) -> TraceTurn:
    segments = chain.from_iterable(range(first, first + length) for first, length in request["hash_runs"])
    units: list[int] = []
    path = 0
    while len(unit := tuple(islice(segments, UNIT_SEGMENTS))) == UNIT_SEGMENTS:
        path = hash((path, unit))  # of integers: the same in every process
        units.append(path)
    took_s = float(request.get("api_time") or 0.0)
    return TraceTurn(
        start_s=float(request["t"]),
        first_s=min(took_s, float(request.get("ttft") or UNRECORDED_FIRST_S)),
        took_s=took_s,
        units=tuple(units),
        input_tokens=int(request["in"]),
        output_tokens=int(request["out"]),
        ending=_ENDINGS.get(str(request.get("stop")), Ending.STOP),
    )
