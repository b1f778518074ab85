"""A simulated engine: a machine that takes requests, messages and the time, and says what happens.

    engine.submit(request, now)                     a prompt
    engine.serve(message, now) -> message           a peer's question on the control channel
    engine.hear(tag, message, now)                  the answer to one of ours
    engine.read_ended(read_id, contents, now)       a transfer that it began is over
    engine.release_handover(request_id, now)        decode has what it wanted
    engine.advance(now)                             time passes, up to `next_ns()` at most
    engine.take_events()                            what is to be done and told

Nothing here reads a clock, waits, or draws a number; the same calls give the same events. The memory (see
`memory`) has no part in the decisions: it is what the decisions are judged by.
"""

from collections.abc import Iterator

from kvloop.core.deadline import Deadlines
from kvloop.core.lease import LeaseState
from kvloop.sim.batch import Batch
from kvloop.sim.config import EngineConfig
from kvloop.sim.leases import Leases
from kvloop.sim.memory import Memory
from kvloop.sim.pool import BlockPool
from kvloop.sim.profile import Profile
from kvloop.sim.reads import Question, decoded_turn
from kvloop.sim.request import Event, Finished, Hop, Reason, Request, Sampled, Starved
from kvloop.sim.sequence import Sequence
from kvloop.sim.tables import BlockTables
from kvloop.sim.transfers import Transfers
from kvloop.wire.control import Message


class Engine:
    """One engine. `profile` says how long everything takes; times are of one monotonic clock."""

    def __init__(self, config: EngineConfig, profile: Profile) -> None:
        limits = profile.limits
        self.config = config
        self.profile = profile
        self.counters: dict[str, int] = {}
        self._events: list[Event] = []
        self.memory = Memory(limits.blocks, limits.block_tokens)
        self.pool = BlockPool(limits.blocks)
        self.leases = Leases(config, self.pool, limits.block_tokens, profile.model)
        self.tables = BlockTables(
            self.pool, self.leases, limits.block_tokens, prefix_cache=config.prefix_cache
        )
        self.transfers = Transfers(
            config,
            profile,
            self.memory,
            self.pool,
            self.tables,
            self.leases.root,
            self._events.append,
            self.count,
        )
        self._sequences: dict[str, Sequence] = {}
        self._arriving = Deadlines()
        self._batch = Batch(self)
        self._deadlines = (
            self._arriving.next_ns,
            self.leases.table.next_deadline_ns,
            self.transfers.reads.book.next_deadline_ns,
            self.transfers.handovers.next_ns,
        )
        self._submitted = 0
        self._next_ns: int | None = None
        self._next_is_known = False

    def submit(self, request: Request, now_ns: int) -> None:
        """Take a request. ValueError for an id in use, no tokens, or more than the model takes."""
        request_id, tokens = request.request_id, len(request.text)
        if request_id in self._sequences or not tokens or request.max_tokens < 1:
            raise ValueError(f"request {request_id!r} is there already, or empty")
        if tokens + request.max_tokens > self.profile.limits.model_tokens:
            raise ValueError(f"{tokens} tokens and {request.max_tokens} more are too many")
        self._submitted += 1
        self._next_is_known = False
        sequence = self._sequences[request_id] = Sequence(request, request.text, self._submitted)
        frontend = self.profile.frontend
        delay_ns = frontend.request_ns + tokens * frontend.token_ns
        if delay_ns:
            self._arriving.set(request_id, now_ns + delay_ns)
        else:
            self._arrive(sequence, now_ns)

    def abort(self, request_id: str, now_ns: int) -> None:
        """The client has left. Nothing happens if the request has ended."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return
        self._next_is_known = False
        self._arriving.discard(request_id)
        self._batch.drop(sequence, now_ns)
        self.finish(sequence, Reason.ABORT, now_ns)
        self._batch.kick(now_ns)

    def serve(self, message: Message, now_ns: int) -> Message:
        """Answer a peer; never waits for a step."""
        self._next_is_known = False
        free = self.pool.free_count
        answer = self.leases.serve(message, now_ns, starved=self._batch.is_starved)
        self.leases.give_back(now_ns)
        if self.pool.free_count > free:
            self._batch.kick(now_ns)
        return answer

    def hear(self, tag: object, message: Message, now_ns: int) -> None:
        """An answer to a message that this engine sent with `tag`."""
        if isinstance(tag, Question):
            self._next_is_known = False
            self.transfers.reads.hear(tag, message, now_ns)
            self._batch.kick(now_ns)

    def read_ended(self, read_id: str, contents: list[int] | None, now_ns: int) -> None:
        """A read that was begun has ended; `contents` are the cells that it brought, None if it failed."""
        self._next_is_known = False
        sequence = self.transfers.ended(read_id, contents, now_ns)
        if sequence is not None:
            self._batch.requeue(sequence)
        self._batch.kick(now_ns)

    def release_handover(self, request_id: str, now_ns: int) -> None:
        """Decode has read a prompt's blocks, or does not want them."""
        self._next_is_known = False
        if self.transfers.handovers.release(request_id):
            self._batch.kick(now_ns)

    def advance(self, now_ns: int) -> None:
        """Let everything up to `now_ns` happen, in order."""
        while True:
            due_ns = self._next_ns if self._next_is_known else self.next_ns()
            if due_ns is None or due_ns > now_ns:
                return
            self._pass(due_ns)

    def next_ns(self) -> int | None:
        """When `advance` will next have something to do, or None.

        Asked far more often than it changes: it is worked out again after something was done.
        """
        if self._next_is_known:
            return self._next_ns
        next_ns = self._batch.ends_ns
        for due in self._deadlines:
            time_ns = due()
            if time_ns is not None and (next_ns is None or time_ns < next_ns):
                next_ns = time_ns
        self._next_ns, self._next_is_known = next_ns, True
        return next_ns

    def take_events(self) -> list[Event]:
        """What has happened since the last call, in order."""
        if not self._events:
            return []
        events = self._events.copy()
        self._events.clear()
        return events

    def lend(self, blocks: tuple[int, ...], request_id: str | None) -> list[int] | None:
        """What a peer that reads `blocks` finds there now; None if the handover is over, or there are none.

        Blocks under a claim (`request_id` None) are read without asking, as a network card does.
        """
        if request_id is not None and request_id not in self.transfers.handovers:
            return None
        try:
            return self.memory.read(blocks)
        except IndexError:
            return None

    def reset_prefix_cache(self, now_ns: int) -> None:
        """Forget what can be found, and end every lease, as after a change of weights."""
        self._next_is_known = False
        self.leases.drop_all(now_ns)
        self.pool.reset_cache()
        self._batch.kick(now_ns)

    @property
    def queue(self) -> tuple[int, int]:
        """Requests running, and waiting."""
        return self._batch.counts

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way: no request, no read, no step."""
        return not self._sequences and not len(self.transfers.loads) and self._batch.ends_ns is None

    def holdings(self) -> Iterator[tuple[str, list[int]]]:
        """The blocks of every request, under way or handed over; leases have their own."""
        for request_id, sequence in self._sequences.items():
            yield request_id, sequence.blocks
        yield from self.transfers.handovers.holdings()

    def check_integrity(self) -> None:
        """AssertionError where a block is held by nobody, or not by as many as the pool counts."""
        for part in (self.pool, self.leases, self.transfers, self._arriving):
            part.check_integrity()
        assert not self.unbalanced_blocks, "references do not balance"

    @property
    def unbalanced_blocks(self) -> int:
        """References to blocks that nobody known holds, or fewer than are known: 0, or there is a bug."""
        held = sum(len(blocks) for _, blocks in self.holdings())
        held += self.transfers.loads.orphaned_references() + self.leases.table.held_blocks
        return self.pool.references - held

    # What the batch asks for.

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter."""
        self.counters[name] = self.counters.get(name, 0) + amount

    def starved(self, sequence: Sequence, missing: int) -> None:
        """A request waits for so many blocks, or has lost its own."""
        unclaimed = self.leases.table.counts()[LeaseState.GRANTED]
        self._events.append(Starved(sequence.request.request_id, missing, unclaimed))

    def sampled(self, sequence: Sequence, data: bytes) -> None:
        """Tokens of an answer."""
        self._events.append(Sampled(sequence.request.request_id, data, sequence.cached))

    def finish(self, sequence: Sequence, reason: Reason, now_ns: int) -> None:
        """A request has ended: keep what somebody will come back for, free the rest."""
        request, handle = sequence.request, None
        turn, handover = self.transfers.leave(sequence, reason, now_ns)
        comes_back = request.hop in (Hop.DECODE, Hop.ALONE) and request.retain and self.config.retains
        if reason is not Reason.ABORT and comes_back:
            handle = self.leases.retain(sequence, now_ns)
        decoded = None if handle is None else decoded_turn(sequence)
        self.tables.give_up(sequence)
        del self._sequences[request.request_id]
        self.count("wrong_answers", sequence.wrong)
        self._events.append(
            Finished(request.request_id, reason, sequence.wrong, turn, handover, handle, decoded)
        )

    def _pass(self, now_ns: int) -> None:
        """Let what is due at `now_ns` happen."""
        self._next_is_known = False
        while (request_id := self._arriving.pop_due(now_ns)) is not None:
            self._arrive(self._sequences[request_id], now_ns)
        for request_id in self.transfers.reads.book.advance(now_ns):
            sequence = self._sequences[request_id]
            self.transfers.give_up(sequence)
            self._batch.requeue(sequence)
        freed = self.leases.give_back(now_ns)
        if self.transfers.handovers.expire(now_ns) or freed:
            self._batch.kick(now_ns)
        ends_ns = self._batch.ends_ns
        if ends_ns is not None and ends_ns <= now_ns:
            self._batch.end_step(now_ns)
        else:
            self._batch.kick(now_ns)

    def _arrive(self, sequence: Sequence, now_ns: int) -> None:
        self.count("prompt_tokens", len(sequence.request.text))
        if sequence.request.hop is Hop.PREFILL:
            self.transfers.reads.arrive(sequence, now_ns)
        self._batch.add(sequence)
        self._batch.kick(now_ns)
