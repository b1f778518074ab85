"""What one prompt was made of: the account that goes back to the router with the engine's answer.

A prompt token is local (the engine's own prefix cache had it), returned (prefill read it back from decode, or
decode got it from prefill) or computed; the three add up to the prompt. Where prefill was returned nothing,
`reason` says why; `read_us` is how long its read took.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Turn:
    """One prompt; what the router shows and the usage reports. In tokens, but for the read's microseconds."""

    prompt_tokens: int
    local_tokens: int = 0
    returned_tokens: int = 0
    reason: str | None = None
    read_us: int = 0

    def report(self) -> dict[str, Any]:
        """As it stands in the answer's `kvloop_turn`."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "local_tokens": self.local_tokens,
            "returned_tokens": self.returned_tokens,
            "computed_tokens": self.prompt_tokens - self.local_tokens - self.returned_tokens,
            "reason": self.reason,
            "read_us": self.read_us,
        }
