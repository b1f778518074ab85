"""A network of its own, with a cable that loses packets: one network namespace, and two TUN devices whose
packets this process carries over, or does not.

What the namespace's side listens on is the engine's control port, passed on by this process, so that only
what goes over the cable suffers. TCP hides what it can: a packet lost is a frame that is late, and a cable
that is cut is a connection that is silent for as long as TCP backs off.
"""

import ctypes
import fcntl
import heapq
import itertools
import os
import select
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any, Self, TypeVar

NEAR, FAR = "198.18.77.1", "198.18.77.2"  # from the range set aside for tests of networks (RFC 2544)
TUN = Path("/dev/net/tun")
_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_PI = 0x1001
_CLONE_NEWNET = 0x40000000
_MTU_BYTES = 1500
_STEP_S = 0.02

Made = TypeVar("Made")


def _run(*words: str) -> None:
    subprocess.run(("ip", *words), check=True, capture_output=True)


def _tun(name: str) -> int:
    device = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN_NO_PI))
    return device


def _made_in(namespace: str, make: Callable[[], Made]) -> Made:
    """What `make` makes in the namespace, on a thread that has gone there."""
    made: list[Made | OSError] = []

    def go() -> None:
        try:
            with Path("/run/netns", namespace).open() as there:
                if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            made.append(make())
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=go)
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise made[0]
    return made[0]


class Cable:
    """Carries packets between two devices; a share is lost, and the rest takes up to `jitter_s`, so that some
    overtake others. `cut` loses all. A context manager."""

    def __init__(self, devices: tuple[int, int], random: Random, lost_share: float, jitter_s: float) -> None:
        self.cut = False
        self.lost = self.carried = 0
        self._devices = devices
        self._random = random
        self._lost_share = lost_share
        self._jitter_s = jitter_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        """Carry."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        order = itertools.count()
        under_way: list[tuple[float, int, int, bytes]] = []
        while not self._stop.is_set():
            wait_s = under_way[0][0] - time.monotonic() if under_way else _STEP_S
            ready, _, _ = select.select(self._devices, (), (), min(_STEP_S, max(0.0, wait_s)))
            for device in ready:
                packet = os.read(device, _MTU_BYTES)
                if self.cut or self._random.random() < self._lost_share:
                    self.lost += 1
                    continue
                arrives = time.monotonic() + self._random.uniform(0, self._jitter_s)
                (other,) = {*self._devices} - {device}
                heapq.heappush(under_way, (arrives, next(order), other, packet))
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, device, packet = heapq.heappop(under_way)
                self.carried += 1
                os.write(device, packet)


def _pass_on(listening: socket.socket, port: int) -> None:
    """Each connection to `listening` goes on to a port of this machine, until `listening` is closed."""
    while True:
        try:
            here, _ = listening.accept()
        except OSError:
            return
        there = socket.create_connection(("127.0.0.1", port))
        for one, other in ((here, there), (there, here)):
            threading.Thread(target=_copy, args=(one, other), daemon=True).start()


def _copy(one: socket.socket, other: socket.socket) -> None:
    with suppress(OSError):
        while data := one.recv(65536):
            other.sendall(data)
    for end in (one, other):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()


@contextmanager
def far_away(port: int, **cable: Any) -> Iterator[tuple[tuple[str, int], Cable]]:
    """A port of this machine as seen over a bad cable: its address there, and the cable. OSError or
    CalledProcessError where this machine does not allow it."""
    namespace = f"kvloop-{os.getpid()}"
    with ExitStack() as cleanup:
        _run("netns", "add", namespace)
        cleanup.callback(_run, "netns", "del", namespace)
        near = _tun("kvloop-near")
        cleanup.callback(os.close, near)
        far = _made_in(namespace, lambda: _tun("kvloop-far"))
        cleanup.callback(os.close, far)
        _run("addr", "add", f"{NEAR}/30", "dev", "kvloop-near")
        _run("link", "set", "kvloop-near", "up")
        _run("-n", namespace, "addr", "add", f"{FAR}/30", "dev", "kvloop-far")
        _run("-n", namespace, "link", "set", "kvloop-far", "up")
        listening = _made_in(namespace, lambda: socket.create_server((FAR, 0)))
        cleanup.callback(listening.close)
        cleanup.callback(listening.shutdown, socket.SHUT_RDWR)
        threading.Thread(target=_pass_on, args=(listening, port), daemon=True).start()
        carrying = cleanup.enter_context(Cable((near, far), **cable))
        yield (FAR, listening.getsockname()[1]), carrying
