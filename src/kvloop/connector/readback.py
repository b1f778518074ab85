"""Prefill's side of the loop: ask decode what is the same, and read back exactly that.

One `ReadBook` entry per request that brought a handle; the book is the state machine, this file gives it
the request, the clock and the channel. Replies arrive on the control thread and are only queued there, with
the time, so that the book needs no lock: the scheduler's thread takes them when it next asks.
"""

import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from kvloop.connector.identity import IdentityOf, media_of
from kvloop.connector.metadata import KvloopMetadata
from kvloop.connector.read import Question, Read
from kvloop.connector.settings import NS_PER_MS, Settings
from kvloop.connector.tally import KEPT, Tally
from kvloop.connector.turn import Turn
from kvloop.control.address import Address
from kvloop.control.channel import ControlChannel
from kvloop.core.chain import Chain, build_chain, root_digest
from kvloop.core.claim import (
    Keep,
    Pending,
    ReadBook,
    ReadState,
    Ready,
    Recompute,
    SendClaim,
    SendRelease,
)
from kvloop.core.handle import Handle
from kvloop.errors import HandleError
from kvloop.wire.control import Claim, Granted, Message, Refused, Release
from kvloop.wire.handle import decode_handle

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = init_logger("vllm.kvloop.readback")

MAX_READS = 10_000
REPLY_WAIT_S = 0.0015
"""How long each question may hold the scheduler: a claim takes 0.3 ms on a quiet loopback, and going round
the engine's loop costs more than waiting for it."""
MARGIN_NS = 100_000_000
"""Taken off every claim's term: a deadline is kept by a worker that looks once a step."""


class ReadBack:
    """The reads of one prefill engine. All methods but `on_reply` are for the scheduler's thread."""

    def __init__(self, settings: Settings, *, identity_of: IdentityOf, block_size: int, tally: Tally) -> None:
        self._settings = settings
        self._tally = tally
        self._identity_of = identity_of
        self._block_size = block_size
        self._reads: dict[str, Read] = {}
        self._due: list[str] = []
        self._replies: deque[tuple[Question, Message, int]] = deque()
        self._replied = threading.Event()
        self._channel: ControlChannel | None = None
        self._book = ReadBook(
            reply_timeout_ns=settings.claim_timeout_ns, max_reads=MAX_READS, margin_ns=MARGIN_NS
        )

    def use(self, channel: ControlChannel) -> None:
        """Take the channel that claims go out on."""
        self._channel = channel

    def on_reply(self, question: object, message: Message) -> None:
        """An answer to a claim came. Called on the control thread."""
        if isinstance(question, Question):
            self._replies.append((question, message, time.monotonic_ns()))
            self._replied.set()

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._reads

    def arrive(self, request: "Request", handle_text: object, *, reusable: bool) -> None:
        """A prefill request arrived: claim what its handle names, or note why nothing is claimed."""
        read = Read(Turn(prompt_tokens=request.num_prompt_tokens))
        self._reads[request.request_id] = read
        if handle_text is None:
            read.turn.reason = "no_handle"
        elif not self._settings.reads or not reusable:
            read.turn.reason = "not_reusable"
        else:
            read.turn.reason = self._identity_of.why_not(request) or self._claim(request, read, handle_text)

    def _claim(self, request: "Request", read: Read, handle_text: object) -> str | None:
        try:
            handle = decode_handle(handle_text if isinstance(handle_text, str) else "", self._settings.key)
        except HandleError as error:
            logger.warning("request %s brought a handle that is not valid: %s", request.request_id, error)
            return f"handle_{error.reason}"
        wanted = self._chain(request, handle)
        command = self._book.ask(request.request_id, handle, wanted, time.monotonic_ns())
        if isinstance(command, Recompute):
            return command.reason
        read.handle = handle
        self._send_claim(command)
        return None

    def _chain(self, request: "Request", handle: Handle) -> Chain:
        root = root_digest(self._settings.key, self._identity_of(request))
        tokens = (request.prompt_token_ids or [])[: handle.token_count]
        return build_chain(self._settings.key, root, tokens, media_of(request))

    def _send_claim(self, command: SendClaim) -> None:
        address = _address(command.handle)
        question = Question(command.request_id, command.ask_id, address)
        claim = Claim.asking(command.handle, command.wanted)
        if self._channel is None or not self._channel.send(address, claim, question):
            self._book.on_refused(command.request_id, "unreachable", ask_id=command.ask_id)

    def _send_releases(self, releases: Iterable[SendRelease], granter: Address | None = None) -> None:
        for release in releases:
            address = granter if release.handle is None else _address(release.handle)
            if address is not None and self._channel is not None:
                self._channel.send(address, Release(release.claim_id))

    def _take_replies(self) -> None:
        self._replied.clear()
        while self._replies:
            question, message, heard_ns = self._replies.popleft()
            if not isinstance(message, Granted):
                reason = message.reason if isinstance(message, Refused) else "refused"
                self._book.on_refused(question.request_id, reason, ask_id=question.ask_id)
                continue
            releases = self._book.on_granted(
                question.request_id,
                message.claim_id,
                message.matched_tokens,
                message.blocks(),
                message.term_ms * NS_PER_MS,
                heard_ns,
                ask_id=question.ask_id,
            )
            read = self._reads.get(question.request_id)
            if read is not None and not releases:  # a grant that is released is not the one to read from
                read.source = message.source
            self._send_releases(releases, question.address)

    def decide(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """What vLLM is to load for `request` beyond its local hit: tokens (None: ask again), and
        asynchronously."""
        read = self._reads[request.request_id]
        read.turn.local_tokens = num_computed_tokens
        read.turn.returned_tokens = read.turn.read_us = 0
        if read.handle is None:
            return 0, False
        answer = self._poll(request.request_id, read)
        if isinstance(answer, Pending):
            return None, False
        if isinstance(answer, Recompute):
            read.turn.reason = answer.reason
            return 0, False
        count = answer.matched_tokens - num_computed_tokens
        needed = -(-answer.matched_tokens // self._block_size)
        reason = None
        if read.source is None or len(answer.blocks) != 1 or len(answer.blocks[0]) != needed:
            reason = "bad_grant"
        elif count <= 0:
            reason = "local_hit"
        elif count < self._settings.recompute_threshold_tokens:
            reason = "below_threshold"
        if reason is not None:
            read.turn.reason = reason
            self._send_releases(self._book.give_up(request.request_id, reason, time.monotonic_ns()))
            return 0, False
        read.matched_tokens = answer.matched_tokens
        read.remote_blocks = answer.blocks[0][num_computed_tokens // self._block_size :]
        read.deadline_ns = answer.deadline_ns
        return count, True

    def _poll(self, request_id: str, read: Read) -> Pending | Ready | Recompute:
        answer = self._look(request_id, read)
        if isinstance(answer, Pending) and not read.waited:
            read.waited = True
            self._replied.wait(REPLY_WAIT_S)
            answer = self._look(request_id, read)
        return answer

    def _look(self, request_id: str, read: Read) -> Pending | Ready | Recompute:
        self._take_replies()
        answer = self._book.poll(request_id, time.monotonic_ns())
        if isinstance(answer, SendClaim):
            read.waited = False
            self._send_claim(answer)
            return Pending()
        return answer

    def order(self, request: "Request", missing_blocks: list[int]) -> None:
        """Blocks for the tokens that `decide` announced have been allocated: queue the read into them."""
        request_id = request.request_id
        read = self._reads[request_id]
        if len(missing_blocks) != len(read.remote_blocks):
            raise AssertionError(
                f"{request_id}: {len(missing_blocks)} blocks to fill, {len(read.remote_blocks)} blocks proven"
            )
        if not self._book.start(request_id):
            raise AssertionError(f"{request_id}: a read without a claim")
        read.target_blocks = missing_blocks
        read.in_flight, read.ordered_ns = True, time.monotonic_ns()
        self._due.append(request_id)

    def decline(self, request: "Request") -> None:
        """Blocks have been allocated, and nothing is to be loaded: a claim that was granted is released."""
        if self._book.state(request.request_id) is ReadState.GRANTED:
            self._reads[request.request_id].turn.reason = "not_loaded"
            now_ns = time.monotonic_ns()
            self._send_releases(self._book.give_up(request.request_id, "not_loaded", now_ns))

    def add_orders(self, meta: KvloopMetadata) -> None:
        """Put the queued reads into this step's metadata."""
        for request_id in self._due:
            read = self._reads[request_id]
            handle, source = read.handle, read.source
            if handle is None or source is None:
                continue
            params = read.where(source)
            local_blocks = read.turn.local_tokens // self._block_size
            meta.add_new_req_to_recv(
                request_id, [read.target_blocks], params, (local_blocks,), awaiting_kvs=True
            )
            meta.deadlines_ns[request_id] = read.deadline_ns
            meta.incarnations[source.engine_id] = handle.incarnation
        self._due.clear()

    def end(self, request_id: str, *, failed: bool) -> None:
        """The read of `request_id` has ended, as the workers judged it: `failed` also where it was late."""
        read = self._reads.get(request_id)
        if read is None or not read.in_flight:
            return
        read.in_flight = False
        now_ns = time.monotonic_ns()
        # The workers have compared a good read's end with its deadline; this call comes a step later.
        ended_ns = now_ns if failed else min(now_ns, read.deadline_ns - 1)
        verdict, releases = self._book.finish(request_id, ended_ns, failed=failed)
        self._send_releases(releases)
        if isinstance(verdict, Keep):
            read.turn.returned_tokens = read.matched_tokens - read.turn.local_tokens
            read.turn.read_us = (now_ns - read.ordered_ns) // 1000
            outcome = KEPT
        else:
            outcome = read.turn.reason = verdict.reason
        self._tally.read_back(outcome, len(read.target_blocks))
        if read.left:
            self._forget(request_id)

    def target_blocks(self, request_id: str) -> list[int]:
        """The local blocks that the read of `request_id` writes to."""
        read = self._reads.get(request_id)
        return [] if read is None else list(read.target_blocks)

    def leave(self, request: "Request") -> dict[str, Any]:
        """The request has ended: what it reused. Its claim, if any is left, is released."""
        request_id = request.request_id
        self._take_replies()
        read = self._reads.get(request_id)
        if read is None:
            return Turn(request.num_prompt_tokens, reason="not_asked").report()
        if read.in_flight:
            read.left = True
            self._send_releases(self._book.give_up(request_id, "aborted", time.monotonic_ns()))
        else:
            self._forget(request_id)
        self._tally.turn(read.turn)
        return read.turn.report()

    def _forget(self, request_id: str) -> None:
        del self._reads[request_id]
        self._send_releases(self._book.forget(request_id))


def _address(handle: Handle) -> Address:
    return handle.control_host, handle.control_port
