"""How prefill reads back: one small machine for each request that has a handle.

The claim's deadline is counted from when the question was sent, which is before decode began to count, and
a margin is taken off for clocks that run at different rates; so whatever ends before our deadline ended
within decode's claim (Gray and Cheriton, Leases, SOSP 1989). A read that ends later is thrown away, for the
blocks may have been rewritten under it. A grant that comes when nobody waits for it any more is released at
once. Whatever happens, `poll` has an answer: a miss is one.

A request asks as soon as it arrives, and may then stand in the engine's queue for longer than its claim
lasts. To compute it all would make the queue longer still, for those behind it, too. So a claim that lapsed
before its read began is asked for again when the request's turn has come, which is when it is polled: then
`poll` answers with the question to send. A question without a reply is not repeated: whoever is silent
would be waited for, at the head of the queue, as often again.

`ask_id` ties a reply to its question: a request asks again, request ids come back (a client's retry), and a
grant taken for the answer to a later question would have its deadline counted from the wrong moment.

The book is not thread-safe; its caller holds a lock around each call.
"""

from dataclasses import dataclass

from kvloop.core.chain import SEGMENT_TOKENS, Chain
from kvloop.core.claim_state import (
    IN_FLIGHT,
    INITIAL,
    TRANSITIONS,
    WAITING,
    Discard,
    Keep,
    Pending,
    ReadEvent,
    ReadState,
    Ready,
    Recompute,
    RecomputeReason,
    SendClaim,
    SendRelease,
)
from kvloop.core.deadline import Deadlines
from kvloop.core.handle import Handle
from kvloop.core.lease_state import Blocks, RefusalReason

__all__ = [
    "MAX_QUESTIONS",
    "TRANSITIONS",
    "Discard",
    "Keep",
    "Pending",
    "ReadBook",
    "ReadEvent",
    "ReadState",
    "Ready",
    "Recompute",
    "RecomputeReason",
    "SendClaim",
    "SendRelease",
]

MAX_QUESTIONS = 8
"""About one request: whose turn does not come in so many claims' time computes, and so does whoever is
granted claims that end before they begin."""
_REFUSALS = frozenset(str(reason) for reason in RefusalReason)


@dataclass(slots=True)
class _Read:
    request_id: str
    handle: Handle
    wanted: Chain
    ask_id: int = 0
    sent_ns: int = 0
    deadline_ns: int = 0
    state: ReadState = INITIAL
    questions: int = 0
    claim_id: str = ""
    claim_is_ours: bool = False  # granted, and neither released nor lapsed
    matched_tokens: int = 0
    blocks: Blocks = ()
    reason: str = RecomputeReason.TRIED


class ReadBook:
    """All reads of one prefill engine. Times are nanoseconds of one monotonic clock."""

    def __init__(
        self, reply_timeout_ns: int, max_reads: int, margin_ns: int, max_questions: int = MAX_QUESTIONS
    ) -> None:
        """`margin_ns` is taken off each claim's term: what two clocks may drift apart meanwhile."""
        if min(reply_timeout_ns, max_reads, max_questions) <= 0 or margin_ns < 0:
            raise ValueError("timeout and bounds must be positive, the margin not negative")
        self.reply_timeout_ns = reply_timeout_ns
        self.max_reads = max_reads
        self.margin_ns = margin_ns
        self.max_questions = max_questions
        self._reads: dict[str, _Read] = {}
        self._deadlines = Deadlines()
        self._last_ask_id = 0

    def __len__(self) -> int:
        """Requests that are remembered."""
        return len(self._reads)

    def ask(self, request_id: str, handle: Handle, wanted: Chain, now_ns: int) -> SendClaim | Recompute:
        """Begin a read. `wanted` is the chain over the first `handle.token_count` tokens of the prompt.

        A request that has asked before gets Recompute; so does one whose prompt is too short for anything
        to be proven, and one that the book has no room for.
        """
        if request_id in self._reads:
            return Recompute(RecomputeReason.TRIED)
        if wanted.token_count < min(SEGMENT_TOKENS, max(handle.token_count, 1)):
            return Recompute(RecomputeReason.TOO_SHORT)
        if len(self._reads) >= self.max_reads:
            return Recompute(RecomputeReason.TOO_MANY_READS)
        read = self._reads[request_id] = _Read(request_id, handle, wanted)
        return self._question(read, now_ns)

    def on_granted(
        self,
        request_id: str,
        claim_id: str,
        matched_tokens: int,
        blocks: Blocks,
        term_ns: int,
        now_ns: int,
        *,
        ask_id: int,
    ) -> tuple[SendRelease, ...]:
        """Decode granted. Send what comes back: a grant that is wrong, or late, is released."""
        read = self._reads.get(request_id)
        if read is None or read.ask_id != ask_id:
            return (SendRelease(request_id, claim_id, None),)
        self._lapse_if_due(read, now_ns)
        if (read.state, ReadEvent.GRANT) not in TRANSITIONS:
            return () if claim_id == read.claim_id else (SendRelease(request_id, claim_id, read.handle),)
        read.claim_id = claim_id
        read.claim_is_ours = True
        if self._move(read, ReadEvent.GRANT) is not ReadState.GRANTED:
            return self._release(read)
        read.matched_tokens, read.blocks = matched_tokens, blocks
        if not _is_plausible(read.wanted, matched_tokens, blocks):
            return self._end(read, ReadEvent.GIVE_UP, RecomputeReason.BAD_GRANT)
        read.deadline_ns = read.sent_ns + term_ns - self.margin_ns
        self._deadlines.set(request_id, read.deadline_ns)
        if now_ns >= read.deadline_ns:
            return self._end(read, ReadEvent.LAPSE, RecomputeReason.DEADLINE)
        return ()

    def on_refused(self, request_id: str, reason: str, *, ask_id: int) -> None:
        """Decode refused, or could not be asked."""
        read = self._reads.get(request_id)
        if read is None or read.ask_id != ask_id or (read.state, ReadEvent.REFUSE) not in TRANSITIONS:
            return
        if read.state is ReadState.ASKED:
            read.reason = reason if reason in _REFUSALS else RecomputeReason.REFUSED
        self._move(read, ReadEvent.REFUSE)

    def poll(self, request_id: str, now_ns: int) -> Pending | Ready | SendClaim | Recompute:
        """The request's turn has come: what it may do now. To ask while its read runs is to give the read up.

        SendClaim: its claim is over, and this is to be sent; from then on it is as after `ask`.
        """
        read = self._reads.get(request_id)
        if read is None:
            return Recompute(RecomputeReason.NOT_ASKED)
        self._lapse_if_due(read, now_ns)
        if read.state is ReadState.ASKED:
            return Pending()
        if read.state is ReadState.GRANTED:
            return Ready(read.matched_tokens, read.blocks, read.deadline_ns)
        if (read.state, ReadEvent.ASK_AGAIN) in TRANSITIONS and read.questions < self.max_questions:
            self._move(read, ReadEvent.ASK_AGAIN)
            return self._question(read, now_ns)
        if (read.state, ReadEvent.GIVE_UP) in TRANSITIONS:
            self._move(read, ReadEvent.GIVE_UP)
        return Recompute(read.reason)

    def start(self, request_id: str) -> bool:
        """The read is being queued. False if there is nothing to read: then it must not be."""
        read = self._reads.get(request_id)
        if read is None or (read.state, ReadEvent.START) not in TRANSITIONS:
            return False
        self._move(read, ReadEvent.START)
        return True

    def finish(
        self, request_id: str, now_ns: int, *, failed: bool = False
    ) -> tuple[Keep | Discard, tuple[SendRelease, ...]]:
        """The transfer has ended; no byte of it can land any more. What to do with it, and what to send."""
        read = self._reads.get(request_id)
        if read is None:
            return Discard(RecomputeReason.NOT_ASKED), ()
        self._lapse_if_due(read, now_ns)
        event = ReadEvent.FAIL if failed else ReadEvent.FINISH
        if (read.state, event) not in TRANSITIONS:
            return Discard(RecomputeReason.TRIED), ()
        if failed and read.state is ReadState.READING:
            read.reason = RecomputeReason.READ_FAILED
        kept = self._move(read, event) is ReadState.DONE
        return Keep() if kept else Discard(read.reason), self._release(read)

    def give_up(self, request_id: str, reason: str, now_ns: int) -> tuple[SendRelease, ...]:
        """Nobody waits for the read any more. A transfer that runs must still come to its `finish`."""
        read = self._reads.get(request_id)
        if read is None:
            return ()
        self._lapse_if_due(read, now_ns)
        if (read.state, ReadEvent.GIVE_UP) not in TRANSITIONS:
            return ()
        return self._end(read, ReadEvent.GIVE_UP, reason)

    def forget(self, request_id: str) -> tuple[SendRelease, ...]:
        """The request is gone. A grant that still comes for it will be released."""
        read = self._reads.pop(request_id, None)
        if read is None:
            return ()
        self._deadlines.discard(request_id)
        return self._release(read)

    def advance(self, now_ns: int) -> list[str]:
        """Let deadlines pass. Returns the requests whose transfer outlived its claim: they must not wait."""
        overdue = []
        while (request_id := self._deadlines.pop_due(now_ns)) is not None:
            if self._lapse(self._reads[request_id]) is ReadState.ABANDONED:
                overdue.append(request_id)
        return overdue

    def next_deadline_ns(self) -> int | None:
        """When `advance` will next have something to do, or None."""
        return self._deadlines.next_ns()

    def state(self, request_id: str) -> ReadState | None:
        """Where the request's read stands, or None if it never asked or is forgotten."""
        read = self._reads.get(request_id)
        return None if read is None else read.state

    def is_in_flight(self, request_id: str) -> bool:
        """Whether a transfer's bytes may still land in the request's blocks."""
        return self.state(request_id) in IN_FLIGHT

    def check_integrity(self) -> None:
        """AssertionError where the book contradicts itself."""
        self._deadlines.check_integrity()
        assert len(self._reads) <= self.max_reads
        assert len(self._deadlines) == sum(read.state in WAITING for read in self._reads.values())
        for request_id, read in self._reads.items():
            assert read.request_id == request_id
            assert (request_id in self._deadlines) is (read.state in WAITING)
            if read.state in (ReadState.GRANTED, ReadState.READING):
                assert read.claim_is_ours, "a read without a claim"
                assert _is_plausible(read.wanted, read.matched_tokens, read.blocks)
            if read.claim_is_ours:
                assert read.state is ReadState.GRANTED or read.state in IN_FLIGHT, "nobody will release this"
            assert 0 < read.questions <= min(self.max_questions, read.ask_id)

    def _question(self, read: _Read, now_ns: int) -> SendClaim:
        """The next question about a request: an id and a time of its own, and nothing of the last answer."""
        self._last_ask_id += 1
        read.ask_id = self._last_ask_id
        read.questions += 1
        read.sent_ns, read.deadline_ns = now_ns, now_ns + self.reply_timeout_ns
        read.claim_id, read.matched_tokens, read.blocks = "", 0, ()
        read.reason = RecomputeReason.TRIED
        self._deadlines.set(read.request_id, read.deadline_ns)
        return SendClaim(read.request_id, read.ask_id, read.handle, read.wanted)

    def _lapse_if_due(self, read: _Read, now_ns: int) -> None:
        if read.state in WAITING and now_ns >= read.deadline_ns:
            self._lapse(read)

    def _lapse(self, read: _Read) -> ReadState:
        waited_for_reply = read.state is ReadState.ASKED
        read.reason = RecomputeReason.NO_REPLY if waited_for_reply else RecomputeReason.DEADLINE
        read.claim_is_ours = False  # decode ends it by itself within the margin
        return self._move(read, ReadEvent.LAPSE)

    def _end(self, read: _Read, event: ReadEvent, reason: str) -> tuple[SendRelease, ...]:
        read.reason = reason
        self._move(read, event)
        return self._release(read)

    def _move(self, read: _Read, event: ReadEvent) -> ReadState:
        read.state = TRANSITIONS[read.state, event]
        if read.state not in WAITING:
            self._deadlines.discard(read.request_id)
        return read.state

    def _release(self, read: _Read) -> tuple[SendRelease, ...]:
        if not read.claim_is_ours:
            return ()
        read.claim_is_ours = False
        return (SendRelease(read.request_id, read.claim_id, read.handle),)


def _is_plausible(wanted: Chain, matched_tokens: int, blocks: Blocks) -> bool:
    """Whether a proof can have matched so many tokens of `wanted`: whole segments, or all of it."""
    if not 0 < matched_tokens <= wanted.token_count or not any(blocks):
        return False
    return matched_tokens == wanted.token_count or matched_tokens % SEGMENT_TOKENS == 0
