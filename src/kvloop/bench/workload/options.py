"""What a user may change about a recording: how long, how fast, how much of it."""

import math
from dataclasses import dataclass

from kvloop.core.chain import MAX_CHAIN_TOKENS
from kvloop.errors import UserError

MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class RecordingOptions:
    """Lengths are divided by `scale`, gaps and starts multiplied by `time_scale`. A conversation ends before
    its first prompt of more than `max_prompt_tokens`; of those that have a turn, `conversations` are taken,
    evenly spread. `block_tokens` is that of formats which do not name it, `seed` for those that draw."""

    scale: float = 1.0
    time_scale: float = 1.0
    max_prompt_tokens: int | None = None
    conversations: int | None = None
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    seed: int = 0

    def __post_init__(self) -> None:
        """UserError that names what cannot be."""
        if not 0.001 <= self.scale <= MAX_CHAIN_TOKENS:
            raise UserError(f"a scale of {self.scale:g} is out of range")
        if not 0 <= self.time_scale <= 1000:
            raise UserError(f"a time scale of {self.time_scale:g} is out of range")
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise UserError(f"prompts of at most {self.max_prompt_tokens} tokens are none")
        if self.conversations is not None and self.conversations < 1:
            raise UserError(f"{self.conversations} conversations are no workload")
        if not 1 <= self.block_tokens <= MAX_CHAIN_TOKENS:
            raise UserError(f"blocks of {self.block_tokens} tokens are out of range")

    def tokens(self, recorded: int) -> int:
        """A length, scaled. Never falls where `recorded` rises, and what was something stays so."""
        return recorded if self.scale == 1 else max(min(1, recorded), math.floor(recorded / self.scale))

    def fits(self, prompt_tokens: int) -> bool:
        """Whether a prompt of so many (scaled) tokens is not too long."""
        return self.max_prompt_tokens is None or prompt_tokens <= self.max_prompt_tokens

    def share_of(self, count: int) -> list[int]:
        """The numbers of those that are taken of `count`."""
        wanted = count if self.conversations is None else min(count, self.conversations)
        return [number * count // wanted for number in range(wanted)]

    def words(self) -> str:
        """What differs from the recording, to be read behind its name."""
        parts = []
        if self.scale != 1:
            parts.append(f"lengths / {self.scale:g}")
        if self.time_scale != 1:
            parts.append(f"times x {self.time_scale:g}")
        if self.max_prompt_tokens is not None:
            parts.append(f"prompts up to {self.max_prompt_tokens} tokens")
        return "".join(f", {part}" for part in parts)
