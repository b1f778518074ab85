"""Looking at processes from outside, by id."""

import time
from collections.abc import Callable
from pathlib import Path

FAKE_SERVER = Path(__file__).with_name("fake_server.py")
FAKE_UP = Path(__file__).with_name("fake_up.py")


def alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def carrying(mark: str) -> list[int]:
    """Every process whose environment has `KVLOOP_TEST_MARK=mark`: all that one command started, however
    deep."""
    wanted = f"KVLOOP_TEST_MARK={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0") and alive(int(folder.name)):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    """Whether the condition comes true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
