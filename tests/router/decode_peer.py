"""A decode engine's lease table behind a real control channel, and an engine whose answers carry its handles.

The clock is the test's: the peer's own monotonic one, or a number that only the test moves. `behave` replaces
what it answers: silence, lateness, lies.
"""

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvloop.control.channel import ControlChannel
from kvloop.control.deferred import Answer
from kvloop.core.chain import Chain
from kvloop.core.handle import HANDLE_VERSION, Handle
from kvloop.core.lease import LeaseTable
from kvloop.wire.control import Drop, Dropped, Failed, Message, Renew, Renewed
from kvloop.wire.handle import encode_handle
from kvloop.wire.seal import Seal
from tests.control.peer import free_port
from tests.router.fake_engine import DONE, Asked, Plan, chunk, handle_event, json_answer, stream_answer
from tests.router.fake_engine import Answer as HttpAnswer

KEY = bytes(range(32))
NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000
TOKENS = 64

Behave = Callable[[Message, Answer], Message | None]


class DecodePeer:
    """One decode engine's control side. `heard` is every message that it got, in order."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns, *, term_s: float = 60.0) -> None:
        self.clock_ns = clock_ns
        self.term_ns = int(term_s * NS_PER_S)
        self.port = free_port()
        self.address = ("127.0.0.1", self.port)
        self.heard: list[Message] = []
        self.softens = False
        self.behave: Behave = lambda message, _: self.answer(message)
        self._lock = threading.Lock()
        self.restart()
        self.channel = ControlChannel(
            self.address,
            Seal(KEY, "d0"),
            serve=self._serve,
            on_reply=lambda *_: None,
        )

    def restart(self) -> None:
        """Forget everything, as a new process has."""
        self.incarnation = secrets.token_hex(8)
        self.table = LeaseTable(
            TOKENS, 480 * NS_PER_S, 10 * NS_PER_S, 100_000, 1000, incarnation=self.incarnation
        )

    def grant(self) -> str:
        """A new lease's handle."""
        lease_id = secrets.token_hex(8)
        chain = Chain(bytes(16), bytes(16), b"", TOKENS)
        with self._lock:
            self.table.grant(lease_id, chain, ((1,),), self.clock_ns(), self.term_ns)
        names = (HANDLE_VERSION, "d0", self.incarnation, lease_id, *self.address)
        handle = Handle(*names, 1, 1, 1, TOKENS, self.term_ns // NS_PER_MS)
        return encode_handle(handle, KEY)

    def held(self) -> int:
        """Leases that hold memory now."""
        with self._lock:
            self.table.advance(self.clock_ns())
            return len(self.table)

    def renewals(self) -> list[list[str]]:
        """The lease ids of each renewal that was heard."""
        return [[entry[0] for entry in one.leases] for one in list(self.heard) if isinstance(one, Renew)]

    def drops(self) -> list[str]:
        """The lease ids that were dropped, in order."""
        return [lease_id for one in list(self.heard) if isinstance(one, Drop) for lease_id in one.lease_ids]

    def answer(self, message: Message) -> Message:
        """What an honest engine says."""
        with self._lock:
            now_ns = self.clock_ns()
            if isinstance(message, Renew):
                lost = [
                    lease_id
                    for lease_id, term_ms, chance in message.leases
                    if not self.table.renew(lease_id, now_ns, term_ms * NS_PER_MS, chance)
                ]
                return Renewed([], lost) if self.softens else Renewed(lost, [])
            if isinstance(message, Drop):
                return Dropped(sum(self.table.drop(lease_id, now_ns) for lease_id in message.lease_ids))
            return Failed("not a question for a decode engine's lease table")

    def _serve(self, message: Message, answer: Answer) -> Message | None:
        self.heard.append(message)
        return self.behave(message, answer)


@contextmanager
def decode_peer(
    clock_ns: Callable[[], int] = time.monotonic_ns, *, term_s: float = 60.0
) -> Iterator[DecodePeer]:
    """A peer that serves while the block lasts."""
    peer = DecodePeer(clock_ns, term_s=term_s)
    peer.channel.start()
    try:
        yield peer
    finally:
        peer.channel.stop()


def plan_of(peer: DecodePeer, ending: str = "stop") -> Plan:
    """An engine that leaves a lease of `peer` with each answer, unless it is told not to."""

    def plan(asked: Asked) -> HttpAnswer:
        handle = None if asked.params.get("kvloop_retain") is False else peer.grant()
        choice = {"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": ending}
        if asked.body.get("stream"):
            last = {"choices": [{"index": 0, "delta": {}, "finish_reason": ending}]}
            pieces = [chunk("Hi"), chunk("", **last)] + ([handle_event(handle)] if handle else [])
            return stream_answer(*pieces, DONE)
        left = {"kv_transfer_params": {"kvloop_handle": handle}} if handle else {}
        return json_answer({"id": "x", "object": "chat.completion", "choices": [choice], **left})

    return plan
