"""Prompts that are computed and wait for decode: their blocks are held until it has read them, or a bound."""

from collections.abc import Iterator

from kvloop.core.deadline import Deadlines
from kvloop.sim.config import EngineConfig
from kvloop.sim.pool import BlockPool
from kvloop.sim.request import Handover
from kvloop.sim.sequence import Sequence


class Handovers:
    """The handovers of one engine that nobody has read yet."""

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        self._config = config
        self._pool = pool
        self._held: dict[str, list[int]] = {}
        self._ends = Deadlines()

    def __contains__(self, request_id: object) -> bool:
        """Whether a handover is still held."""
        return request_id in self._held

    def hold(self, sequence: Sequence, cached_tokens: int, now_ns: int) -> Handover:
        """Keep a prompt's blocks for the engine that will answer it."""
        config, request = self._config, sequence.request
        self._held[request.request_id] = list(sequence.blocks)
        self._ends.set(request.request_id, now_ns + config.handover_ns)
        self._pool.touch(sequence.blocks)
        return Handover(
            config.engine_id,
            config.incarnation,
            request.request_id,
            config.side_channel,
            tuple(sequence.blocks),
            len(request.text),
            cached_tokens,
        )

    def release(self, request_id: str) -> bool:
        """Decode has read it, or does not want it. False if it is not held any more."""
        blocks = self._held.pop(request_id, None)
        if blocks is None:
            return False
        self._ends.discard(request_id)
        self._pool.free(blocks)
        return True

    def next_ns(self) -> int | None:
        """When the next one is given up, or None."""
        return self._ends.next_ns()

    def expire(self, now_ns: int) -> bool:
        """Give up what nobody came for. Whether there was something."""
        expired = False
        while (request_id := self._ends.pop_due(now_ns)) is not None:
            self._pool.free(self._held.pop(request_id))
            expired = True
        return expired

    @property
    def references(self) -> int:
        """Holds on blocks."""
        return sum(map(len, self._held.values()))

    def holdings(self) -> Iterator[tuple[str, list[int]]]:
        """Each request's blocks."""
        yield from self._held.items()

    def check_integrity(self) -> None:
        """AssertionError for a handover that would be held for ever."""
        self._ends.check_integrity()
        assert len(self._ends) == len(self._held)
        assert all(request_id in self._ends for request_id in self._held)
