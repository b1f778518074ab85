"""The prefill engine: it asks, reads, and checks what it kept against memory and tokens."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvloop.core.claim import Keep, Pending, ReadBook, Ready, Recompute, SendClaim, SendRelease
from kvloop.errors import WireError
from kvloop.wire.control import Claim, Granted, Message, Refused, Release
from kvloop.wire.handle import decode_handle
from kvloop.wire.seal import Seal

from .decode import Decode, Kept
from .world import BLOCK_TOKENS, KEY, MARGIN, MS, POLL, QUESTIONS, REPLY_TIMEOUT, Turn, World, chain_of


@dataclass
class Attempt:
    """One request's way, as the checks see it."""

    turn: Turn
    kept: Kept
    wanted: list[int]
    tenant: str
    arrived: int
    answer: str = ""
    answered: int = -1
    questions: int = 0
    missed: int = 0
    tokens: int = 0
    seen: list[object] = field(default_factory=list)
    blocks: tuple[int, ...] = ()
    is_over: bool = False


class Prefill:
    """Asks, reads, and checks what it kept against memory."""

    def __init__(self, world: World, decode: Decode) -> None:
        self.world, self.decode = world, decode
        self.seal = Seal(KEY, "prefill")
        self.book = ReadBook(REPLY_TIMEOUT, 3, MARGIN, QUESTIONS)
        self.questions: dict[bytes, tuple[str, int]] = {}
        self.attempts: list[Attempt] = []
        self.current: dict[str, Attempt] = {}

    def clock(self) -> int:
        """Its own monotonic clock: another origin, and slower than decode's."""
        schedule = self.world.schedule
        return schedule.prefill_offset_ns + self.world.now * (1_000_000 - schedule.slow_ppm) // 1_000_000

    def send(self, message: Message) -> bytes:
        """Over the link; the nonce under which an answer would come."""
        nonce = self.world.nonce()
        wall_ms = self.world.now // MS + 1_000_000 + self.world.schedule.wall_offset_ms
        frame = self.seal.seal(message, wall_ms, nonce)
        self.world.send(frame, lambda arrived: self.decode.receive(arrived, self.receive))
        return nonce

    def release(self, commands: tuple[SendRelease, ...]) -> None:
        """Send what the book says is to be released."""
        for command in commands:
            self.send(Release(command.claim_id))

    def arrive(self, turn: Turn) -> None:
        """A request comes in, perhaps under the id of one that is still there: then that one is aborted."""
        kept = self.decode.leases.get(turn.lease)
        if kept is None:
            return
        if turn.request_id in self.current:
            self.finish_attempt(self.current[turn.request_id], "aborted")
            self.release(self.book.forget(turn.request_id))
        tenant, wanted = edited(kept, turn.edit)
        attempt = Attempt(turn, kept, wanted, tenant, self.world.now)
        self.attempts.append(attempt)
        self.current[turn.request_id] = attempt
        handle = decode_handle(kept.handle, KEY)
        chain = chain_of(tenant, wanted[: handle.token_count])
        command = self.book.ask(turn.request_id, handle, chain, self.clock())
        if isinstance(command, SendClaim):
            self.ask(attempt, command)
        if turn.abort_after_ms is not None:
            self.world.at(self.world.now + turn.abort_after_ms * MS, lambda: self.abort(attempt))
        self.poll(attempt)

    def ask(self, attempt: Attempt, command: SendClaim) -> None:
        """The first question about a request, or the next."""
        nonce = self.send(Claim.asking(command.handle, command.wanted))
        self.questions[nonce] = (command.request_id, command.ask_id)
        attempt.questions += 1

    def receive(self, frame: bytes) -> None:
        """Decode's answer to a question of ours; the question stays open, for the machine is to cope."""
        wall_ms = self.world.now // MS + 1_000_000 + self.world.schedule.wall_offset_ms
        try:
            opened = self.seal.open(frame, wall_ms)
        except WireError:
            return
        question, message = self.questions.get(opened.reply_to), opened.message
        if question is None:
            return
        if isinstance(message, Granted):
            term_ns = message.term_ms * MS
            commands = self.book.on_granted(
                question[0],
                message.claim_id,
                message.matched_tokens,
                message.blocks(),
                term_ns,
                self.clock(),
                ask_id=question[1],
            )
            self.release(commands)
        elif isinstance(message, Refused):
            self.book.on_refused(question[0], message.reason, ask_id=question[1])

    def abort(self, attempt: Attempt) -> None:
        """The client hangs up."""
        if not attempt.is_over:
            self.release(self.book.give_up(attempt.turn.request_id, "aborted", self.clock()))
            self.finish_attempt(attempt, "aborted")

    def poll(self, attempt: Attempt) -> None:
        """Ask until there is an answer."""
        if attempt.is_over:
            return
        answer = self.book.poll(attempt.turn.request_id, self.clock())
        if isinstance(answer, SendClaim):
            self.ask(attempt, answer)
        if isinstance(answer, Pending | SendClaim):
            self.world.at(self.world.now + POLL, lambda: self.poll(attempt))
        elif isinstance(answer, Recompute):
            self.finish_attempt(attempt, answer.reason)
        elif attempt.missed < attempt.turn.misses and attempt.turn.think_ms:
            attempt.missed += 1
            self.world.at(self.world.now + attempt.turn.think_ms * MS, lambda: self.poll(attempt))
        else:
            self.read(attempt, answer)

    def read(self, attempt: Attempt, ready: Ready) -> None:
        """Start the transfer. It is watched until it ends or must not be waited for any more."""
        assert ready.matched_tokens <= common_tokens(attempt), "a token was granted that is not proven"
        assert self.book.start(attempt.turn.request_id)
        attempt.tokens, attempt.blocks = ready.matched_tokens, ready.blocks[0]
        attempt.seen = [self.decode.memory[block] for block in attempt.blocks]
        self.world.at(self.world.now + attempt.turn.read_ms * MS, lambda: self.end(attempt))
        self.watch(attempt)

    def watch(self, attempt: Attempt) -> None:
        """A request does not wait for a read that has outlived its claim."""
        if attempt.is_over:
            return
        for request_id in self.book.advance(self.clock()):
            self.finish_attempt(self.current[request_id], "overdue")
        self.world.at(self.world.now + attempt.turn.watch_ms * MS, lambda: self.watch(attempt))

    def end(self, attempt: Attempt) -> None:
        """The transfer has ended; a restart of decode in between has broken it."""
        if self.current.get(attempt.turn.request_id) is not attempt:
            return
        incarnation = decode_handle(attempt.kept.handle, KEY).incarnation
        failed = attempt.turn.read_fails or incarnation != self.decode.incarnation
        verdict, commands = self.book.finish(attempt.turn.request_id, self.clock(), failed=failed)
        self.release(commands)
        if isinstance(verdict, Keep):
            assert not attempt.is_over, "a read was kept that nobody waits for"
            check_kept(attempt, [self.decode.memory[block] for block in attempt.blocks])
            self.finish_attempt(attempt, "kept")
        elif not attempt.is_over:
            self.finish_attempt(attempt, verdict.reason)

    def finish_attempt(self, attempt: Attempt, answer: str) -> None:
        """The request has its answer, and hears no other."""
        if not attempt.is_over:
            attempt.answer, attempt.answered, attempt.is_over = answer, self.world.now, True


def edited(kept: Kept, edit: str) -> tuple[str, list[int]]:
    """The prompt of the next turn: tenant and tokens."""
    tokens, more = kept.tokens, [77] * 20
    prompts = {
        "continued": (kept.tenant, tokens + more),
        "shorter": (kept.tenant, tokens[:-1]),
        "edited": (kept.tenant, [*tokens[:70], 78, *tokens[71:], *more]),
        "other": (kept.tenant, [78, *tokens[1:], *more]),
        "foreign": ("another", tokens + more),
    }
    return prompts[edit]


def common_tokens(attempt: Attempt) -> int:
    """How many tokens of the prompt are those that decode holds, counted one by one."""
    if attempt.tenant != attempt.kept.tenant:
        return 0
    pairs: Iterator[tuple[int, int]] = zip(attempt.wanted, attempt.kept.tokens, strict=False)
    count = 0
    for mine, held in pairs:
        if mine != held:
            break
        count += 1
    return count


def check_kept(attempt: Attempt, memory: list[object]) -> None:
    """What was read is what the prompt says, from the first byte of the transfer to the last."""
    assert memory == attempt.seen, "a block was rewritten while it was read, and the read was kept"
    assert len(memory) == -(-attempt.tokens // BLOCK_TOKENS), "not the blocks of the proven prefix"
    for place, content in enumerate(memory):
        proven = min(attempt.tokens, (place + 1) * BLOCK_TOKENS)
        assert isinstance(content, tuple)
        assert content[: proven + 1] == (attempt.tenant, *attempt.wanted[:proven]), (
            "other tokens' KV was kept"
        )
