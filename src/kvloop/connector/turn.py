"""What one prefill turn reused: the account that goes back to the router with the prefill's answer.

A prompt token is local (prefill's own prefix cache had it), returned (read back from decode) or computed;
the three add up to the prompt. Where nothing was returned, `reason` says why.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Turn:
    """What one prefill turn reused; what the router shows and the usage reports. All in tokens."""

    prompt_tokens: int
    local_tokens: int = 0
    returned_tokens: int = 0
    reason: str | None = None

    def report(self) -> dict[str, Any]:
        """As it stands in the prefill answer's `kvloop_turn`."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "local_tokens": self.local_tokens,
            "returned_tokens": self.returned_tokens,
            "computed_tokens": self.prompt_tokens - self.local_tokens - self.returned_tokens,
            "reason": self.reason,
        }
