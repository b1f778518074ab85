"""Decode's side of the loop, put together over vLLM's block pool: requests end, peers ask, time stands."""

import threading
from typing import Any

import msgspec
import pytest

from kvloop.connector import account, conservation, leases, lend
from kvloop.connector.account import Account
from kvloop.connector.conservation import Conservation
from kvloop.connector.leases import Leases
from kvloop.connector.lend import Lender
from kvloop.connector.pressure import Pressure
from kvloop.connector.retain import Retainer
from kvloop.connector.tally import Tally
from kvloop.core.chain import Chain, build_chain, root_digest
from kvloop.core.handle import Handle
from kvloop.wire.control import Claim, Granted, Message, Stat, StatReply
from tests.connector.fakes import (
    BLOCK,
    IDENTITIES,
    KEY,
    Clock,
    Pool,
    make_request,
    make_settings,
    make_source,
)

TOKENS = list(range(101))
TIMED = (account, conservation, leases, lend)
BLOCK_BYTES = 1000


def stop_time(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time for all of decode's side, moved by hand."""
    clock = Clock()
    for module in TIMED:
        monkeypatch.setattr(module, "time", clock)
    return clock


def chain(tokens: list[int], salt: str = "") -> Chain:
    """The chain that a reader builds."""
    request = make_request("reader", tokens, cache_salt=salt)
    return build_chain(KEY, root_digest(KEY, IDENTITIES(request)), tokens)


class Decode:
    """Leases, who fills them, and who reads from them. `woken` counts wake-ups of the scheduler's thread."""

    def __init__(self, pool: Pool | None, engine_id: str = "decode-0", **settings: Any) -> None:
        made = make_settings(**settings)
        self.pool: Any = pool
        self.leases = Leases(made, block_size=BLOCK, incarnation="i1")
        self.tally = Tally(BLOCK_BYTES)
        self.pressure = Pressure(self.leases.make_room)
        self.conservation = Conservation((self.leases.held,), 0)
        self.retainer = Retainer(
            made,
            self.leases,
            identity_of=IDENTITIES,
            block_size=BLOCK,
            source=msgspec.structs.replace(make_source("none"), engine_id=engine_id),
        )
        counted = Account(
            self.leases, self.pressure, self.conservation, self.tally, frames_dropped=lambda: {"forged": 3}
        )
        self.lender = Lender(
            self.leases,
            engine_id=engine_id,
            describe_source=make_source,
            counters=counted.counters,
            patience_ns=made.claim_timeout_ns,
        )
        if pool is not None:
            self.leases.bind(pool)
        self.woken = 0
        self.late: list[Message] = []
        self.lender.wake_with(self._wake)

    def _wake(self) -> None:
        self.woken += 1

    def retain(self, tokens: list[int] = TOKENS, **changes: Any) -> Handle | None:
        """A request of these tokens ends: it is retained where it may be, and gives its references back."""
        blocks = self.pool.allocate(-(-len(tokens) // BLOCK))
        assert blocks
        handle = self.retainer.retain(make_request("r", tokens, **changes), (blocks,))
        self.pool.free(reversed(blocks))
        return handle

    def kept(self, tokens: list[int] = TOKENS, **changes: Any) -> Handle:
        """The same, where it must be retained."""
        handle = self.retain(tokens, **changes)
        assert handle is not None
        return handle

    def serve(self, message: Message) -> Message | None:
        """What the control thread answers at once. What is answered later goes to `late`."""
        answers: list[Message | None] = []
        thread = threading.Thread(target=lambda: answers.append(self.lender.serve(message, self.late.append)))
        thread.start()
        thread.join()
        return answers[0]

    def claim(self, handle: Handle, tokens: list[int] = TOKENS, salt: str = "") -> Message | None:
        """A reader's claim, as the control thread answers it."""
        return self.serve(Claim.asking(handle, chain(tokens[: handle.token_count], salt)))

    def claim_soft(self, handle: Handle, tokens: list[int] = TOKENS, *, starved: bool = False) -> Message:
        """The same on a lease that has ended: answered when the scheduler's thread comes by."""
        assert self.claim(handle, tokens) is None, "answered on the control thread"
        self.lender.answer_deferred(starved=starved)
        return self.late.pop()

    def stat(self) -> dict[str, int]:
        """What is counted, without the family's prefix."""
        answer = self.serve(Stat())
        assert isinstance(answer, StatReply)
        return {name.removeprefix("kvloop_"): count for name, count in answer.counters.items()}

    def check(self) -> None:
        """Whatever happened, leases and blocks agree."""
        self.leases.check_integrity()


def granted(answer: Message | None) -> Granted:
    """The answer, which must be a grant."""
    assert isinstance(answer, Granted), answer
    return answer
