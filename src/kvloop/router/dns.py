"""Engines behind a DNS name: each of its addresses is one.

The name is asked again at an interval that wanders a little. An answer is taken whole; a failure says nothing
about engines, so that the last answer stands for as long as it lasts. Of a resolver that hangs only one
question is left open.
"""

import asyncio
import contextlib
import logging
import random
import socket
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from kvloop.router.membership import Membership
from kvloop.router.target import Role, Target

RESOLVE_TIMEOUT_S = 5.0
JITTER = 0.2
LOG_EVERY_S = 60.0

logger = logging.getLogger("kvloop.router")

Resolve = Callable[[str, int], Awaitable[list[str]]]


async def resolve(host: str, port: int) -> list[str]:
    """A name's addresses, v4 and v6. OSError if there are none."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({str(address[0]) for *_, address in found})


class DnsSource:
    """What a name means for the fleet. `failures` counts questions without an answer."""

    def __init__(self, url: str, role: Role, membership: Membership, resolver: Resolve | None = None) -> None:
        parts = urlsplit(url)
        self.failures = 0
        self.name = f"dns {role.value} {url}"
        self._scheme = parts.scheme
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._role = role
        self._membership = membership
        self._resolver = resolver or resolve
        self._open: asyncio.Future[list[str]] | None = None
        self._silent_until_s = 0.0

    async def ask(self) -> None:
        """Ask once, and take the answer if there is one in time."""
        try:
            addresses = await self._answer()
        except (OSError, TimeoutError, UnicodeError) as error:
            self.failures += 1
            self._membership.failures[self.name] += 1
            now_s = asyncio.get_running_loop().time()
            if now_s >= self._silent_until_s:
                self._silent_until_s = now_s + LOG_EVERY_S
                why = str(error) or "no answer in time"
                logger.warning(
                    "%s cannot be resolved (%s); its engines are kept as they are", self._host, why
                )
            return
        self._membership.set(self.name, [self._target(address) for address in addresses])

    async def follow(self, interval_s: float) -> None:
        """Ask for ever."""
        while True:
            await asyncio.sleep(interval_s * random.uniform(1 - JITTER, 1 + JITTER))
            await self.ask()

    async def _answer(self) -> list[str]:
        if self._open is None:
            self._open = asyncio.ensure_future(self._resolver(self._host, self._port))
        async with asyncio.timeout(RESOLVE_TIMEOUT_S):
            try:
                addresses = await asyncio.shield(self._open)
            finally:
                if self._open.done():
                    self._open = None
        if not addresses:
            raise OSError("no address")
        return addresses

    def _target(self, address: str) -> Target:
        host = f"[{address}]" if ":" in address else address
        return Target(f"{self._scheme}://{host}:{self._port}", self._role, server_name=self._host)

    async def aclose(self) -> None:
        """Wait for no answer any more."""
        if self._open is not None:
            self._open.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await self._open
