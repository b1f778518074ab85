"""Both sides' secrets, out of their files: the keys that clients need, and the one that engines ask for."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from kvloop.errors import UserError
from kvloop.router.config import RouterConfig
from kvloop.router.keys import ENV_NAME, MAX_KEY_BYTES, KeyRing, KeySpec, read_keys, spec_of
from kvloop.router.membership import Membership
from kvloop.router.watch import Reloads, WatchedFile, running


@contextlib.asynccontextmanager
async def key_ring(config: RouterConfig, reloads: Reloads) -> AsyncIterator[KeyRing | None]:
    """The keys that clients need, as the file has them as long as the block lasts; None if they need none.

    UserError for a file that cannot be used.
    """
    access = config.access
    if access.api_keys_file is None and access.api_key is None:
        yield None
        return
    ring = KeyRing()
    fixed = [] if access.api_key is None else [spec_of(access.api_key, ENV_NAME, None)]
    ring.set(fixed)
    task = None
    if access.api_keys_file is not None:

        def take(specs: list[KeySpec]) -> None:
            ring.set([*fixed, *specs])

        file = WatchedFile("--api-keys-file", access.api_keys_file, read_keys, take, reloads)
        task = asyncio.get_running_loop().create_task(file.follow(config.timeouts.reload_interval_s))
    async with running(task):
        yield ring


@contextlib.asynccontextmanager
async def engine_key(config: RouterConfig, reloads: Reloads, membership: Membership) -> AsyncIterator[bool]:
    """What engines get as `Authorization`, as the file has it as long as the block lasts.

    False for what the client sent. UserError if the file holds no key.
    """
    path = config.access.engine_api_key_file
    if path is None:
        yield False
        return
    file = WatchedFile("--engine-api-key-file", path, _authorization, membership.authorize, reloads)
    task = asyncio.get_running_loop().create_task(file.follow(config.timeouts.reload_interval_s))
    async with running(task):
        yield True


def _authorization(path: str, data: bytes) -> bytes:
    key = data.strip()
    if not 0 < len(key) <= MAX_KEY_BYTES or not all(33 <= byte <= 126 for byte in key):
        raise UserError(
            f"--engine-api-key-file {path!r} must hold one key of printable characters, and nothing else"
        )
    return b"Bearer " + key


class KeyState(Collector):
    """What a scrape sees of the keys: names, which are bounded as the file is, and never a key."""

    def __init__(self, ring: KeyRing) -> None:
        self._ring = ring

    def collect(self) -> Iterator[Metric]:
        """All families, as they are now."""
        requests = CounterMetricFamily(
            "kvloop_router_key_requests",
            "Requests of a key, let in or over a limit",
            labels=("key", "outcome"),
        )
        for key in self._ring.listed():
            for outcome in ("admitted", "over_rate", "over_concurrency"):
                requests.add_metric((key.spec.name, outcome), getattr(key, outcome))
        yield requests
        yield CounterMetricFamily(
            "kvloop_router_strangers", "Requests without a key that is known", value=self._ring.strangers
        )
