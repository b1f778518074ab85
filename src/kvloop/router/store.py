"""Responses that clients may go on from: `store` is true unless they say otherwise.

vLLM keeps responses only in the API server that made them, and prefill has made none, so the router keeps
them. A response is kept with its whole conversation, as the stretches that each turn added to it; a stretch
is one object however many responses have it, and counts once. What was used longest ago goes first.

`ConversationStore` is what a store shared by several routers has to offer; it may have to wait for an answer.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

OBJECT_COST_BYTES = 400  # a response's own objects and its places in tables; its bytes come on top
STRETCH_COST_BYTES = 120
REFERENCE_BYTES = 8  # from a response to a stretch


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as its client got it, and its conversation up to its own output.

    `stretches`: what each turn added, input and output items as JSON, between commas and without brackets.
    """

    response: bytes
    stretches: tuple[bytes, ...]


class ConversationStore(Protocol):
    """Keeps responses, each one for its tenant alone."""

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """A tenant's response, None if there is none (any more)."""

    async def put(self, tenant: str, response_id: str, stored: StoredResponse) -> None:
        """Keep a response, in the place of one of the same name."""

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Forget one; False if there was none."""


class MemoryStore:
    """Keeps them in this process, bounded by number, bytes and the time since their last use."""

    def __init__(
        self, max_responses: int, max_bytes: int, max_age_ns: int, clock_ns: Callable[[], int]
    ) -> None:
        self.max_responses = max_responses
        self.max_bytes = max_bytes
        self._max_age_ns = max_age_ns
        self._clock_ns = clock_ns
        self._used_bytes = 0
        self._kept: OrderedDict[tuple[str, str], tuple[StoredResponse, int]] = OrderedDict()
        self._references: dict[int, int] = {}  # of each stretch, by its identity

    def __len__(self) -> int:
        """Responses that are kept."""
        return len(self._kept)

    @property
    def used_bytes(self) -> int:
        """An estimate of the memory that they take."""
        return self._used_bytes

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """A tenant's response, None if there is none (any more)."""
        self.expire()
        kept = self._kept.get((tenant, response_id))
        if kept is None:
            return None
        self._kept[tenant, response_id] = kept[0], self._clock_ns()
        self._kept.move_to_end((tenant, response_id))
        return kept[0]

    async def put(self, tenant: str, response_id: str, stored: StoredResponse) -> None:
        """Keep a response, in the place of one of the same name."""
        self._drop((tenant, response_id))
        self._kept[tenant, response_id] = stored, self._clock_ns()
        self._used_bytes += _own_bytes(stored)
        for stretch in stored.stretches:
            references = self._references.get(id(stretch), 0)
            self._references[id(stretch)] = references + 1
            if not references:
                self._used_bytes += len(stretch) + STRETCH_COST_BYTES
        self.expire()
        while len(self._kept) > self.max_responses or self._used_bytes > self.max_bytes:
            self._drop(next(iter(self._kept)))

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Forget one; False if there was none."""
        self.expire()
        return self._drop((tenant, response_id))

    def expire(self) -> None:
        """Forget what was not used for too long."""
        horizon_ns = self._clock_ns() - self._max_age_ns
        while self._kept and next(iter(self._kept.values()))[1] <= horizon_ns:
            self._drop(next(iter(self._kept)))

    def check_integrity(self) -> None:
        """AssertionError where the books do not balance."""
        stretches = {id(one): one for stored, _ in self._kept.values() for one in stored.stretches}
        assert self._references.keys() == stretches.keys(), (
            "a stretch that nobody has, or that is not counted"
        )
        held = sum(len(stored.stretches) for stored, _ in self._kept.values())
        assert sum(self._references.values()) == held
        assert self._used_bytes == sum(_own_bytes(stored) for stored, _ in self._kept.values()) + sum(
            len(stretch) + STRETCH_COST_BYTES for stretch in stretches.values()
        )
        assert len(self._kept) <= self.max_responses
        assert self._used_bytes <= self.max_bytes

    def _drop(self, key: tuple[str, str]) -> bool:
        kept = self._kept.pop(key, None)
        if kept is None:
            return False
        stored = kept[0]
        self._used_bytes -= _own_bytes(stored)
        for stretch in stored.stretches:
            self._references[id(stretch)] -= 1
            if not self._references[id(stretch)]:
                del self._references[id(stretch)]
                self._used_bytes -= len(stretch) + STRETCH_COST_BYTES
        return True


def _own_bytes(stored: StoredResponse) -> int:
    return len(stored.response) + OBJECT_COST_BYTES + REFERENCE_BYTES * len(stored.stretches)
