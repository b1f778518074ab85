"""What readers rely on: blocks that stay as they are, and bytes that come too late and touch nothing; and
what others rely on of them: that they come to an end of asking.
"""

from collections import Counter
from dataclasses import dataclass

from kvloop.sim.config import NS_PER_MS
from kvloop.sim.fleet.watch import Act, Asking, Checker, End, Grant, Reading, Service
from kvloop.wire.control import Release

MAX_QUESTIONS = 8


@dataclass(slots=True)
class _Held:
    """A claim: on which process, which blocks, what they held when it was granted, and until when."""

    incarnation: str | None
    blocks: tuple[int, ...]
    contents: list[int]
    deadline_ns: int


class ReadersHoldClaims(Checker):
    """Blocks under a claim are neither freed nor rewritten until it is released or its deadline has passed;
    and what a read brought after that is not used.
    """

    def __init__(self) -> None:
        self._claims: dict[str, dict[str, _Held]] = {}
        self._good: set[tuple[str, str]] = set()  # requests whose read ended under its claim

    def granted(self, grant: Grant) -> None:
        """Note what is lent."""
        node, answer = grant.node, grant.answer
        assert node.engine is not None
        blocks = tuple(answer.block_ids[0])
        deadline_ns = node.now_ns() + answer.term_ms * NS_PER_MS
        held = _Held(node.incarnation, blocks, node.engine.memory.read(blocks), deadline_ns)
        self._claims.setdefault(node.name, {})[answer.claim_id] = held

    def served(self, service: Service) -> None:
        """A released claim holds nothing."""
        if isinstance(service.message, Release):
            self._claims.get(service.node.name, {}).pop(service.message.claim_id, None)

    def acted(self, act: Act) -> None:
        """Nothing that is lent has changed hands or contents."""
        node = act.node
        claims, engine = self._claims.get(node.name), node.engine
        if not claims or engine is None:
            return
        now_ns = node.now_ns()
        for claim_id, held in list(claims.items()):
            if held.incarnation != node.incarnation or now_ns >= held.deadline_ns:
                del claims[claim_id]
            elif engine.memory.read(held.blocks) != held.contents:
                self.fail(f"blocks under claim {claim_id} were rewritten on {node.name}")
            elif not all(engine.pool.is_held(block) for block in held.blocks):
                self.fail(f"blocks under claim {claim_id} were freed on {node.name}")

    def read_landed(self, reading: Reading) -> None:
        """Whether the claim still was."""
        node, read = reading.node, reading.read
        source = node.around.engines.get(read.engine_id)
        if not read.claim_id or source is None or reading.contents is None:
            return
        held = self._claims.get(source.name, {}).get(read.claim_id)
        if held is not None and held.incarnation == source.incarnation and source.now_ns() < held.deadline_ns:
            self._good.add((node.name, read.reader))

    def finished(self, end: End) -> None:
        """What was used had come in time."""
        key = (end.node.name, end.event.request_id)
        if end.event.turn is not None and end.event.turn["returned_tokens"] and key not in self._good:
            self.fail(f"{end.event.request_id} used a read that outlived its claim")
        self._good.discard(key)


class LateReadsAreFenced(Checker):
    """Blocks that a late read may still write to are used for nothing until it has ended."""

    def read_landed(self, reading: Reading) -> None:
        """The bytes land in blocks that are the read's own, or its request's."""
        engine, read = reading.node.engine, reading.read
        if engine is None or reading.contents is None:
            return
        targets = engine.transfers.loads.targets(read.read_id)
        for owner, blocks in engine.holdings():
            if owner != read.reader and not targets.isdisjoint(blocks):
                self.fail(f"{read.read_id} of {read.reader} landed on blocks of {owner}")


class QuestionsEnd(Checker):
    """A request whose claim is over before its read has begun asks again, a few times; and never once it has
    begun to read, however that ends.
    """

    def __init__(self) -> None:
        self._asked: Counter[tuple[str | None, str]] = Counter()
        self._began: set[tuple[str | None, str]] = set()

    def claimed(self, asking: Asking) -> None:
        """It may ask, and not too often."""
        key = (asking.node.incarnation, asking.request_id)
        self._asked[key] += 1
        if self._asked[key] > MAX_QUESTIONS:
            self.fail(f"{asking.request_id} asks {self._asked[key]} times")
        if key in self._began:
            self.fail(f"{asking.request_id} asks after its read has begun")

    def read_began(self, reading: Reading) -> None:
        """It has what it asked for."""
        if reading.read.claim_id:
            self._began.add((reading.node.incarnation, reading.read.reader))

    def finished(self, end: End) -> None:
        """It asks nobody any more."""
        key, turn = (end.node.incarnation, end.event.request_id), end.event.turn
        asked = self._asked.pop(key, 0)
        is_too_late = turn is not None and turn["reason"] == "deadline"
        if is_too_late and asked < MAX_QUESTIONS and key not in self._began:
            self.fail(f"{end.event.request_id} does not ask again")
        self._began.discard(key)
