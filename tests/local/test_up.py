"""`kvloop up` from outside: what it prints, how it ends, and that nothing it started outlives it.

The engines are fakes (`fake_up`), everything else is real, the router and the processes included.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvloop.local.ports import free_ports
from tests.local.processes import FAKE_UP, carrying, eventually

ROOT = Path(__file__).parent.parent.parent
END_TIMEOUT_S = 40.0


class Up:
    """One running `kvloop up`. `mark` is in the environment of all that it started."""

    def __init__(self, process: "subprocess.Popen[str]", mark: str, port: int) -> None:
        self.process = process
        self.mark = mark
        self.port = port
        self.lines: list[str] = []

    def read_until(self, start: str) -> None:
        """Read its output up to a line that starts so."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if line.startswith(start):
                return
        raise AssertionError(f"no line {start!r} in {self.lines} {self.process.communicate()[1]}")

    def end(self) -> tuple[int, str]:
        """Exit status and stderr; asserts that nothing is left."""
        out, err = self.process.communicate(timeout=END_TIMEOUT_S)
        self.lines += out.splitlines()
        assert carrying(self.mark) == []
        return self.process.returncode, err


Start = Callable[..., Up]


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Start]:
    """Starts `kvloop up` with a model folder, a free port and these flags."""
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json"):
        model.joinpath(name).write_text("{}")
    running: list[Up] = []

    def start(
        *flags: str,
        port: int | None = None,
        before: Callable[[], None] = lambda: None,
        path: str = str(model),
    ) -> Up:
        mark = f"{tmp_path.name}-{len(running)}"
        chosen = port or free_ports(1)[0]
        env = dict(os.environ) | {
            "KVLOOP_TEST_MARK": mark,
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "TMPDIR": str(tmp_path),
            "PYTHONPATH": str(ROOT),
        }
        argv = [sys.executable, str(FAKE_UP), "--model", path, "--port", str(chosen), *flags]
        process = subprocess.Popen(
            argv,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=before,
        )
        running.append(Up(process, mark, chosen))
        return running[-1]

    yield start
    for one in running:
        with contextlib.suppress(ProcessLookupError):
            one.process.kill()
        one.process.communicate()


def test_it_says_where_it_is_and_how_to_try_it(up: Start) -> None:
    """A ready line with the URL, a `curl` with a model that is served; Ctrl-C ends it with status 0, saying
    what it stops."""
    it = up("--no-demo", "--decode", "2")
    it.read_until("serving until Ctrl-C")
    ready = next(line for line in it.lines if line.startswith("ready: "))
    assert ready.startswith(f"ready: http://127.0.0.1:{it.port} ")
    curl = next(line for line in it.lines if line.startswith("try: curl "))
    assert f"http://127.0.0.1:{it.port}/v1/chat/completions" in curl
    assert json.loads(curl[curl.index("{") : -1])["model"] == "fake"
    assert len(carrying(it.mark)) >= 5
    it.process.send_signal(signal.SIGINT)
    assert it.end() == (0, "")
    assert it.lines[-2:] == ["stopping prefill-0, decode-0, decode-1, router", "stopped"]


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 0)]
)
def test_a_signal_ends_everything(up: Start, number: signal.Signals, status: int) -> None:
    """Whichever way it is told to end, its exit status says so and nothing is left when it has ended.

    The tests themselves may run under `nohup`, whose children ignore SIGHUP.
    """
    it = up("--no-demo", before=lambda: signal.signal(number, signal.SIG_DFL) and None)
    it.read_until("serving until Ctrl-C")
    it.process.send_signal(number)
    assert it.end() == (status, "")


def test_a_second_signal_does_not_cut_the_end_short(up: Start) -> None:
    """An impatient Ctrl-C changes nothing: engines that ignore signals are still gone before it returns."""
    it = up("--no-demo", "--", "--stubborn")
    it.read_until("serving until Ctrl-C")
    it.process.send_signal(signal.SIGINT)
    it.read_until("stopping ")
    it.process.send_signal(signal.SIGINT)
    it.process.send_signal(signal.SIGTERM)
    assert it.end() == (0, "")


def test_a_kill_leaves_nothing(up: Start) -> None:
    """SIGKILL gives it no chance to clean up, and yet all that it started ends."""
    it = up("--no-demo")
    it.read_until("serving until Ctrl-C")
    it.process.kill()
    it.process.wait()
    assert eventually(lambda: carrying(it.mark) == [], END_TIMEOUT_S)


def test_a_signal_while_starting_ends_everything(up: Start, tmp_path: Path) -> None:
    """Ctrl-C before it is ready is not a success, nor a failure that somebody would look for in logs."""
    it = up("--no-demo", "--", "--delay", "60")
    it.read_until("starting ")
    assert eventually(lambda: len(carrying(it.mark)) >= 5)
    it.process.send_signal(signal.SIGINT)
    assert it.end() == (130, "")
    assert not list(tmp_path.glob("kvloop-*"))


def test_ctrl_c_works_where_a_shell_had_it_ignored(up: Start) -> None:
    """Shells start background commands with SIGINT ignored; `kill -INT` ends it all the same."""
    it = up("--no-demo", before=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN) and None)
    it.read_until("serving until Ctrl-C")
    it.process.send_signal(signal.SIGINT)
    assert it.end() == (0, "")


def test_it_stays_where_nohup_wants_it_to(up: Start) -> None:
    """A hangup that was ignored from outside stays ignored."""
    it = up("--no-demo", before=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN) and None)
    it.read_until("serving until Ctrl-C")
    it.process.send_signal(signal.SIGHUP)
    assert not eventually(lambda: it.process.poll() is not None, 1.0), it.end()
    it.process.terminate()
    assert it.end() == (143, "")


def test_a_busy_port_is_one_line(up: Start, tmp_path: Path) -> None:
    """Found before anything is started; no log, no folder, and what listens there is left alone."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        it = up("--no-demo", port=port)
        status, err = it.end()
        socket.create_connection(("127.0.0.1", port)).close()
    assert status == 2
    assert err.startswith(f"kvloop up: port {port} (the router's --port) is in use on 127.0.0.1: stop what")
    assert err.count("\n") == 1
    assert it.lines == []
    assert not any(tmp_path.glob("kvloop-*"))


def test_a_missing_model_is_one_line(up: Start, tmp_path: Path) -> None:
    """With what --model takes."""
    it = up("--no-demo", path="/no/such/model")
    status, err = it.end()
    assert status == 2
    assert err.startswith("kvloop up: model folder /no/such/model does not exist")
    assert err.count("\n") == 1
    assert not any(tmp_path.glob("kvloop-*"))


def test_an_engine_that_dies_while_starting_is_named(up: Start) -> None:
    """One line, then the log's tail; the log itself is kept where the line says."""
    it = up("--no-demo", "--", "--fail", "9")
    status, err = it.end()
    assert status == 2
    first, *rest = err.splitlines()
    assert first.startswith("kvloop up: prefill-0 ended with status 9 while starting; the end of ")
    assert rest == ["fake server: loading", "fake server: cannot allocate memory"]
    assert Path(first.split("the end of ")[1].rstrip(":")).is_file()


def test_an_engine_that_ends_later_is_reported_and_the_rest_goes_on(up: Start) -> None:
    """The router falls back without it; without the router there is nothing left to serve."""
    it = up("--no-demo")
    it.read_until("serving until Ctrl-C")
    family = {
        Path(f"/proc/{pid}/cmdline").read_bytes().decode(): pid
        for pid in carrying(it.mark)
        if b"warden" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    }
    engine = next(pid for words, pid in family.items() if "fake_server" in words)
    router = next(pid for words, pid in family.items() if "route" in words)
    os.kill(engine, signal.SIGKILL)
    it.read_until("")
    assert "ended with SIGKILL; its log: " in it.lines[-1]
    os.kill(router, signal.SIGKILL)
    status, err = it.end()
    assert status == 2
    assert err.startswith("kvloop up: the router ended with SIGKILL; the end of its log:")


def test_a_demo_that_fails_ends_everything(up: Start) -> None:
    """An engine that cannot chat: one line, status 2, nothing left."""
    it = up("--demo-only")
    status, err = it.end()
    assert status == 2
    assert err.startswith("kvloop up: the turn was answered with HTTP ")


def test_a_reader_that_leaves_ends_it_in_silence(up: Start) -> None:
    """As `kvloop up | head -1` should."""
    it = up("--no-demo", "--", "--delay", "1")
    it.read_until("starting ")
    assert it.process.stdout is not None
    it.process.stdout.close()
    it.process.wait(END_TIMEOUT_S)
    assert it.process.stderr is not None
    assert it.process.stderr.read() == ""
    assert it.process.returncode == 141
    assert carrying(it.mark) == []
