"""Prefill's side in a simulated engine: claims for the handles that requests bring, and what came of them.

Whether and until when a read counts is decided by `core.claim`; this file gives it prompts, the clock and the
names of the connector's reasons.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kvloop.core.claim import Keep, Pending, ReadBook, Recompute, SendClaim, SendRelease
from kvloop.core.handle import Handle
from kvloop.errors import HandleError
from kvloop.sim.config import NS_PER_MS, EngineConfig
from kvloop.sim.request import Address, Send
from kvloop.sim.sequence import Sequence
from kvloop.wire.control import Claim, Granted, Message, Refused, Release, Source
from kvloop.wire.handle import decode_handle


class Question(NamedTuple):
    """What a reply is the answer to."""

    request_id: str
    ask_id: int
    address: Address


@dataclass(slots=True)
class Turn:
    """What a prompt is made of, in tokens; why nothing came back, or how long it took."""

    prompt: int
    local: int = 0
    returned: int = 0
    reason: str | None = None
    read_us: int = 0

    def report(self) -> dict[str, object]:
        """As it stands in a prefill answer's `kvloop_turn`."""
        return {
            "prompt_tokens": self.prompt,
            "local_tokens": self.local,
            "returned_tokens": self.returned,
            "computed_tokens": self.prompt - self.local - self.returned,
            "reason": self.reason,
            "read_us": self.read_us,
        }


@dataclass(slots=True)
class _Read:
    turn: Turn
    handle: Handle | None = None
    source: Source | None = None
    matched: int = 0
    blocks: tuple[int, ...] = ()
    ordered_ns: int = 0
    in_flight: bool = False
    left: bool = False


class Reads:
    """The reads of one engine. `send` takes what is to go out on the control channel."""

    def __init__(
        self,
        config: EngineConfig,
        block_tokens: int,
        root: Callable[[str], bytes],
        send: Callable[[Send], None],
    ) -> None:
        self.book = ReadBook(config.claim_timeout_ns, config.max_reads, config.claim_margin_ns)
        self._config = config
        self._block_tokens = block_tokens
        self._root = root
        self._send = send
        self._reads: dict[str, _Read] = {}

    def __contains__(self, request_id: object) -> bool:
        """Whether the request is a prompt for another engine that has not ended."""
        return request_id in self._reads

    def arrive(self, sequence: Sequence, now_ns: int) -> None:
        """A prompt for another engine has come: claim what its handle names."""
        request = sequence.request
        read = self._reads[request.request_id] = _Read(Turn(len(request.text)))
        if request.handle is None:
            read.turn.reason = "no_handle"
        elif not self._config.reads:
            read.turn.reason = "not_reusable"
        else:
            read.turn.reason = self._claim(sequence, read, now_ns)

    def _claim(self, sequence: Sequence, read: _Read, now_ns: int) -> str | None:
        request = sequence.request
        try:
            text = request.handle if isinstance(request.handle, str) else ""
            handle = decode_handle(text, self._config.key)
        except HandleError as error:
            return f"handle_{error.reason}"
        wanted = request.text.chain(self._config.key, self._root(request.salt), handle.token_count)
        command = self.book.ask(request.request_id, handle, wanted, now_ns)
        if isinstance(command, Recompute):
            return command.reason
        read.handle = handle
        self._ask(command)
        return None

    def _ask(self, command: SendClaim) -> None:
        address = _address(command.handle)
        question = Question(command.request_id, command.ask_id, address)
        self._send(Send(address, Claim.asking(command.handle, command.wanted), question))

    def hear(self, question: Question, message: Message, now_ns: int) -> None:
        """The answer to a claim."""
        if not isinstance(message, Granted):
            reason = message.reason if isinstance(message, Refused) else "refused"
            self.book.on_refused(question.request_id, reason, ask_id=question.ask_id)
            return
        releases = self.book.on_granted(
            question.request_id,
            message.claim_id,
            message.matched_tokens,
            message.blocks(),
            message.term_ms * NS_PER_MS,
            now_ns,
            ask_id=question.ask_id,
        )
        read = self._reads.get(question.request_id)
        if read is not None and not releases:
            read.source = message.source
        self._release(releases, question.address)

    def decide(self, sequence: Sequence, local: int, now_ns: int) -> int | None:
        """How many tokens are to be read beyond `local` ones; None: ask again."""
        request_id = sequence.request.request_id
        read = self._reads[request_id]
        read.turn.local, read.turn.returned, read.turn.read_us = local, 0, 0
        if read.handle is None:
            return 0
        answer = self.book.poll(request_id, now_ns)
        if isinstance(answer, SendClaim):  # the last one is over
            self._ask(answer)
            return None
        if isinstance(answer, Pending):
            return None
        if isinstance(answer, Recompute):
            read.turn.reason = answer.reason
            return 0
        count = answer.matched_tokens - local
        needed = -(-answer.matched_tokens // self._block_tokens)
        reason = None
        if read.source is None or len(answer.blocks) != 1 or len(answer.blocks[0]) != needed:
            reason = "bad_grant"
        elif count <= 0:
            reason = "local_hit"
        elif count < self._config.recompute_threshold_tokens:
            reason = "below_threshold"
        if reason is not None:
            read.turn.reason = reason
            self._release(self.book.give_up(request_id, reason, now_ns))
            return 0
        read.matched = answer.matched_tokens
        read.blocks = answer.blocks[0][local // self._block_tokens :]
        return count

    def order(self, sequence: Sequence, now_ns: int) -> tuple[Source, str, tuple[int, ...], int]:
        """The read begins: from where, which incarnation, which blocks; and how many tokens that makes."""
        request_id = sequence.request.request_id
        read = self._reads[request_id]
        assert read.handle is not None
        assert read.source is not None
        if not self.book.start(request_id):
            raise AssertionError(f"{request_id}: a read without a claim")
        read.in_flight, read.ordered_ns = True, now_ns
        return read.source, read.handle.incarnation, read.blocks, read.matched

    def ended(self, request_id: str, now_ns: int, *, failed: bool) -> bool:
        """A read has ended; no byte of it can land any more. Whether what it brought may be used."""
        read = self._reads[request_id]
        read.in_flight = False
        verdict, releases = self.book.finish(request_id, now_ns, failed=failed)
        self._release(releases)
        if isinstance(verdict, Keep):
            read.turn.returned = read.matched - read.turn.local
            read.turn.read_us = (now_ns - read.ordered_ns) // 1000
        else:
            read.turn.reason = verdict.reason
        if read.left:
            self._forget(request_id)
        return isinstance(verdict, Keep)

    def leave(self, sequence: Sequence, now_ns: int) -> dict[str, object]:
        """The request has ended: its account. A claim that is left is released."""
        request_id = sequence.request.request_id
        read = self._reads[request_id]
        if read.in_flight:
            read.left = True
            self._release(self.book.give_up(request_id, "aborted", now_ns))
        else:
            self._forget(request_id)
        return read.turn.report()

    def check_integrity(self) -> None:
        """AssertionError where the book and the reads disagree."""
        self.book.check_integrity()
        assert len(self.book) <= len(self._reads), "a read is remembered that no request has"

    def _forget(self, request_id: str) -> None:
        del self._reads[request_id]
        self._release(self.book.forget(request_id))

    def _release(self, releases: Iterable[SendRelease], granter: Address | None = None) -> None:
        for release in releases:
            address = granter if release.handle is None else _address(release.handle)
            if address is not None:
                self._send(Send(address, Release(release.claim_id)))


def decoded_turn(sequence: Sequence) -> dict[str, object]:
    """What decode says of a prompt: what it had itself, what prefill handed over, what it computed."""
    prompt = len(sequence.request.text)
    local = min(sequence.local, prompt)
    return Turn(prompt, local, max(0, min(sequence.cached, prompt) - local)).report()


def _address(handle: Handle) -> Address:
    return handle.control_host, handle.control_port
