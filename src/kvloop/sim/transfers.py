"""What an engine has to do with other engines' memory: reads back, pulls, and prompts that wait to be pulled.

A prompt for another engine may be read back from under a claim (`reads`); an answer's prompt is pulled from
the engine that computed it (its handover). Either way the request waits with its blocks allocated until the
bytes are there (`loads`), or starts over where they are not usable.
"""

from collections.abc import Callable

from kvloop.sim.config import EngineConfig
from kvloop.sim.handovers import Handovers
from kvloop.sim.loads import Load, Loads
from kvloop.sim.memory import Memory
from kvloop.sim.pool import BlockPool
from kvloop.sim.profile import Profile
from kvloop.sim.reads import Reads
from kvloop.sim.request import Event, Handover, Hop, ReadDone, Reason, Request, StartRead
from kvloop.sim.sequence import Sequence, Stage
from kvloop.sim.tables import BlockTables


class Transfers:
    """One engine's transfers. `emit` takes what is to be done, `count` what is to be counted."""

    def __init__(
        self,
        config: EngineConfig,
        profile: Profile,
        memory: Memory,
        pool: BlockPool,
        tables: BlockTables,
        root: Callable[[str], bytes],
        emit: Callable[[Event], None],
        count: Callable[[str, int], None],
    ) -> None:
        self._block_tokens = profile.limits.block_tokens
        self._tables = tables
        self._emit = emit
        self._count = count
        self.reads = Reads(config, self._block_tokens, root, emit)
        self.loads = Loads(memory, pool, profile.transfer, self._block_tokens)
        self.handovers = Handovers(config, pool)

    def wanted(self, sequence: Sequence, local: int, now_ns: int) -> int | None:
        """Tokens to read from another engine beyond `local` ones; None while that is not known."""
        request = sequence.request
        if request.request_id in self.reads:
            return self.reads.decide(sequence, local, now_ns)
        handover = request.handover
        if handover is None or sequence.tried_pull or not self._fits(handover, request):
            return 0
        return handover.token_count - local

    def begin(self, sequence: Sequence, now_ns: int) -> None:
        """Blocks are there: read what is wanted into those behind the local ones."""
        request, local_blocks = sequence.request, sequence.local // self._block_tokens
        handover, claimed = request.handover, request.request_id in self.reads
        if claimed:
            source, incarnation, blocks, tokens = self.reads.order(sequence, now_ns)
            engine_id, address, remote_id = source.engine_id, (source.host, source.port), None
            claim_id = source.request_id
        else:
            assert handover is not None
            sequence.tried_pull = True
            blocks, tokens = handover.blocks[local_blocks:], handover.token_count
            engine_id, incarnation, address = handover.engine_id, handover.incarnation, handover.address
            remote_id, claim_id = handover.request_id, ""
        sequence.stage = Stage.LOADING
        load = Load(sequence, request.request_id, sequence.blocks[local_blocks:], tokens, claimed)
        read_id, takes_ns = self.loads.begin(load, now_ns)
        place = (engine_id, incarnation, address, remote_id, blocks)
        self._emit(StartRead(read_id, request.request_id, *place, takes_ns, claim_id))

    def ended(self, read_id: str, contents: list[int] | None, now_ns: int) -> Sequence | None:
        """A read has ended. The request that waited for it, which can go on; None if nobody did."""
        load = self.loads.end(read_id, contents)
        if load is None:
            return None
        usable = contents is not None
        if load.claimed:
            usable = self.reads.ended(load.request_id, now_ns, failed=not usable)
        sequence = load.sequence
        if sequence is None:
            return None
        if not load.claimed:
            self._let_go(sequence)
        if usable:
            sequence.computed = sequence.cached = load.tokens
            self._count("read_tokens", load.tokens - sequence.local)
            self._tables.name(sequence)
        else:
            self._tables.cut(sequence, sequence.local)
        sequence.stage = Stage.WAITING
        return sequence

    def give_up(self, sequence: Sequence) -> None:
        """A read has outlived its claim: the request starts over, in other blocks."""
        self._count("late_reads", 1)
        self.loads.orphan(sequence.request.request_id)
        self._tables.give_up(sequence)

    def leave(
        self, sequence: Sequence, reason: Reason, now_ns: int
    ) -> tuple[dict[str, object] | None, Handover | None]:
        """A request has ended: its account, and where its prompt waits for another engine."""
        request, turn = sequence.request, None
        if sequence.stage is Stage.LOADING:
            self.loads.orphan(request.request_id)
        if request.request_id in self.reads:
            turn = self.reads.leave(sequence, now_ns)
        if request.handover is not None and not sequence.tried_pull:
            self._let_go(sequence)
        if reason is Reason.ABORT or request.hop is not Hop.PREFILL:
            return turn, None
        return turn, self.handovers.hold(sequence, sequence.cached, now_ns)

    def check_integrity(self) -> None:
        """AssertionError where a part contradicts itself."""
        self.reads.check_integrity()
        self.handovers.check_integrity()

    def _fits(self, handover: Handover, request: Request) -> bool:
        """Whether a handover is of as many tokens and blocks as the prompt."""
        blocks = -(-len(request.text) // self._block_tokens)
        return handover.token_count == len(request.text) and len(handover.blocks) == blocks

    def _let_go(self, sequence: Sequence) -> None:
        """Tell prefill that its blocks are not needed any more."""
        handover = sequence.request.handover
        if handover is not None:
            self._emit(ReadDone(handover.engine_id, handover.address, handover.request_id))
