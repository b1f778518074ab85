"""A request while an engine works on it: its tokens so far, its block table, and how far both have come."""

from dataclasses import dataclass, field
from enum import StrEnum

from kvloop.sim.answer import STOP_TOKEN, answer_tokens, natural_tokens
from kvloop.sim.memory import Memory
from kvloop.sim.request import Reason, Request
from kvloop.sim.text import TOKEN_BYTES, Text, mixed


class Stage(StrEnum):
    """Where a request stands in its engine."""

    WAITING = "waiting"
    LOADING = "loading"  # its blocks are being read from another engine
    RUNNING = "running"


@dataclass(slots=True, eq=False)
class Sequence:
    """`computed`: tokens whose KV its blocks hold, as far as the engine knows; `cached`: those it had not to
    compute; `local`: those that its own prefix cache had.

    `seed` and `ends_at` are known once the prompt has been computed. `tried_pull`: a handover is pulled once.
    """

    request: Request
    text: Text
    order: int
    stage: Stage = Stage.WAITING
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    local: int = 0
    cached: int = 0
    named_blocks: int = 0  # blocks that the prefix cache knows
    sampled: int = 0
    seed: int | None = None
    ends_at: int = 0
    tried_pull: bool = False
    wrong: bool = False
    own_text: bool = False

    @property
    def start(self) -> int:
        """The first token that the next step computes: the last one again, where all are there."""
        last = self.text.count - 1
        return self.computed if self.computed < last else last

    @property
    def left(self) -> int:
        """Tokens that have to be computed before the next one can be sampled."""
        return self.text.count - self.start

    @property
    def reason(self) -> Reason | None:
        """Why it has ended, or None."""
        if self.seed is None or self.sampled < min(self.ends_at, self.request.max_tokens):
            return None
        return Reason.STOP if self.ends_at <= self.request.max_tokens else Reason.LENGTH

    def steps_left(self) -> int:
        """Tokens that are still to be sampled, as far as is known."""
        return 1 if self.seed is None else min(self.ends_at, self.request.max_tokens) - self.sampled

    def compute(self, memory: Memory, count: int, steps: int) -> bytes:
        """Compute `count` tokens, and `steps` - 1 more one by one; what was sampled at the text's end."""
        start = self.start
        samples = start + count == len(self.text)
        seen = memory.seen(self.text, self.blocks, self.computed)
        self.wrong = self.wrong or bool(seen)
        said = self._sample(seen, steps) if samples else b""
        memory.compute(self.text, self.blocks, start, start + count + steps - 1, seen)
        self.computed = start + count + steps - 1
        return said

    def _sample(self, seen: int, steps: int) -> bytes:
        if self.seed is None:
            self.seed = self.text.seed()
            self.ends_at = self.request.ends_at or natural_tokens(self.seed)
        if seen:
            self.seed = mixed(self.seed, seen)
        said = answer_tokens(self.seed, self.sampled, self.sampled + steps)
        self.sampled += steps
        if self.sampled == self.ends_at:
            said = said[:-TOKEN_BYTES] + STOP_TOKEN
        if not self.own_text:
            self.text, self.own_text = self.text.copy(), True
        self.text.append(said)
        return said

    def restart(self) -> list[int]:
        """Begin anew, with nothing computed. Returns the blocks, which are not the request's any more."""
        blocks, self.blocks = self.blocks, []
        self.computed = self.local = self.cached = self.named_blocks = 0
        self.stage = Stage.WAITING
        return blocks
