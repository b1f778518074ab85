"""One measurement of one router: clients in C, engines in C, and a core for nothing but the router.

The engines and the clients share the other core (a machine with one core has them all on it, and the run says
so). What a router used is read from /proc at the window's ends, for all its processes and threads: CPU time
in the kernel's ticks of 10 ms, resident memory as it is at the end.
"""

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

SOURCES = Path(__file__).parent / "router_load"
STAMP = "@" * 12  # replaced with a request's number
READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
LOAD_EXTRA_S = 150.0  # on top of its window, until every client has had a first byte
PROBE_PAUSE_S = 0.2
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024
_PLAIN_TOKENS = 32
LEAST_HOPS_SHARE = 0.95  # the clients that leave at a window's end leave some turns in the middle
WORDS = "latency tensor router prefill decode cache block the of and a to throughput kernel token stream "


class LoadError(Exception):
    """A measurement that did not come about."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What all measurements share. `folder` holds the compiled programs; `core` is not the router's."""

    folder: Path
    prefill_port: int
    decode_port: int
    core: int
    key: str

    def hops(self) -> tuple[int, int]:
        """How many requests each engine has served, prefill first."""
        return served(self.prefill_port), served(self.decode_port)


@dataclass(frozen=True, slots=True)
class Load:
    """What the clients do. `tokens` at most each; of a stream an event each, `interval_us` apart, 0 for none.

    `whole`: answers end within the window, and have to have all their events.
    """

    clients: int
    body_bytes: int
    stream: bool = False
    tokens: int = _PLAIN_TOKENS
    interval_us: int = 0
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Sample:
    """What came of it in the window. `hops`: of each engine, over the whole measurement, prefill first."""

    seconds: float
    requests: int
    events: int
    late: int
    behind_ms: float
    p50_ms: float
    p99_ms: float
    clients: int
    cpu_s: float
    rss_kib: int
    hops: tuple[int, int] = (0, 0)

    def beyond(self, empty_kib: int) -> "Sample":
        """The same with only the memory beyond what the router took before."""
        return replace(self, rss_kib=max(0, self.rss_kib - empty_kib))


def compiler() -> str | None:
    """The C compiler, if there is one."""
    return shutil.which("cc") or shutil.which("gcc")


def compiled(folder: Path) -> None:
    """Put the programs `engine` and `load` into `folder`. LoadError without a compiler."""
    cc = compiler()
    if cc is None:
        raise LoadError("there is no C compiler")
    for name in ("engine", "load"):
        built = subprocess.run(
            [cc, "-O2", "-o", folder / name, SOURCES / f"{name}.c"], capture_output=True, text=True
        )
        if built.returncode:
            raise LoadError(f"{name}.c does not compile: {built.stderr[:500]}")


def cores() -> tuple[int, int]:
    """The core for the router, and the one for everything else: the last two that there are, or twice one."""
    usable = sorted(os.sched_getaffinity(0))
    return usable[-1], usable[-2] if len(usable) > 1 else usable[-1]


def chat_body(load: Load) -> bytes:
    """The request's body, of about the load's size."""
    text = (WORDS * (load.body_bytes // len(WORDS) + 1))[: load.body_bytes]
    messages = [
        {"role": "system", "content": f"{STAMP} You are helpful."},
        {"role": "user", "content": text},
    ]
    body: dict[str, object] = {"model": "m", "messages": messages, "temperature": 0}
    body["max_tokens"] = load.tokens
    if load.stream:
        body["stream"] = True
    if load.interval_us:
        body["seed"] = load.interval_us
    return json.dumps(body).encode()


class Program:
    """A process on a core of its own group. Ends with the block."""

    def __init__(self, words: list[str], core: int, log: Path, *, speaks: bool = True) -> None:
        """`speaks`: its output is read here; else it goes into `log`, as its errors do."""
        mine = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {core})
        try:
            with log.open("ab") as said:
                output = subprocess.PIPE if speaks else said
                self.process = subprocess.Popen(
                    words, stdout=output, stderr=said, start_new_session=True, text=True
                )
        finally:
            os.sched_setaffinity(0, mine)

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_TIMEOUT_S)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def line(self) -> str:
        """The next line that it prints; nothing once it has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def used(self) -> tuple[float, int]:
        """CPU seconds and resident KiB of all its processes so far."""
        stats = [text for path in Path("/proc").glob("[0-9]*/stat") if (text := _read(path))]
        return used_of(stats, self.process.pid)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it has just ended
        return ""


def used_of(stats: list[str], group: int) -> tuple[float, int]:
    """CPU seconds and resident KiB of a process group, of lines as in /proc/PID/stat (proc(5))."""
    ticks = pages = 0
    for line in stats:
        fields = line[line.rindex(")") + 2 :].split()  # a program's name may have spaces; fields from 3 on
        if int(fields[2]) == group:
            ticks += int(fields[11]) + int(fields[12])
            pages += int(fields[21])
    return ticks / TICKS_PER_S, pages * PAGE_KIB


@contextlib.contextmanager
def engine(folder: Path, role: str, core: int) -> Iterator[int]:
    """A fake engine, as long as the block lasts; its port."""
    with Program([str(folder / "engine"), "-r", role], core, folder / "engine.log") as program:
        word, _, port = program.line().partition(" ")
        if word != "port":
            raise LoadError("a fake engine does not start")
        yield int(port)


def free_port() -> int:
    """A port that nobody has a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def served(port: int) -> int:
    """How many hops a fake engine has served."""
    return int(json.loads(_call(port, "GET", "/served", b""))["served"])


def wait_ready(router: Program, port: int, key: str) -> None:
    """Until the router answers a request. LoadError if it ends, or does not in time."""
    body, said = chat_body(Load(1, 100)), ""
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if router.process.poll() is not None:
            raise LoadError(f"it ended with status {router.process.returncode}")
        try:
            _call(port, "POST", "/v1/chat/completions", body, key)
            return
        except (OSError, http.client.HTTPException, LoadError) as error:
            said = str(error)
        time.sleep(PROBE_PAUSE_S)
    raise LoadError(f"it does not answer: {said}")


def _call(port: int, method: str, path: str, body: bytes, key: str = "") -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        connection.request(method, path, body or None, headers)
        answer = connection.getresponse()
        data = answer.read()
        if answer.status != 200:
            raise LoadError(f"status {answer.status}: {data[:200].decode(errors='replace')}")
        return data
    finally:
        connection.close()


def measure(bench: Bench, router: Program, port: int, load: Load, seconds: float, warm_s: float) -> Sample:
    """Put the load on a router. LoadError if it does not answer every client."""
    body, log = bench.folder / "body.json", bench.folder / "load.log"
    body.write_bytes(chat_body(load))
    log.unlink(missing_ok=True)
    words = [str(bench.folder / "load"), "-p", str(port), "-b", str(body), "-c", str(load.clients)]
    words += ["-k", bench.key, "-d", f"{seconds}", "-w", f"{warm_s}"]
    if load.stream and load.whole:
        words += ["-e", str(load.tokens + 1)]
    if not load.whole:
        words += ["-i", str(load.interval_us)]
    had = bench.hops()
    with Program(words, bench.core, log) as clients:
        if clients.line() != "begin":
            raise LoadError(f"the clients did not get through: {_end_of(log)}")
        before_s, _ = router.used()
        report = clients.line()
        after_s, rss_kib = router.used()
        if not report:
            raise LoadError(f"the clients gave up: {_end_of(log)}")
        clients.process.wait(LOAD_EXTRA_S)
    has = bench.hops()
    return sample_of(report, after_s - before_s, rss_kib, (has[0] - had[0], has[1] - had[1]))


def sample_of(report: str, cpu_s: float, rss_kib: int, hops: tuple[int, int]) -> Sample:
    """A sample of what the clients printed. LoadError if it does not count: answers that were not whole, or a
    router that did not go through both engines."""
    told = json.loads(report)
    if told["errors"]:
        raise LoadError(f"{told['errors']} answers were not whole")
    if min(hops) < LEAST_HOPS_SHARE * max(hops):
        raise LoadError(f"prefill was asked {hops[0]:,} times, decode {hops[1]:,} times")
    names = ("seconds", "requests", "events", "late", "behind_ms", "p50_ms", "p99_ms", "clients")
    return Sample(**{name: told[name] for name in names}, cpu_s=cpu_s, rss_kib=rss_kib, hops=hops)


def _end_of(log: Path) -> str:
    return log.read_text()[-300:].strip()
