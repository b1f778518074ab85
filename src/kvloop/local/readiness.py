"""Waiting for servers to become ready, saying how far it is.

Loading an engine takes from seconds to minutes and prints nothing useful, so the estimate is what the same
start took last time on this machine, kept in the cache folder. Without one, only the seconds passed are
shown: no number is better than a wrong one.
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvloop.errors import UserError
from kvloop.local.server import FAILURE_TAIL_LINES, Server

Say = Callable[[str], None]

POLL_INTERVAL_S = 0.2
REPORT_INTERVAL_S = 10.0


def _read(path: Path) -> dict[str, float]:
    try:
        times = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return {key: float(value) for key, value in times.items()} if isinstance(times, dict) else {}


class StartTimes:
    """How long each kind of start took last time, in seconds. Losing the file loses an estimate."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def expected_s(self, kind: str) -> float | None:
        """What the last such start took; None if there was none."""
        return _read(self._path).get(kind)

    def record(self, kind: str, seconds: float) -> None:
        """Remember a start."""
        times = _read(self._path) | {kind: round(seconds, 1)}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._path.with_name(f".{self._path.name}-{os.getpid()}")
        fresh.write_text(json.dumps(times))
        fresh.replace(self._path)


def _progress(waiting: Sequence[Server], passed_s: float, expected_s: float | None) -> str:
    names = ", ".join(server.name for server in waiting)
    return f"waiting for {names}: {passed_s:.0f} s" + (
        f" ({expected_s:.0f} s last time)" if expected_s else ""
    )


def wait_ready(
    servers: Sequence[Server], timeout_s: float, say: Say, expected_s: float | None = None
) -> float:
    """Wait until every server is ready; returns the seconds it took.

    Raises `UserError` with the log's tail as soon as one of them ends, or when `timeout_s` has passed.
    """
    began = time.monotonic()
    reported = began
    waiting = list(servers)
    while True:
        waiting = [server for server in waiting if not server.is_ready()]
        now = time.monotonic()
        if not waiting:
            return now - began
        if now - began > timeout_s:
            slow = waiting[0]
            raise UserError(
                f"{slow.name} was not ready after {timeout_s:.0f} s; the end of {slow.spec.log_path}:\n"
                f"{slow.log_tail(FAILURE_TAIL_LINES)}"
            )
        if now - reported >= REPORT_INTERVAL_S:
            reported = now
            say(_progress(waiting, now - began, expected_s))
        time.sleep(POLL_INTERVAL_S)
