"""TCP ports: free ones from the system, and which of the wanted ones are taken.

A port that was free a moment ago can be taken by the time a server binds it; nothing here can prevent that.
What it prevents is the common case, found before minutes are spent on loading a model.
"""

import contextlib
import errno
import socket
from collections.abc import Iterable, Iterator

from kvloop.errors import UserError

MAX_PORT = 65535
# Ports that the system hands out come from the ephemeral range and seldom collide; a handful of tries is
# plenty.
MAX_RUN_TRIES = 50


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _can_bind(host: str, port: int) -> bool:
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        # As servers do: a port in TIME_WAIT is free, one that somebody listens on is not.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise UserError(f"cannot listen on {host} port {port}: {error.strerror}") from error
        return True


def require_free(host: str, ports: Iterable[tuple[str, int]]) -> None:
    """Raise `UserError` for the first `(what it is for, port)` that something listens on already."""
    for purpose, port in ports:
        if not 0 < port <= MAX_PORT:
            raise UserError(f"{purpose}: {port} is not a port number")
        if not _can_bind(host, port):
            raise UserError(
                f"port {port} ({purpose}) is in use on {host}: stop what listens there or choose another"
            )


@contextlib.contextmanager
def _held(host: str, port: int) -> Iterator[int]:
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        probe.bind((host, port))
        yield probe.getsockname()[1]


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """`count` different ports that nothing listens on, held open together while they are chosen."""
    with contextlib.ExitStack() as stack:
        return [stack.enter_context(_held(host, 0)) for _ in range(count)]


def free_port_run(length: int, host: str = "127.0.0.1") -> int:
    """The first of `length` consecutive free ports (one per data-parallel rank). Raises `UserError` if none
    is found."""
    for _ in range(MAX_RUN_TRIES):
        [first] = free_ports(1, host)
        last = first + length - 1
        if last <= MAX_PORT and all(_can_bind(host, port) for port in range(first, last + 1)):
            return first
    raise UserError(f"no {length} consecutive free ports on {host}")
