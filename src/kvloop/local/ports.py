"""TCP ports: free ones from the system, and which of the wanted ones are taken.

A port that was free a moment ago can be taken by the time a server binds it, and an engine binds some of its
ports half a minute after it was started. So free ports are drawn from below the range out of which the system
hands ports to connections and to whoever binds port 0; and a wanted port that is taken is found before
minutes are spent on loading a model.
"""

import errno
import random
import socket
from collections.abc import Iterable
from pathlib import Path

from kvloop.errors import UserError

MAX_PORT = 65535
MIN_PORT = 10_000
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
DEFAULT_EPHEMERAL_FROM = 32_768
# Of some 20,000 ports a machine uses a few; a handful of tries is plenty.
MAX_TRIES = 200


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


def _first_ephemeral_port() -> int:
    try:
        first = int(EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return DEFAULT_EPHEMERAL_FROM
    return first if first > MIN_PORT + MAX_TRIES else MAX_PORT


def free_port_run(length: int, host: str = "127.0.0.1") -> int:
    """The first of `length` consecutive free ports (one per data-parallel rank). Raises `UserError` if none
    is found."""
    chance = random.SystemRandom()
    for _ in range(MAX_TRIES):
        first = chance.randrange(MIN_PORT, _first_ephemeral_port() - length)
        if all(_can_bind(host, port) for port in range(first, first + length)):
            return first
    raise UserError(f"no {length} consecutive free ports on {host}")


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """`count` different ports that nothing listens on."""
    found: set[int] = set()
    while len(found) < count:
        found.add(free_port_run(1, host))
    return sorted(found)
