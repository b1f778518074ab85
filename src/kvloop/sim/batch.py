"""Which requests go through the model together, step by step: continuous batching with chunked prefill.

As in vLLM's scheduler. A step has a budget of tokens. Requests that run come first, each with what it has
left or the rest of the budget; then waiting ones, first come first served, are let in while there are blocks.
What waits for another engine's answer or bytes is passed over. A running request that finds no block takes
those of the one that came last, which starts over (recompute preemption).

Decode steps between which nothing can happen are taken at once (`EngineConfig.max_bulk_steps`); if something
comes in between, the last of them is the one that has begun.
"""

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from kvloop.sim.config import EngineConfig
from kvloop.sim.memory import Memory
from kvloop.sim.pool import BlockPool
from kvloop.sim.profile import Profile
from kvloop.sim.request import Reason
from kvloop.sim.sequence import Sequence, Stage
from kvloop.sim.tables import BlockTables
from kvloop.sim.transfers import Transfers


class Host(Protocol):
    """What a batch needs of its engine."""

    config: EngineConfig
    profile: Profile
    memory: Memory
    pool: BlockPool
    tables: BlockTables
    transfers: Transfers

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter."""

    def starved(self, sequence: Sequence, missing: int) -> None:
        """A request waits for so many blocks, or has lost its own."""

    def sampled(self, sequence: Sequence, data: bytes) -> None:
        """Tokens of an answer."""

    def finish(self, sequence: Sequence, reason: Reason, now_ns: int) -> None:
        """A request has ended."""


@dataclass(slots=True)
class _Step:
    """`parts`: requests with the tokens that they compute. `times`: steps in a row, each `step_ns` long."""

    parts: list[tuple[Sequence, int]]
    begins_ns: int
    step_ns: int
    times: int = 1


class Batch:
    """The queue and the step under way of one engine."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._limits = host.profile.limits
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._step: _Step | None = None
        self._blocked: Sequence | None = None

    @property
    def ends_ns(self) -> int | None:
        """When the step under way ends, or None."""
        step = self._step
        return None if step is None else step.begins_ns + step.times * step.step_ns

    @property
    def counts(self) -> tuple[int, int]:
        """Requests running, and waiting."""
        return len(self._running), len(self._waiting)

    @property
    def is_starved(self) -> bool:
        """Whether a request waits for blocks."""
        return self._blocked is not None

    def add(self, sequence: Sequence) -> None:
        """A new request, behind all others."""
        self._waiting.append(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """One that has been let in before: it keeps its place among those that came after it."""
        later = (place for place, other in enumerate(self._waiting) if other.order > sequence.order)
        self._waiting.insert(next(later, len(self._waiting)), sequence)

    def drop(self, sequence: Sequence, now_ns: int) -> None:
        """Forget a request, wherever it is. A step that it is in goes on without it."""
        self._cut(now_ns)
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        if sequence in self._running:
            self._running.remove(sequence)
        if self._step is not None:
            self._step.parts = [part for part in self._step.parts if part[0] is not sequence]

    def kick(self, now_ns: int) -> None:
        """Something has changed: begin a step if none is under way, else let it be the last of its row."""
        if self._step is None:
            self._begin(now_ns)
        else:
            self._cut(now_ns)

    def end_step(self, now_ns: int) -> None:
        """The step under way is over: write down what it computed, and begin the next."""
        step, self._step = self._step, None
        assert step is not None
        host = self._host
        for sequence, count in step.parts:
            said = sequence.compute(host.memory, count, step.times)
            host.tables.name(sequence)
            if said:
                host.count("generated_tokens", step.times)
                host.sampled(sequence, said)
            reason = sequence.reason
            if reason is not None:
                self._running.remove(sequence)
                host.finish(sequence, reason, now_ns)
        host.count("steps", step.times)
        host.count("busy_ns", step.times * step.step_ns)
        self._begin(now_ns)

    def _begin(self, now_ns: int) -> None:
        """Put the next step together, if there is anything to do."""
        if not self._running and not self._waiting:
            self._blocked = None
            return
        while True:
            parts, budget, preempted = self._continue(now_ns)
            self._blocked = None
            if not preempted:
                self._admit(parts, budget, now_ns)
            if parts:
                break
            if not preempted and not self._unlock():
                return
        host = self._host
        step_ns = host.profile.step.takes_ns([(count, sequence.start) for sequence, count in parts])
        self._step = _Step(parts, now_ns, step_ns, self._times(parts, now_ns))

    def _continue(self, now_ns: int) -> tuple[list[tuple[Sequence, int]], int, bool]:
        """The parts of those that run, the budget that is left, and whether one had to give way."""
        budget, preempted, place = self._limits.batch_tokens, False, 0
        parts: list[tuple[Sequence, int]] = []
        while place < len(self._running) and budget:
            sequence = self._running[place]
            count = min(sequence.left, budget)
            while not self._host.tables.fit(sequence, sequence.start + count, now_ns):
                preempted = True
                if self._preempt_last(sequence, count) is sequence:
                    return parts, budget, preempted
            parts.append((sequence, count))
            budget -= count
            place += 1
        return parts, budget, preempted

    def _preempt_last(self, wanting: Sequence, count: int) -> Sequence:
        victim = self._running.pop()
        host = self._host
        host.count("preemptions")
        host.starved(victim, host.tables.missing(wanting, wanting.start + count))
        host.tables.give_up(victim)
        self.requeue(victim)
        return victim

    def _admit(self, parts: list[tuple[Sequence, int]], budget: int, now_ns: int) -> None:
        passed_over: list[Sequence] = []
        while self._waiting and budget and len(self._running) < self._limits.running:
            sequence = self._waiting.popleft()
            is_new = not sequence.blocks
            if is_new and not self._look_up(sequence, now_ns):
                passed_over.append(sequence)
                if sequence is self._blocked:
                    break
                continue
            if sequence.stage is Stage.LOADING:
                continue
            count = min(sequence.left, budget)
            if not self._host.tables.fit(sequence, sequence.start + count, now_ns):
                self._block(sequence, sequence.start + count)
                if is_new:
                    self._host.tables.give_up(sequence)
                passed_over.append(sequence)
                break
            sequence.stage = Stage.RUNNING
            self._running.append(sequence)
            parts.append((sequence, count))
            budget -= count
        self._waiting.extendleft(reversed(passed_over))

    def _look_up(self, sequence: Sequence, now_ns: int) -> bool:
        """Take what is cached here, and begin to read what another engine has. False: not now."""
        host = self._host
        found = host.tables.cached(sequence)
        local = len(found) * self._limits.block_tokens
        wanted = host.transfers.wanted(sequence, local, now_ns)
        if wanted is None:
            return False
        host.tables.begin(sequence, found)
        host.count("local_tokens", local)
        host.count("queried_tokens", len(sequence.text) - local)
        if wanted and not host.tables.fit(sequence, local + wanted, now_ns):
            self._block(sequence, local + wanted)
            host.tables.give_up(sequence)
            return False
        if wanted:
            host.transfers.begin(sequence, now_ns)
        return True

    def _block(self, sequence: Sequence, tokens: int) -> None:
        self._blocked = sequence
        self._host.starved(sequence, self._host.tables.missing(sequence, tokens))

    def _unlock(self) -> bool:
        """Nobody runs, and the first in the queue does not fit: another that holds blocks starts over."""
        if self._blocked is None:
            return False
        holders = [one for one in self._waiting if one.blocks and one is not self._blocked]
        if holders:
            self._host.count("preemptions")
            self._host.tables.give_up(holders[-1])
        return bool(holders)

    def _times(self, parts: list[tuple[Sequence, int]], now_ns: int) -> int:
        """How many steps can be taken at once: all of them decode steps, and blocks for each."""
        host, most = self._host, self._host.config.max_bulk_steps
        if most == 1 or len(parts) < len(self._running) or any(one.left != 1 for one, _ in parts):
            return 1
        times = min(most, *[sequence.steps_left() for sequence, _ in parts])
        missing = sum([max(0, host.tables.missing(one, one.start + times)) for one, _ in parts])
        if missing > host.pool.free_count:
            return 1
        for sequence, _ in parts:
            host.tables.fit(sequence, sequence.start + times, now_ns)
        return times

    def _cut(self, now_ns: int) -> None:
        step = self._step
        if step is not None and step.times > 1 and step.step_ns:
            begun = (now_ns - step.begins_ns) // step.step_ns + 1
            step.times = max(1, min(step.times, begun))
