"""Answers peers: prefill engines that claim, routers that renew and drop, and whoever asks how things are.

On the control thread, from the lease table alone, so that no answer waits for a model step; with one
exception. Whether the blocks of a soft lease still hold what they held is for the scheduler's thread to say.
A claim on one is put aside for it, and the engine is woken: a busy one gets there with its next step, an
idle one at once.
"""

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import sleep
from typing import NamedTuple

from kvloop.connector.leases import Leases
from kvloop.connector.settings import NS_PER_MS
from kvloop.connector.worker import CLAIM_READ_PREFIX
from kvloop.control.deferred import Answer
from kvloop.core.lease import ClaimRefused, RefusalReason
from kvloop.errors import ProtocolError
from kvloop.wire.control import (
    Claim,
    Drop,
    Dropped,
    Failed,
    Granted,
    Message,
    Refused,
    Release,
    Released,
    Renew,
    Renewed,
    Source,
    Stat,
    StatReply,
)

TURN_LEASES = 500
"""Some 4 ms for which the lock is held, of a message of 10,000."""
TURN_PAUSE_S = 0.0001
"""Long enough for a thread that waits for the lock to get it."""
MAX_DEFERRED_CLAIMS = 1_000
"""A step takes them all; more than a few wait only while one step takes longer than their readers do."""


class _Deferred(NamedTuple):
    claim: Claim
    answer: Answer
    since_ns: int


class Lender:
    """Serves one engine's leases. `describe_source(claim_id)` says where the blocks can be read;
    `counters()` is what this engine counts, by name. `patience_ns`: how long a reader waits for an answer."""

    def __init__(
        self,
        leases: Leases,
        *,
        engine_id: str,
        describe_source: Callable[[str], Source],
        counters: Callable[[], dict[str, int]],
        patience_ns: int,
    ) -> None:
        self._leases = leases
        self._table = leases.table
        self._engine_id = engine_id
        self._describe_source = describe_source
        self._counters = counters
        self._patience_ns = patience_ns
        self._wake: Callable[[], None] | None = None
        self._deferred: deque[_Deferred] = deque()

    def wake_with(self, wake: Callable[[], None] | None) -> None:
        """Take what wakes the scheduler's thread. Until then soft leases cannot be claimed."""
        self._wake = wake

    def serve(self, message: Message, answer: Answer) -> Message | None:
        """Answer a peer's message, or return None and call `answer` later, from the scheduler's thread.
        Called on the control thread."""
        match message:
            case Renew() | Drop():
                told = self._renew(message) if isinstance(message, Renew) else self._drop(message)
                if self._leases.is_behind and self._wake is not None:
                    self._wake()  # so that an idle engine has it all back before the next request comes
                return told
        now_ns = time.monotonic_ns()
        with self._leases.lock:
            self._leases.note_ended()
            match message:
                case Claim():
                    return None if self._defer(message, answer, now_ns) else self._claim(message, now_ns)
                case Release():
                    return Released(self._table.release(message.claim_id, now_ns))
                case Stat():
                    return StatReply(self._engine_id, self._table.incarnation, self._counters())
                case _:
                    return Failed("not a question")

    def _claim(self, claim: Claim, now_ns: int) -> Message:
        try:
            wanted = claim.wanted()
        except ProtocolError:
            return Refused(self._table.totals.refused(RefusalReason.MALFORMED).reason)
        claim_id = secrets.token_hex(8)
        answer = self._table.claim(
            claim.lease_id, claim_id, wanted, "", now_ns, incarnation=claim.incarnation
        )
        if isinstance(answer, ClaimRefused):
            return Refused(answer.reason)
        return Granted(
            claim_id=claim_id,
            matched_tokens=answer.matched_tokens,
            block_ids=[list(group) for group in answer.blocks],
            term_ms=answer.term_ns // NS_PER_MS,
            source=self._describe_source(f"{CLAIM_READ_PREFIX}{claim_id}"),
        )

    def _renew(self, message: Renew) -> Renewed:
        gone: list[str] = []
        soft: list[str] = []
        for start in range(0, len(message.leases), TURN_LEASES):
            with self._turn(start) as now_ns:
                for lease_id, term_ms, chance in message.leases[start : start + TURN_LEASES]:
                    if self._table.renew(lease_id, now_ns, term_ms * NS_PER_MS, chance):
                        continue
                    # One that is ending, but still read by somebody, will be soft.
                    left = self._table.state(lease_id) is not None or self._leases.is_soft(lease_id)
                    (soft if left and self._wake is not None else gone).append(lease_id)
        return Renewed(gone, soft)

    def _drop(self, message: Drop) -> Dropped:
        dropped = 0
        for start in range(0, len(message.lease_ids), TURN_LEASES):
            with self._turn(start) as now_ns:
                for lease_id in message.lease_ids[start : start + TURN_LEASES]:
                    dropped += self._leases.drop(lease_id, now_ns, message.is_over)
        return Dropped(dropped)

    @contextmanager
    def _turn(self, start: int) -> Iterator[int]:
        """The lock, for some of a message's leases; the time. Between two turns the scheduler's thread can
        have it."""
        if start:
            sleep(TURN_PAUSE_S)
        with self._leases.lock:
            self._leases.note_ended()
            yield time.monotonic_ns()
            self._leases.note_ended()

    def _defer(self, claim: Claim, answer: Answer, now_ns: int) -> bool:
        if (
            self._wake is None
            or claim.incarnation != self._table.incarnation
            or not self._leases.is_soft(claim.lease_id)
            or self._table.state(claim.lease_id) is not None
            or len(self._deferred) >= MAX_DEFERRED_CLAIMS
        ):
            return False
        self._deferred.append(_Deferred(claim, answer, now_ns))
        if len(self._deferred) == 1:
            self._wake()
        return True

    def answer_deferred(self, *, starved: bool) -> None:
        """Answer the claims on soft leases. For the scheduler's thread. `starved`: live work lacks blocks,
        so none are taken from it."""
        while self._deferred:
            claim, answer, since_ns = self._deferred.popleft()
            answer(self._answer_deferred(claim, since_ns, starved))

    def _answer_deferred(self, claim: Claim, since_ns: int, starved: bool) -> Message:
        now_ns = time.monotonic_ns()
        if not starved and now_ns - since_ns < self._patience_ns:
            with suppress(ProtocolError):  # refused below
                self._leases.revive(claim.lease_id, claim.wanted())
        with self._leases.lock:
            return self._claim(claim, now_ns)
