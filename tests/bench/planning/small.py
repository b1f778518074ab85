"""Traffic that is small enough to be counted by hand."""

from pathlib import Path

from kvloop.bench.planning.arrangement import Arrangement, kvloop
from kvloop.bench.planning.run import Came, Tokens
from kvloop.bench.planning.traffic import Asked, Traffic
from kvloop.core.life_table import Ending
from kvloop.sim.fleet.recorded import BLOCK_TOKENS, RecordedSession, RecordedTurn

S = 1_000_000_000


def turn(blocks: int, after_s: float = 0.0, first: int = 1) -> RecordedTurn:
    """A prompt of the first so many of a session's blocks, and a token more."""
    names = ((first, blocks),)
    return RecordedTurn(blocks * BLOCK_TOKENS + 1, 2, Ending.TOOL_CALLS, names, round(after_s * S))


def traffic_of(*sessions: RecordedSession, per_hour: float = 60.0) -> Traffic:
    """These, as if there had been no others."""
    return Traffic(
        sessions=sessions,
        workload="agent-sessions",
        source="made up",
        recorded=len(sessions),
        recorded_turns=sum(len(one.turns) for one in sessions),
        has_starts=False,
        has_gaps=True,
        per_hour=per_hour,
        span_s=0.0,
        estimates_lengths=False,
        asked=Asked(Path("none"), "agent-sessions"),
    )


def came(
    p90_ms: float | None,
    held: float = 0.0,
    arrangement: Arrangement | None = None,
    *,
    is_through: bool = True,
    busy_share: float = 0.5,
) -> Came:
    """A run that never was."""
    return Came(
        arrangement=arrangement or kvloop(1, 1),
        turns=10,
        tokens=Tokens(prompt=1000, at_prefill=500, computed_by_prefill=500),
        median_ms=p90_ms,
        p90_ms=p90_ms,
        p99_ms=p90_ms,
        prefill_busy_s=1.0,
        busy_share=busy_share,
        open=2.0,
        held_tokens=held,
        most_held_tokens=round(2 * held),
        room_tokens=100_000,
        reclaimed=0,
        preempted=0,
        lasted_s=100.0,
        is_through=is_through,
    )
