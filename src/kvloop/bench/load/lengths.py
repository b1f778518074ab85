"""Prompts by their length, in buckets that double: from 512 tokens to 1,023, from there to 2,047, and so on.

1k is 1,024 tokens. What is shorter than the first bucket is one bucket of its own.
"""

from kvloop.bench.load.record import Request
from kvloop.bench.load.spread import told
from kvloop.bench.scale import tokens_text

SHORTEST = 512


def length_of(request: Request) -> float | None:
    """The prompt's length: as the endpoint counted it, else as it was planned."""
    counted = told(request.prompt_tokens)
    return told(request.planned_tokens) if counted is None else counted


def bucket_of(tokens: float) -> int:
    """The bucket's shortest length, which names it; 0 for what is below the first."""
    return 0 if tokens < SHORTEST else 1 << (int(tokens).bit_length() - 1)


def bucket_text(bucket: int) -> str:
    """From where to where it goes."""
    if bucket == 0:
        return f"below {tokens_text(SHORTEST)}"
    return f"{tokens_text(bucket)}-{tokens_text(2 * bucket)}"
