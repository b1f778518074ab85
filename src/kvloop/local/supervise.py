"""Processes that end when they are told to, when they fail, and when we die, together with all that they
started.

Each runs under a `warden`, which holds the other end of a pipe: closing ours, on purpose or by dying in any
way, stops it. Signals for the whole tree (kill, freeze, go on) go to its process group. A process that ended
is known to have ended completely: the warden says so only after it has swept up every descendant.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from kvloop.errors import UserError

_WARDEN = Path(__file__).with_name("warden.py")
# The warden's stages end after 6 s; what is left is the kernel's time to tear down gigabytes of memory.
STOP_TIMEOUT_S = 30.0
START_TIMEOUT_S = 30.0
_TAIL_BYTES = 64 * 1024


def tail(path: Path, lines: int) -> str:
    """The last lines of a log, undecodable bytes replaced; "" where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""


class Process:
    """One supervised command. Its output goes to `log_path`, appended over restarts.

    `pid` is the command's own (also its process group's). `status` is None while it runs, then its exit
    status, negative for a signal.
    """

    def __init__(self, name: str, argv: Sequence[str], env: Mapping[str, str], log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        self.status: int | None = None
        self._unread = b""
        self._warden = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_WARDEN), str(log_path), *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(env),
            start_new_session=True,
        )
        line = self._line(START_TIMEOUT_S)
        if line is None or not line.startswith(("started ", "ended ")):
            self.stop()
            raise UserError(f"{name} could not be started: its supervisor said {line!r}")
        self.pid = int(line.split()[1]) if line.startswith("started ") else 0
        if not self.pid:
            self._ended(line)

    def _line(self, timeout_s: float) -> str | None:
        """The warden's next line, or None if there is none in time; "" when it is gone."""
        stdout = self._warden.stdout
        if stdout is None or stdout.closed:
            return ""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if not select.select([stdout], [], [], max(0.0, left))[0]:
                return None
            data = os.read(stdout.fileno(), 4096)
            if not data:
                return ""
            self._unread += data
        line, self._unread = self._unread.split(b"\n", 1)
        return line.decode()

    def _ended(self, line: str) -> None:
        # A warden that is gone without a word was killed; the kernel then kills the command.
        self.status = int(line.split()[1]) if line else -signal.SIGKILL
        self._warden.wait()
        for pipe in (self._warden.stdin, self._warden.stdout):
            if pipe is not None:
                pipe.close()

    def wait(self, timeout_s: float) -> int | None:
        """The exit status once the command and all its descendants are gone; None if they are not in time."""
        if self.status is None:
            line = self._line(timeout_s)
            if line is not None:
                self._ended(line)
        return self.status

    @property
    def running(self) -> bool:
        """Whether the command has not ended (a frozen one has not)."""
        return self.wait(0.0) is None

    def signal(self, number: int) -> None:
        """Send a signal to the command's whole process group; nothing happens if it has ended."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):  # ended a moment ago, and its warden has reaped it
                os.killpg(self.pid, number)

    def ask_to_stop(self) -> None:
        """Start the orderly end: terminate, interrupt, kill. Returns at once."""
        stdin = self._warden.stdin
        if stdin is not None and not stdin.closed:
            stdin.close()

    def stop(self) -> None:
        """Stop it and wait until nothing of it is left."""
        stop_all([self])

    def abandon(self) -> None:
        """Kill the group and the warden without waiting for either to agree."""
        self.signal(signal.SIGKILL)
        self._warden.kill()
        self._ended("")

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of its log."""
        return tail(self.log_path, lines)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Holds signals back until the block is left: an impatient second Ctrl-C must not cut a stop in two."""
    previous = signal.pthread_sigmask(
        signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    )
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def stop_all(processes: Iterable[Process]) -> None:
    """Stop several at once and wait for all; a warden that does not answer in `STOP_TIMEOUT_S` is killed."""
    stopping = list(processes)
    with _undisturbed():
        for process in stopping:
            process.ask_to_stop()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in stopping:
            if process.wait(max(0.0, deadline - time.monotonic())) is None:
                process.abandon()
