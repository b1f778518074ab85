"""The processes of a soak: the router as it is delivered, and simulated engines that can be hurt.

Engines run on a profile made faster: a wall second of theirs is so many of the modelled machine's. The terms
of leases and conversations are made shorter by the same factor; all else the router has as by default.
"""

import contextlib
import json
import os
import secrets
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvloop.bench.soak.conversation import MODEL
from kvloop.errors import UserError
from kvloop.local.ports import free_ports
from kvloop.local.supervise import Process, stop_all

HOST = "127.0.0.1"
PROFILE = "glm-5-fp8-h200"  # slow enough that much is under way at any time
PREFILL, DECODE = 2, 3
FORGETFUL = ("prefill-0",)  # without a prefix cache, as one that has more to do than to keep it
READY_S = 60.0
CALL_S = 5.0
POLL_S = 0.1
TERM_S, TTL_S = 60.0, 480.0  # as modelled: a lease's term and life, by default
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
Samples = dict[tuple[str, str], float]


@dataclass(slots=True)
class EngineProcess:
    """One engine: its command, and the process that runs it, None while it is down."""

    name: str
    role: str
    url: str
    command: Sequence[str]
    log: Path
    process: Process | None = None

    def start(self) -> None:
        """Run it; it answers a little later."""
        self.process = Process(self.name, self.command, os.environ, self.log)

    def answers(self) -> bool:
        """Whether it is up."""
        return self.process is not None and self.process.running and _status(f"{self.url}/health") == 200

    def samples(self) -> Samples:
        """Its metrics, as they are now."""
        return samples_of(_get(f"{self.url}/metrics"))

    def wrong_answers(self) -> float:
        """Requests that it computed from KV of other tokens, since its last start."""
        return total(self.samples(), "kvloop_sim_wrong_answers_total")


@dataclass
class Stack:
    """Everything that runs, and what can be read of it."""

    port: int
    admin: str
    engines: list[EngineProcess]
    speed: float
    router: Process = field(init=False)

    def of(self, role: str) -> list[EngineProcess]:
        """The engines of a role."""
        return [engine for engine in self.engines if engine.role == role]

    def files(self) -> int:
        """Open files of the router's process: sockets, for the most part."""
        return len([*Path(f"/proc/{self.router.pid}/fd").iterdir()])

    def connections(self) -> tuple[int, int]:
        """The router's with clients, and with engines (not of the control channel)."""
        engines = {int(engine.url.rpartition(":")[2]) for engine in self.engines}
        with_clients = with_engines = 0
        for local, remote in _ends(self.router.pid):
            with_clients += local == self.port and remote != 0
            with_engines += remote in engines
        return with_clients, with_engines

    def memory_mib(self) -> float:
        """Resident memory of the router's process."""
        pages = int(Path(f"/proc/{self.router.pid}/statm").read_text().split()[1])
        return pages * _PAGE_BYTES / (1 << 20)

    def samples(self) -> Samples:
        """The router's metrics, as they are now."""
        return samples_of(_get(f"{self.admin}/metrics"))

    def conversations(self) -> int:
        """How many turns the router can find; those whose time is over are forgotten by looking."""
        return int(json.loads(_get(f"{self.admin}/conversations?limit=1"))["total"])

    def in_service(self) -> set[str]:
        """URLs of the engines that the router uses, as far as it says so in time."""
        return {engine["url"] for engine in self._health() if engine["available"]}

    def under_way(self) -> dict[str, int]:
        """Hops at each engine, by URL, as far as the router says so in time."""
        return {engine["url"]: engine["in_flight"] for engine in self._health()}

    def _health(self) -> list[dict[str, Any]]:
        try:
            health = json.loads(_get(f"{self.admin}/health"))
        except urllib.error.HTTPError as error:  # no decode engine is left
            health = json.loads(error.read())
        except OSError:
            return []
        return list(health["engines"])

    def order(self, what: str, engine: EngineProcess) -> None:
        """`drain` or `undrain` an engine, as an operator does."""
        request = urllib.request.Request(
            f"{self.admin}/engines/{what}", json.dumps({"url": engine.url}).encode(), method="POST"
        )
        with urllib.request.urlopen(request, timeout=CALL_S):
            pass


def total(samples: Samples, name: str, **labels: str) -> float:
    """The sum of a metric's samples that have these labels."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(
        value
        for (metric, text), value in samples.items()
        if metric == name and all(label in text for label in wanted)
    )


def samples_of(text: bytes) -> Samples:
    """Samples by name and labels."""
    return {
        (
            sample.name,
            ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items())),
        ): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


@contextmanager
def running(folder: Path, speed: float, ttl_s: float) -> Iterator[Stack]:
    """All of it, as long as the block lasts. `ttl_s`: wall seconds of a lease's and a conversation's life.

    UserError where something does not come up.
    """
    secret = folder / "secret"
    secret.write_bytes(secrets.token_bytes(32))
    ports = iter(free_ports(2 + 3 * (PREFILL + DECODE), HOST))
    stack = Stack(next(ports), f"http://{HOST}:{next(ports)}", [], speed)
    terms = {"--lease-term-s": f"{ttl_s * TERM_S / TTL_S:.3f}", "--secret-file": str(secret)}
    for role, count in (("prefill", PREFILL), ("decode", DECODE)):
        for number in range(count):
            stack.engines.append(_engine(folder, f"{role}-{number}", role, ports, speed, ttl_s, terms))
    with ExitStack() as ending:
        ending.callback(lambda: stop_all([one.process for one in stack.engines if one.process is not None]))
        for engine in stack.engines:
            engine.start()
        words = [sys.executable, "-m", "kvloop.cli", "route", "--host", HOST, "--port", str(stack.port)]
        words += ["--admin-host", HOST, "--admin-port", stack.admin.rpartition(":")[2]]
        words += [word for one in stack.engines for word in (f"--{one.role}", one.url)]
        scaled = {"--renew-interval-s": f"{ttl_s * TERM_S / TTL_S / 3:.3f}", "--retention-s": f"{ttl_s:.3f}"}
        scaled |= {"--response-age-s": f"{ttl_s:.3f}"}
        words += [word for pair in (terms | scaled).items() for word in pair]
        wait_for(lambda: all(engine.answers() for engine in stack.engines), "the engines do not come up")
        stack.router = Process("router", words, os.environ, folder / "router.log")
        ending.callback(lambda: stop_all([stack.router]))
        count = len(stack.engines)
        wait_for(lambda: _status(f"{stack.admin}/health") == 200, "the router does not come up")
        wait_for(lambda: len(stack.in_service()) == count, "the router does not use all engines")
        yield stack


def _engine(
    folder: Path,
    name: str,
    role: str,
    ports: Iterator[int],
    speed: float,
    ttl_s: float,
    terms: dict[str, str],
) -> EngineProcess:
    port = next(ports)
    flags = {"--role": role, "--profile": PROFILE, "--speed": f"{speed:g}", "--model": MODEL}
    flags |= {"--port": str(port), "--control-port": str(next(ports))}
    flags |= {"--side-channel-port": str(next(ports)), "--engine-id": name}
    flags |= {"--lease-ttl-s": f"{ttl_s:.3f}", "--handover-s": f"{ttl_s:.3f}"}
    flags |= {"--prefix-cache": "off" if name in FORGETFUL else "on"}
    words = [sys.executable, "-m", "kvloop.cli", "sim", "engine"]
    words += [word for pair in (flags | terms).items() for word in pair]
    return EngineProcess(name, role, f"http://{HOST}:{port}", words, folder / f"{name}.log")


def wait_for(condition: Callable[[], bool], what: str, seconds: float = READY_S) -> None:
    """Until it holds. UserError where it does not in time."""
    deadline_s = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline_s:
            raise UserError(what)
        time.sleep(POLL_S)


def _ends(pid: int) -> Iterator[tuple[int, int]]:
    """Local and remote port of each TCP socket that a process has open (proc(5), net/tcp)."""
    sockets = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed a moment ago
            sockets.add(str(file.readlink()))
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if f"socket:[{fields[9]}]" in sockets:
                yield int(fields[1].rpartition(":")[2], 16), int(fields[2].rpartition(":")[2], 16)


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=CALL_S) as answer:
        return bytes(answer.read())


def _status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=CALL_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0
