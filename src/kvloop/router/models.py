"""Which engine serves which model, learned from the engines' own `/v1/models`.

They are read at the start and at an interval, and at once where a request names a model that no engine is
known to serve: it may have been loaded a moment ago (LoRA adapters are). Not more than once a second, however
many such requests come. An engine whose list was never read counts as serving everything, and one that does
not answer keeps the list that it had: what is not known must not keep a request from being served.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterable

from kvloop.router.engine import Engine
from kvloop.router.headers import hop
from kvloop.router.upstream import EngineFailureError, Head
from kvloop.wire.models import listed_models, model_lengths

logger = logging.getLogger("kvloop.router")

TIMEOUT_S = 5.0
MAX_BYTES = 4 * 1024 * 1024
REREAD_MIN_S = 1.0  # between two readings that requests for unknown models cause


class Models:
    """What is known of the engines' models. With an interval of 0 nothing is learned."""

    def __init__(self, engines: Callable[[], Iterable[Engine]], interval_s: float) -> None:
        self._engines = engines
        self._interval_s = interval_s
        self._served: dict[str, frozenset[str]] = {}
        self._lengths: dict[str, int] = {}
        self._reading: asyncio.Task[None] | None = None
        self._read_s = float("-inf")

    def serves(self, engine_name: str, model: str) -> bool:
        """Whether an engine serves a model, as far as is known; all ranks of a server serve the same."""
        served = self._served.get(engine_name.partition("#")[0])
        return served is None or model in served

    def max_model_len(self, model: str) -> int | None:
        """How many tokens a prompt and its answer may have together, where an engine has said so."""
        return self._lengths.get(model)

    async def is_served(self, model: str, engine_names: Collection[str], lines: bytes) -> bool:
        """Whether one of these engines serves a model; where none is known to, they are asked first.

        Where there is no engine at all, that is not the model's fault: true. `lines`: the headers of the
        request that wants to know, for engines that want a key.
        """
        if not engine_names or any(self.serves(name, model) for name in engine_names) or not self._interval_s:
            return True
        loop = asyncio.get_running_loop()
        if self._reading is None and loop.time() - self._read_s >= REREAD_MIN_S:
            self._reading = loop.create_task(self._reread(lines))
        if self._reading is not None:
            await asyncio.shield(self._reading)
        return any(self.serves(name, model) for name in engine_names)

    async def read(self, lines: bytes) -> list[tuple[Head, bytes]]:
        """Ask every engine, learn from what they answer, and return it: of those that could be reached."""
        engines = list(self._engines())
        answers = await asyncio.gather(*[_ask(engine, lines) for engine in engines])
        for gone in self._served.keys() - {engine.url for engine in engines}:
            del self._served[gone]
        lengths: dict[str, int] = {}
        for engine, answer in zip(engines, answers, strict=True):
            if answer is not None and answer[0].status == 200 and self._interval_s:
                served = listed_models(answer[1])
                if served is not None:
                    self._served[engine.url] = served
                    lengths |= model_lengths(answer[1])
        self._lengths = lengths or self._lengths
        return [answer for answer in answers if answer is not None]

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Read the lists now and at the interval, as long as the block lasts."""
        watch = asyncio.get_running_loop().create_task(self._watch())
        try:
            yield
        finally:
            for task in (watch, self._reading):
                if task is not None:
                    task.cancel()

    async def _watch(self) -> None:
        while self._interval_s:
            await self._learn(b"")
            await asyncio.sleep(self._interval_s)

    async def _reread(self, lines: bytes) -> None:
        try:
            await self._learn(lines)
        finally:
            self._read_s = asyncio.get_running_loop().time()
            self._reading = None

    async def _learn(self, lines: bytes) -> None:
        try:
            await self.read(lines)
        except Exception:
            logger.exception("the engines' models could not be read")


async def _ask(engine: Engine, lines: bytes) -> tuple[Head, bytes] | None:
    try:
        return await engine.fetch(hop(engine, "GET", "/v1/models", lines, None), MAX_BYTES, TIMEOUT_S)
    except EngineFailureError:
        return None
