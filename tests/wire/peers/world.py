"""True time, what chance decides, and the link."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from kvloop.core.chain import Chain, Identity, build_chain, root_digest

KEY = bytes(range(32))
MS = 1_000_000
BLOCK_TOKENS, BLOCKS = 16, 60
TTL, TERM, CLAIM_TERM = 200 * MS, 60 * MS, 40 * MS
REPLY_TIMEOUT, MARGIN, POLL, MAX_WATCH = 10 * MS, 4 * MS, 2 * MS, 12 * MS
MAX_SLOW_PPM = 50_000  # a prefill clock that loses 5 %: 2 ms in a claim's term, half the margin
QUESTIONS, MAX_THINK = 2, 40 * MS
ANSWER_WITHIN = QUESTIONS * (CLAIM_TERM + MAX_THINK) + POLL + MAX_WATCH
MAX_RUN = 10_000 * MS


@dataclass(frozen=True)
class Turn:
    """A request: when, on which lease's handle, how its prompt differs, how long it waits for its turn, and
    how often there is no room for it then, how long it reads, and how often the engine looks whether it is
    overdue."""

    at_ms: int
    lease: int
    edit: str
    think_ms: int
    read_ms: int
    read_fails: bool
    watch_ms: int
    abort_after_ms: int | None
    request_id: str
    misses: int = 1


@dataclass(frozen=True)
class Schedule:
    """Everything that chance decides. `fates`: of each frame, the delays of its copies; () is lost."""

    fates: list[tuple[int, ...]]
    corrupt: set[int]
    turns: list[Turn]
    acts: list[tuple[int, str, int]]
    slow_ppm: int
    prefill_offset_ns: int
    wall_offset_ms: int


def chain_of(tenant: str, tokens: list[int]) -> Chain:
    """The chain over a tenant's tokens."""
    return build_chain(KEY, root_digest(KEY, Identity("m", "", "", "", tenant)), tokens)


class World:
    """True time, the events to come, and the link."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.now = 0
        self.frames = 0
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._sequence = 0

    def at(self, when: int, action: Callable[[], None]) -> None:
        """Let `action` happen at `when`, after what was already set for then."""
        self._sequence += 1
        heapq.heappush(self._events, (max(when, self.now), self._sequence, action))

    def run(self, after_each: Callable[[], None]) -> None:
        """Until nothing is left to happen."""
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            assert self.now < MAX_RUN, "somebody waits for ever"
            action()
            after_each()

    def nonce(self) -> bytes:
        """A new one each time."""
        self._sequence += 1
        return self._sequence.to_bytes(16)

    def send(self, frame: bytes, receive: Callable[[bytes], None]) -> None:
        """Lose, delay, duplicate, corrupt; when the schedule is used up the link is healed."""
        number, self.frames = self.frames, self.frames + 1
        fates = self.schedule.fates
        if number in self.schedule.corrupt:
            frame = frame[:-1] + bytes((frame[-1] ^ 1,))
        for delay_ms in fates[number] if number < len(fates) else (1,):
            self.at(self.now + delay_ms * MS, lambda: receive(frame))
