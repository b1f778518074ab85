"""What a simulated model says: a function of the memory it read, and of nothing else.

The answer is the output of a keyed generator (BLAKE2b in counter mode) whose seed is a digest of what
attention saw. Equal KV gives equal answers, however the work was cut into steps and wherever the KV came
from; KV of any other tokens gives another answer from the first token on.
"""

import hashlib
from functools import lru_cache

from kvloop.sim.text import STATE_BYTES, TOKEN_BYTES

SHORTEST_TOKENS = 24
SPREAD_TOKENS = 200  # an answer that is not cut off has 24 to 223 tokens
STOP_TOKEN = b"<|/>"
MAX_REMEMBERED = 4096  # blocks of 64 bytes: those of answers that are being given
_TOKENS_PER_DIGEST = hashlib.blake2b.MAX_DIGEST_SIZE // TOKEN_BYTES
_LETTERS = bytes(b" abcdefghiklmnoprstuvwe ai ou ten "[number % 34] for number in range(256))


def natural_tokens(seed: int) -> int:
    """How many tokens the model says before it stops, the stop token among them."""
    return SHORTEST_TOKENS + (seed >> 8) % SPREAD_TOKENS


@lru_cache(MAX_REMEMBERED)
def _letters(key: bytes, number: int) -> bytes:
    """One block of the generator's output: asked for by whoever says a part of it, and who expects it."""
    return hashlib.blake2b(number.to_bytes(8), key=key).digest().translate(_LETTERS)


def answer_tokens(seed: int, start: int, end: int) -> bytes:
    """The answer's tokens from `start` up to `end`, four letters each, and never the stop token."""
    first, last = start // _TOKENS_PER_DIGEST, -(-end // _TOKENS_PER_DIGEST)
    key = seed.to_bytes(STATE_BYTES)
    said = b"".join([_letters(key, number) for number in range(first, last)])
    skipped = first * _TOKENS_PER_DIGEST
    return said[(start - skipped) * TOKEN_BYTES : (end - skipped) * TOKEN_BYTES]
