"""Those who reach a control port without the deployment's secret, byte by byte as ZMTP 3.1 has it."""

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from kvloop.control.address import Address

MIB = 1 << 20


def greeting(mechanism: bytes) -> bytes:
    """The 64 bytes with which a ZMTP 3.1 connection begins."""
    return b"\xff" + bytes(7) + b"\x01\x7f" + b"\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)


def ready() -> bytes:
    """A DEALER's READY command, with which a connection without security is open."""
    body = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    return b"\x04" + bytes((len(body),)) + body


def frame(size: int, *, more: bool = False, command: bool = False) -> bytes:
    """What comes before so many bytes of a long frame."""
    return bytes((2 | more | command << 2,)) + struct.pack(">Q", size)


def hello() -> bytes:
    """A HELLO of CURVE that opens under no key: 200 bytes."""
    body = b"\x05HELLO" + b"\x01\x00" + bytes(72) + bytes(range(32)) + bytes(8) + bytes(80)
    return b"\x04" + bytes((len(body),)) + body


PARTS = (frame(1 << 14, more=True) + bytes(1 << 14)) * 64
OLD_PARTS = (b"\xff" + struct.pack(">Q", 1 << 14) + b"\x01" + bytes((1 << 14) - 1)) * 64
ATTACKS = {
    "parts without end": (greeting(b"NULL") + ready(), PARTS),
    "parts behind curve's greeting": (greeting(b"CURVE"), PARTS),
    "a huge frame": (greeting(b"CURVE") + frame(1 << 40), bytes(MIB)),
    "a frame of the old bound": (greeting(b"CURVE") + frame(4 * MIB, command=True), bytes(MIB)),
    "a hello of nobody": (greeting(b"CURVE") + hello(), PARTS),
    "an unfinished command": (greeting(b"CURVE") + frame(1 << 15, command=True) + bytes((1 << 15) - 1), b""),
    "half a greeting": (greeting(b"CURVE")[:20], b""),
    "zmtp 1.0": (b"\x01\x00", OLD_PARTS),
    "zmtp 2.0": (b"\xff" + bytes(7) + b"\x01\x7f\x01\x05\x00\x00", PARTS),
    "no zmtp": (b"GET / HTTP/1.1\r\n", bytes(MIB)),
}
"""What begins a connection, and what is sent over and over behind it."""


def push(address: Address, first: bytes, then: bytes, until_s: float) -> int:
    """Connect, send `first`, and `then` over and over, until hung up on; how many bytes went out. Where
    `then` is nothing, the connection is left open until `until_s`."""
    sent = 0
    with suppress(OSError), socket.create_connection(address, 1.0) as one:
        one.settimeout(0.2)
        left = memoryview(first)
        while left and time.monotonic() < until_s:
            now = one.send(left)
            sent += now
            left = left[now:] or memoryview(then)
        one.settimeout(max(0.001, until_s - time.monotonic()))
        while one.recv(1000):
            pass
    return sent


@contextmanager
def attacked(address: Address, kind: str, *, connections: int, for_s: float) -> Iterator[list[int]]:
    """Under attack from so many connections at a time, each again when it has ended. What was sent is
    complete when the block has ended."""
    until_s = time.monotonic() + for_s
    sent: list[int] = []

    def again() -> None:
        while time.monotonic() < until_s:
            sent.append(push(address, *ATTACKS[kind], until_s))

    threads = [threading.Thread(target=again) for _ in range(connections)]
    for thread in threads:
        thread.start()
    try:
        yield sent
    finally:
        for thread in threads:
            thread.join()
