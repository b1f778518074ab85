"""What every TCP connection of the router is set to, client's or engine's.

Without TCP_NODELAY the second small write waits for the peer's delayed acknowledgement, some 40 ms on each
streamed answer.
"""

import asyncio
import socket
from typing import cast


def without_delay(transport: asyncio.BaseTransport) -> asyncio.Transport:
    """The transport, its socket sending each write at once where it is a TCP socket."""
    raw = transport.get_extra_info("socket")
    if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return cast("asyncio.Transport", transport)  # uvloop's own class does not derive from it
