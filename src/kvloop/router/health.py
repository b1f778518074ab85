"""Active probes: every engine's `/health`, again and again.

One task per server (its ranks share it), each with its own random phase and an interval that wanders by a
fifth, so that neither the engines of one router nor the routers of one engine are probed in step. A probe is
bounded in time and size, and only so many are under way at once. What a row of probes means is
`core.probing`'s; an engine that was down and is back is taken to be another process than it was.
"""

import asyncio
import logging
import random
from collections import defaultdict

from kvloop.core.probing import ProbeEvent
from kvloop.router.config import Health
from kvloop.router.engine import Engine
from kvloop.router.fleet import Fleet, FleetEvent
from kvloop.router.upstream import EngineFailureError

MAX_PROBES = 64  # under way at once
ANSWER_MAX_BYTES = 64 * 1024
JITTER = 0.2

logger = logging.getLogger("kvloop.router")


class Prober:
    """Probes a fleet's engines for as long as they are in it."""

    def __init__(self, fleet: Fleet, health: Health) -> None:
        self._fleet = fleet
        self._health = health
        self._loop = asyncio.get_running_loop()
        self._room = asyncio.Semaphore(MAX_PROBES)
        self._engines: dict[str, dict[str, Engine]] = defaultdict(dict)  # by URL, then by name
        self._tasks: dict[str, asyncio.Task[None]] = {}
        for engine in fleet.engines():
            self._add(engine)
        fleet.listeners.append(self._hear)

    @property
    def servers(self) -> list[str]:
        """The URLs that are probed."""
        return list(self._tasks)

    async def aclose(self) -> None:
        """Probe nobody any more."""
        self._fleet.listeners.remove(self._hear)
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _hear(self, event: FleetEvent, engine: Engine) -> None:
        if event is FleetEvent.JOINED:
            self._add(engine)
        elif event is FleetEvent.LEAVING:
            engines = self._engines[engine.url]
            engines.pop(engine.name, None)
            if not engines:
                del self._engines[engine.url]
                self._tasks.pop(engine.url).cancel()

    def _add(self, engine: Engine) -> None:
        self._engines[engine.url][engine.name] = engine
        if engine.url not in self._tasks:
            self._tasks[engine.url] = self._loop.create_task(self._probe_always(engine.url))

    async def _probe_always(self, url: str) -> None:
        interval_s = self._health.probe_interval_s
        await asyncio.sleep(random.random() * interval_s)
        while True:
            async with self._room:
                passed = await self._probe(next(iter(self._engines[url].values())))
            for engine in list(self._engines[url].values()):
                self._tell(engine, passed)
            await asyncio.sleep(interval_s * random.uniform(1 - JITTER, 1 + JITTER))

    async def _probe(self, engine: Engine) -> bool:
        head = b"GET /health HTTP/1.1\r\nhost: %b\r\n%b\r\n" % (engine.authority, engine.lines)
        timeout_s = self._health.probe_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                answer, _ = await engine.fetch((head,), ANSWER_MAX_BYTES, timeout_s)
        except (EngineFailureError, TimeoutError):
            return False
        return 200 <= answer.status < 300

    def _tell(self, engine: Engine, passed: bool) -> None:
        event = engine.probed(passed, self._loop.time())
        if event is ProbeEvent.FALL:
            logger.warning("%s engine %s does not answer its probes", engine.role, engine.name)
        elif event is ProbeEvent.RISE:
            logger.info("%s engine %s answers its probes again", engine.role, engine.name)
            self._fleet.restarted(engine)
