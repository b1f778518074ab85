"""A process that keeps another one, and everything that one starts, from outliving whoever wanted it.

Run as `python -I -S warden.py LOG_FILE COMMAND...` with two pipes: stdin is the lifeline, whose end (closed
on purpose, or by the kernel when the parent is killed) means stop; stdout carries `started PID` and `ended
STATUS`. The command runs in a session of its own, so a terminal's Ctrl-C reaches only the parent. The warden
is a child subreaper: a grandchild whose parent died comes to it, not to init, and so nothing is left when it
says `ended`. vLLM needs this: its API server, killed, leaves its engine and worker processes running.

Standard library only, no import of the rest: it must start in milliseconds and work when nothing else does.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Seconds after the wish to stop, and what the command then gets. An orderly engine needs about a second; a
# second signal makes an HTTP server drop open connections; the last one goes to the whole process group.
STAGES = ((0.0, signal.SIGTERM), (3.0, signal.SIGINT), (6.0, signal.SIGKILL))
_SWEEP_INTERVAL_S = 0.02
_MAX_SWEEPS = 500


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # the parent is gone, which the lifeline says too
        os.write(1, (line + "\n").encode())


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _sweep() -> None:
    """Kill and reap until this process has no child left."""
    for _ in range(_MAX_SWEEPS):
        for child in _children(os.getpid()):
            _signal(child, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(_SWEEP_INTERVAL_S)


def _signal(pid: int, number: int, *, group: bool = False) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        (os.killpg if group else os.kill)(pid, number)


def _wait(child: "subprocess.Popen[bytes]", stop_asked: int) -> None:
    """Until the command has ended, by itself or by the stages that follow the end of the lifeline."""
    ended = os.pidfd_open(child.pid)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(0, select.POLLIN)
    poll.register(stop_asked, select.POLLIN)
    if any(fd == ended for fd, _ in poll.poll()):
        return
    poll.unregister(0)
    poll.unregister(stop_asked)
    asked_at = time.monotonic()
    for after_s, number in STAGES:
        left_ms = (asked_at + after_s - time.monotonic()) * 1000
        if poll.poll(max(0.0, left_ms)):
            return
        _signal(child.pid, number, group=number == signal.SIGKILL)
        _signal(child.pid, signal.SIGCONT, group=True)  # a stopped process acts on nothing but SIGKILL
    poll.poll()


def main(log_file: str, command: list[str]) -> int:
    """Run the command to its end; the warden's own exit status is always 0."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(write_end)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with Path(log_file).open("ab") as log:
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        except OSError as error:
            log.write(f"{command[0]}: {error.strerror}\n".encode())
            _say("ended 127")
            return 0
    _say(f"started {child.pid}")
    _wait(child, read_end)
    # Not reaped yet, so its id still names its group: whoever is left in it goes too.
    _signal(child.pid, signal.SIGKILL, group=True)
    status = child.wait()
    _sweep()
    _say(f"ended {status}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
