"""Nothing that was started outlives the wish for it, however the wish ends."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvloop.local.ports import free_ports
from kvloop.local.supervise import Process, stop_all
from tests.local.processes import FAKE_SERVER, alive, eventually

Start = Callable[..., Process]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts supervised fake servers; what a failed test left is stopped."""
    started: list[Process] = []

    def run(*flags: str) -> Process:
        argv = [sys.executable, str(FAKE_SERVER), str(free_ports(1)[0]), *flags]
        started.append(Process("fake", argv, dict(os.environ), tmp_path / "fake.log"))
        return started[-1]

    yield run
    stop_all(started)


def start_family(start: Start, folder: Path, *flags: str) -> tuple[Process, list[int]]:
    """A supervised fake server with a child and an orphaned grandchild, and the ids of all three."""
    family = folder / "family"
    process = start("--family", str(family), *flags)
    assert eventually(lambda: family.exists() and len(family.read_text().split()) == 2)
    return process, [process.pid, *map(int, family.read_text().split())]


def test_a_stopped_process_takes_its_whole_family_along(start: Start, tmp_path: Path) -> None:
    """After `stop`, the child and the orphan in another session are gone too."""
    process, pids = start_family(start, tmp_path)
    assert all(map(alive, pids))
    process.stop()
    assert not any(map(alive, pids))
    assert process.status == -signal.SIGTERM


def test_a_killed_process_takes_its_whole_family_along(start: Start, tmp_path: Path) -> None:
    """SIGKILL for the group also ends the orphan in another session, before `wait` returns."""
    process, pids = start_family(start, tmp_path)
    process.signal(signal.SIGKILL)
    assert process.wait(10.0) == -signal.SIGKILL
    assert not any(map(alive, pids))


def test_a_process_that_ends_by_itself_leaves_nothing(start: Start, tmp_path: Path) -> None:
    """An engine that dies while starting does not leave its workers behind, and its status is known."""
    process, pids = start_family(start, tmp_path, "--fail", "7")
    assert process.wait(10.0) == 7
    assert not any(map(alive, pids))
    assert "cannot allocate memory" in process.log_tail()


def test_a_process_that_ignores_signals_is_killed(start: Start, tmp_path: Path) -> None:
    """Terminate and interrupt are tried first, then the group is killed."""
    process, pids = start_family(start, tmp_path, "--stubborn")
    process.stop()
    assert process.status == -signal.SIGKILL
    assert not any(map(alive, pids))


def test_a_frozen_process_can_be_stopped(start: Start) -> None:
    """Stopping continues a process that was frozen by SIGSTOP, so that it can end in order."""
    process = start()
    process.signal(signal.SIGSTOP)
    assert process.running
    stop_all([process])
    assert process.status == -signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_family_does_not_outlive_its_supervisor(tmp_path: Path, number: signal.Signals) -> None:
    """When the process that supervises is ended by any signal, everything under it ends."""
    family = tmp_path / "family"
    script = (
        "import os, sys, time; from pathlib import Path; from kvloop.local.supervise import Process; "
        f"argv = [sys.executable, {str(FAKE_SERVER)!r}, '{free_ports(1)[0]}', '--family', {str(family)!r}]; "
        "p = Process('fake', argv, "
        f"dict(os.environ), Path({str(tmp_path / 'fake.log')!r})); "
        "print(p.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline())]
        assert eventually(lambda: family.exists() and len(family.read_text().split()) == 2)
        pids += map(int, family.read_text().split())
        assert all(map(alive, pids))
        parent.send_signal(number)
        parent.wait(10.0)
    finally:
        parent.kill()
        parent.communicate()
    assert eventually(lambda: not any(map(alive, pids)))


def test_a_command_that_does_not_exist_has_a_status_and_a_log(tmp_path: Path) -> None:
    """The shell's 127, and the reason in the log."""
    process = Process(
        "absent", [str(tmp_path / "no-such-command")], dict(os.environ), tmp_path / "absent.log"
    )
    assert process.wait(5.0) == 127
    assert "No such file" in process.log_tail()
    process.stop()
