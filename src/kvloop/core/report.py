"""What an engine did with a prompt, token for token.

The counts go into headers that clients are billed by and into metrics that operators decide by, so they are
whole or not there: counts that are no counts, or that do not add up to the prompt, make no report.
"""

from dataclasses import dataclass

from kvloop.core.chain import MAX_CHAIN_TOKENS

MAX_READ_US = 3_600_000_000  # an hour


@dataclass(frozen=True, slots=True)
class TurnReport:
    """Tokens of one prompt by where their KV came from: the engine's own cache, another engine, or its own
    work. Another engine: for prefill the one that it read back from, for decode the one that handed over.

    `reason` says why nothing was returned, `read_us` how long the read took, 0 where that is not said.
    ValueError for what cannot be.
    """

    prompt_tokens: int
    local_tokens: int
    returned_tokens: int
    computed_tokens: int
    reason: str | None = None
    read_us: int = 0

    def __post_init__(self) -> None:
        parts = (self.local_tokens, self.returned_tokens, self.computed_tokens)
        if min(parts) < 0 or sum(parts) != self.prompt_tokens or self.prompt_tokens > MAX_CHAIN_TOKENS:
            raise ValueError("the counts do not add up to a prompt")
        if not 0 <= self.read_us <= MAX_READ_US:
            raise ValueError("no read takes so long")

    @property
    def cached_tokens(self) -> int:
        """Tokens that were not computed."""
        return self.local_tokens + self.returned_tokens
