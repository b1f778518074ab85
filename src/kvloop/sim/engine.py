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

from kvloop.core.deadline import Deadlines
from kvloop.sim.batch import Batch
from kvloop.sim.config import EngineConfig
from kvloop.sim.handovers import Handovers
from kvloop.sim.leases import Leases
from kvloop.sim.loads import Load, Loads
from kvloop.sim.memory import Memory
from kvloop.sim.pool import BlockPool
from kvloop.sim.profile import Profile
from kvloop.sim.reads import Question, Reads
from kvloop.sim.request import (
    Event,
    Finished,
    Handover,
    Hop,
    ReadDone,
    Reason,
    Request,
    Sampled,
    StartRead,
    Starved,
)
from kvloop.sim.sequence import Sequence, Stage
from kvloop.sim.tables import BlockTables
from kvloop.wire.control import Message


class Engine:
    """One engine. `profile` says how long everything takes; times are of one monotonic clock."""

    def __init__(self, config: EngineConfig, profile: Profile) -> None:
        limits = profile.limits
        self.config = config
        self.profile = profile
        self.memory = Memory(limits.blocks, limits.block_tokens)
        self.pool = BlockPool(limits.blocks)
        self.leases = Leases(config, self.pool, limits.block_tokens, profile.model)
        self.tables = BlockTables(
            self.pool, self.leases, limits.block_tokens, prefix_cache=config.prefix_cache
        )
        self.counters: dict[str, int] = {}
        self._events: list[Event] = []
        self.reads = Reads(config, limits.block_tokens, self.leases.root, self._events.append)
        self._loads = Loads(self.memory, self.pool, profile.transfer, limits.block_tokens)
        self._handovers = Handovers(config, self.pool)
        self._sequences: dict[str, Sequence] = {}
        self._arriving = Deadlines()
        self._batch = Batch(self)
        self._submitted = 0

    def submit(self, request: Request, now_ns: int) -> None:
        """Take a request. ValueError for an id in use, no tokens, or more than the model takes."""
        request_id, tokens = request.request_id, len(request.text)
        if request_id in self._sequences or not tokens or request.max_tokens < 1:
            raise ValueError(f"request {request_id!r} is there already, or empty")
        if tokens + request.max_tokens > self.profile.limits.model_tokens:
            raise ValueError(f"{tokens} tokens and {request.max_tokens} more are too many")
        self._submitted += 1
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
        self._arriving.discard(request_id)
        self._batch.drop(sequence, now_ns)
        self.finish(sequence, Reason.ABORT, now_ns)
        self._batch.kick(now_ns)

    def serve(self, message: Message, now_ns: int) -> Message:
        """Answer a peer; never waits for a step."""
        free = self.pool.free_count
        answer = self.leases.serve(message, now_ns, starved=self._batch.is_starved)
        self.leases.give_back(now_ns)
        if self.pool.free_count > free:
            self._batch.kick(now_ns)
        return answer

    def hear(self, tag: object, message: Message, now_ns: int) -> None:
        """An answer to a message that this engine sent with `tag`."""
        if isinstance(tag, Question):
            self.reads.hear(tag, message, now_ns)
            self._batch.kick(now_ns)

    def read_ended(self, read_id: str, contents: list[int] | None, now_ns: int) -> None:
        """A read that was begun has ended; `contents` are the cells that it brought, None if it failed."""
        load = self._loads.end(read_id, contents)
        if load is None:
            return
        usable = contents is not None
        if load.claimed:
            usable = self.reads.ended(load.request_id, now_ns, failed=not usable)
        if load.sequence is not None:
            self._loaded(load.sequence, load, usable=usable)
        self._batch.kick(now_ns)

    def release_handover(self, request_id: str, now_ns: int) -> None:
        """Decode has read a prompt's blocks, or does not want them."""
        if self._handovers.release(request_id):
            self._batch.kick(now_ns)

    def advance(self, now_ns: int) -> None:
        """Let everything up to `now_ns` happen, in order."""
        while (due_ns := self.next_ns()) is not None and due_ns <= now_ns:
            self._pass(due_ns)

    def next_ns(self) -> int | None:
        """When `advance` will next have something to do, or None."""
        times = (
            self._batch.ends_ns,
            self._arriving.next_ns(),
            self.reads.book.next_deadline_ns(),
            self.leases.table.next_deadline_ns(),
            self._handovers.next_ns(),
        )
        return min((time_ns for time_ns in times if time_ns is not None), default=None)

    def take_events(self) -> list[Event]:
        """What has happened since the last call, in order."""
        events = self._events.copy()
        self._events.clear()
        return events

    def lend(self, blocks: tuple[int, ...], request_id: str | None) -> list[int] | None:
        """What a peer that reads `blocks` finds there now; None if the handover is over, or there are none.

        Blocks under a claim (`request_id` None) are read without asking, as a network card does.
        """
        if request_id is not None and request_id not in self._handovers:
            return None
        try:
            return self.memory.read(blocks)
        except IndexError:
            return None

    def reset_prefix_cache(self, now_ns: int) -> None:
        """Forget what can be found, and end every lease, as after a change of weights."""
        self.leases.drop_all(now_ns)
        self.pool.reset_cache()
        self._batch.kick(now_ns)

    @property
    def queue(self) -> tuple[int, int]:
        """Requests running, and waiting."""
        return self._batch.counts

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way: no request, no read."""
        return not self._sequences and not len(self._loads)

    def check_integrity(self) -> None:
        """AssertionError where a block is held by nobody, or not by as many as the pool counts."""
        for part in (self.pool, self.leases, self.reads, self._handovers, self._arriving):
            part.check_integrity()
        held = sum(len(sequence.blocks) for sequence in self._sequences.values())
        held += self._handovers.references + self._loads.orphaned_references()
        assert held + self.leases.table.held_blocks == self.pool.references, "references do not balance"

    # What the batch asks for.

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter."""
        self.counters[name] = self.counters.get(name, 0) + amount

    def starved(self, sequence: Sequence, missing: int) -> None:
        """A request waits for so many blocks, or has lost its own."""
        self._events.append(Starved(sequence.request.request_id, missing))

    def sampled(self, sequence: Sequence, data: bytes) -> None:
        """Tokens of an answer."""
        self._events.append(Sampled(sequence.request.request_id, data, sequence.cached))

    def wanted(self, sequence: Sequence, local: int, now_ns: int) -> int | None:
        """Tokens to read from another engine beyond `local` ones; None while that is not known."""
        request = sequence.request
        if request.request_id in self.reads:
            return self.reads.decide(sequence, local, now_ns)
        handover = request.handover
        if handover is None or sequence.tried_pull or not self._fits(handover, request):
            return 0
        return handover.token_count - local

    def begin_load(self, sequence: Sequence, now_ns: int) -> None:
        """Blocks are there: read what is wanted into those behind the local ones."""
        request, local_blocks = sequence.request, sequence.local // self.profile.limits.block_tokens
        handover, claimed = request.handover, request.request_id in self.reads
        if claimed:
            source, incarnation, blocks, tokens = self.reads.order(sequence)
            engine_id, address, remote_id = source.engine_id, (source.host, source.port), None
        else:
            assert handover is not None
            sequence.tried_pull = True
            blocks, tokens = handover.blocks[local_blocks:], handover.token_count
            engine_id, incarnation, address = handover.engine_id, handover.incarnation, handover.address
            remote_id = handover.request_id
        sequence.stage = Stage.LOADING
        load = Load(sequence, request.request_id, sequence.blocks[local_blocks:], tokens, claimed)
        read_id, takes_ns = self._loads.begin(load, now_ns)
        self._events.append(StartRead(read_id, engine_id, incarnation, address, remote_id, blocks, takes_ns))

    def finish(self, sequence: Sequence, reason: Reason, now_ns: int) -> None:
        """A request has ended: keep what somebody will come back for, free the rest."""
        request, turn, handover, handle = sequence.request, None, None, None
        if sequence.stage is Stage.LOADING:
            self._loads.orphan(request.request_id)
        if request.request_id in self.reads:
            turn = self.reads.leave(sequence, now_ns)
        if request.handover is not None and not sequence.tried_pull:
            self._let_go(sequence)
        if reason is not Reason.ABORT and request.hop is Hop.PREFILL:
            cached = sequence.cached
            handover = self._handovers.hold(sequence, cached, now_ns)
        elif reason is not Reason.ABORT and request.hop is not None and self._may_retain(request):
            handle = self.leases.retain(sequence, now_ns)
        self.tables.give_up(sequence)
        del self._sequences[request.request_id]
        self.count("wrong_answers", sequence.wrong)
        self._events.append(Finished(request.request_id, reason, sequence.wrong, turn, handover, handle))

    def _fits(self, handover: Handover, request: Request) -> bool:
        """Whether a handover is of as many tokens and blocks as the prompt."""
        blocks = -(-len(request.text) // self.profile.limits.block_tokens)
        return handover.token_count == len(request.text) and len(handover.blocks) == blocks

    def _may_retain(self, request: Request) -> bool:
        return request.retain and self.config.retains

    def _pass(self, now_ns: int) -> None:
        """Let what is due at `now_ns` happen."""
        while (request_id := self._arriving.pop_due(now_ns)) is not None:
            self._arrive(self._sequences[request_id], now_ns)
        for request_id in self.reads.book.advance(now_ns):
            self._give_up_waiting(self._sequences[request_id])
        freed = self.leases.give_back(now_ns)
        if self._handovers.expire(now_ns) or freed:
            self._batch.kick(now_ns)
        ends_ns = self._batch.ends_ns
        if ends_ns is not None and ends_ns <= now_ns:
            self._batch.end_step(now_ns)
        else:
            self._batch.kick(now_ns)

    def _arrive(self, sequence: Sequence, now_ns: int) -> None:
        self.count("prompt_tokens", len(sequence.request.text))
        if sequence.request.hop is Hop.PREFILL:
            self.reads.arrive(sequence, now_ns)
        self._batch.add(sequence)
        self._batch.kick(now_ns)

    def _give_up_waiting(self, sequence: Sequence) -> None:
        """A read has outlived its claim: the request starts over, in other blocks."""
        self.count("late_reads")
        self._loads.orphan(sequence.request.request_id)
        self.tables.give_up(sequence)
        self._batch.requeue(sequence)

    def _loaded(self, sequence: Sequence, load: Load, *, usable: bool) -> None:
        """A read that a request waited for is over: what it has now."""
        if not load.claimed:
            self._let_go(sequence)
        if usable:
            sequence.computed = sequence.cached = load.tokens
            self.count("read_tokens", load.tokens - sequence.local)
            self.tables.name(sequence)
        else:
            self.tables.cut(sequence, sequence.local)
        sequence.stage = Stage.WAITING
        self._batch.requeue(sequence)

    def _let_go(self, sequence: Sequence) -> None:
        """Tell prefill that its blocks are not needed any more."""
        handover = sequence.request.handover
        if handover is not None:
            self._events.append(ReadDone(handover.engine_id, handover.address, handover.request_id))
