"""The recorded agent sessions of `bench/traces`, as conversations.

The format is read by the fleet simulation's reader (`sim/fleet/recorded.py`). When a session began is not
recorded: all begin at 0, and it is for the client to spread them. A subagent is a conversation of its own.
"""

from collections.abc import Iterator
from pathlib import Path

from kvloop.bench.workload.blocks import Blocks, InCommon
from kvloop.bench.workload.files import read_bytes
from kvloop.bench.workload.options import RecordingOptions
from kvloop.bench.workload.recording import FIRST_TOKEN_S, Asked, Recorded, took_s, workload
from kvloop.bench.workload.turns import Workload
from kvloop.core.life_table import Ending
from kvloop.sim.fleet.recorded import BLOCK_TOKENS, NS_PER_S, RecordedSession, read_recorded


def read_agent_sessions(path: Path, options: RecordingOptions | None = None) -> Workload:
    """The sessions of a file. UserError that names the line and the field."""
    options = options or RecordingOptions()
    read_bytes(path)  # for its bounds: what is packed may be anything
    found = (Recorded(one.name, list(_asked(one))) for one in read_recorded(path))
    return workload("agent-sessions", path.name, found, options)


def _asked(session: RecordedSession) -> Iterator[Asked]:
    in_common = InCommon(BLOCK_TOKENS)
    start_s = end_s = 0.0
    for number, turn in enumerate(session.turns):
        start_s = (start_s if turn.overlaps else end_s) + turn.after_ns / NS_PER_S
        duration_s = _took_s(session, number)
        end_s = start_s + duration_s
        found = in_common.put(Blocks(turn.prompt_tokens, turn.answer_tokens, turn.runs))
        shared = 0
        if found is not None:
            is_beside = turn.overlaps and found.like == number - 1
            shared = in_common.shared_tokens(number, found, is_answered=not is_beside)
        is_tool = number > 0 and session.turns[number - 1].ending is Ending.TOOL_CALLS
        yield Asked(
            start_s,
            duration_s,
            turn.prompt_tokens,
            turn.answer_tokens,
            like=None if found is None else found.like,
            shared_tokens=shared,
            follows=None if turn.overlaps or not number else number - 1,
            kind="tool" if is_tool else "user",
        )


def _took_s(session: RecordedSession, number: int) -> float:
    """How long an answer took: an estimate, but longer than until a turn that began meanwhile."""
    estimate_s = took_s(session.turns[number].answer_tokens)
    after = session.turns[number + 1 : number + 2]
    if after and after[0].overlaps:
        return max(estimate_s, after[0].after_ns / NS_PER_S + FIRST_TOKEN_S)
    return estimate_s
