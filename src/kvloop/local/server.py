"""One HTTP server process at a fixed address: started, watched until ready, frozen, killed, started again.

Address, command and environment are decided once, so that a restarted engine is the same engine to everybody
else: same ports, same engine id, new process. That is how a crash looks from outside, and what the tests
need.
"""

import http.client
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvloop.errors import UserError
from kvloop.local.supervise import Process, tail

HEALTH_TIMEOUT_S = 2.0
KILL_TIMEOUT_S = 30.0
FAILURE_TAIL_LINES = 20


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """What to run and where it will listen. `env` is the complete environment."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    host: str
    port: int
    log_path: Path
    health_path: str = "/health"


class Server:
    """A server of a stack. Methods that change it wait until the change is complete, except where they say
    so."""

    def __init__(self, spec: ServerSpec) -> None:
        self.spec = spec
        self._process: Process | None = None

    @property
    def name(self) -> str:
        """Its name in logs and messages, e.g. `decode-0`."""
        return self.spec.name

    @property
    def port(self) -> int:
        """The HTTP port."""
        return self.spec.port

    @property
    def url(self) -> str:
        """`http://host:port`, without a slash at the end."""
        host = f"[{self.spec.host}]" if ":" in self.spec.host else self.spec.host
        return f"http://{host}:{self.spec.port}"

    @property
    def pid(self) -> int:
        """Process id of the server, which is also its process group. Raises `UserError` if it was never
        started."""
        return self._started().pid

    @property
    def process(self) -> Process | None:
        """The supervised process; None before the first start."""
        return self._process

    def _started(self) -> Process:
        if self._process is None:
            raise UserError(f"{self.name} has not been started")
        return self._process

    @property
    def running(self) -> bool:
        """Whether its process exists (frozen or not)."""
        return self._process is not None and self._process.running

    def start(self) -> None:
        """Start the process; returns before it is ready. Nothing happens if it runs."""
        if not self.running:
            self._process = Process(self.spec.name, self.spec.argv, self.spec.env, self.spec.log_path)

    def is_ready(self) -> bool:
        """Whether its health check answers 200. Raises `UserError`, with the log's tail, if the process has
        ended."""
        process = self._started()
        if not process.running:
            raise UserError(
                f"{self.name} ended with {describe_status(process.status)} while starting; the end of "
                f"{self.spec.log_path}:\n{self.log_tail(FAILURE_TAIL_LINES)}"
            )
        return self.is_healthy()

    def is_healthy(self) -> bool:
        """Whether its health check answers 200 within `HEALTH_TIMEOUT_S`."""
        connection = http.client.HTTPConnection(self.spec.host, self.spec.port, timeout=HEALTH_TIMEOUT_S)
        try:
            connection.request("GET", self.spec.health_path)
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def kill(self) -> None:
        """SIGKILL for the whole process tree: a crash. Returns when nothing of it is left."""
        process = self._started()
        process.signal(signal.SIGKILL)
        if process.wait(KILL_TIMEOUT_S) is None:
            process.abandon()

    def stop(self) -> None:
        """SIGSTOP for the whole process tree: it keeps its connections and answers nothing. Undone by
        `cont`."""
        self._started().signal(signal.SIGSTOP)

    def cont(self) -> None:
        """SIGCONT for the whole process tree."""
        self._started().signal(signal.SIGCONT)

    def shut_down(self) -> None:
        """The orderly end (terminate, interrupt, kill). Nothing happens if it does not run."""
        if self._process is not None:
            self._process.stop()

    def log_tail(self, lines: int = FAILURE_TAIL_LINES) -> str:
        """The last lines of its log, over all its starts."""
        return tail(self.spec.log_path, lines)


def describe_status(status: int | None) -> str:
    """An exit status in words: `status 1`, `SIGKILL`."""
    if status is not None and status < 0:
        return signal.Signals(-status).name
    return f"status {status}"
