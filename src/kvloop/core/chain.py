"""Which tokens a stretch of KV was computed for, in 16 bytes per 64 tokens.

The KV of a position depends on every token before it and on whatever else went into the forward pass:
model, weights, KV layout, LoRA, multimodal inputs. So the tokens are cut into segments of 64 and chained:

    d[-1] = root                                        everything that is not a token (`Identity`)
    d[i]  = BLAKE2b(d[i-1] || tokens as little-endian u32, key, 16 bytes)

Equal d[i] prove, up to a collision of a keyed 128-bit digest, that everything up to and including
segment i is equal. What is left over after the last whole segment has a digest of its own, the tail: a
conversation that goes on exactly where it ended matches to the token, anything else to a whole segment.
A multimodal item enters the segment in which its placeholder starts. Nobody without the key can make a
digest, so nobody can have KV matched that was not computed for his tokens.
"""

import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kvloop.core.key import MEDIA_PURPOSE, ROOT_PURPOSE, checked_key, keyed_digest
from kvloop.errors import ProtocolError

SEGMENT_TOKENS = 64
DIGEST_BYTES = 16
MAX_CHAIN_TOKENS = 1 << 22  # four times the longest context in use (1M); its chain is 1 MiB
_TOKEN_BYTES = 4
_SEGMENT_BYTES = SEGMENT_TOKENS * _TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Identity:
    """All that KV depends on besides tokens and multimodal items.

    `kv_layout` names dtype, block layout and its version; `salt` is the tenant's cache salt. Each may be
    empty; none may be left out.
    """

    model: str
    revision: str
    kv_layout: str
    lora: str
    salt: str


@dataclass(frozen=True, slots=True)
class MediaItem:
    """A multimodal input: the token index at which its placeholder starts, and its content's digest."""

    start_token: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Chain:
    """The digests of `token_count` tokens.

    root: 16 bytes. segments: 16 bytes for each whole segment, concatenated. tail: 16 bytes if tokens are
    left over after the last whole segment, else empty. Lengths that disagree raise ProtocolError, for a
    peer supplies them.
    """

    root: bytes
    segments: bytes
    tail: bytes
    token_count: int

    def __post_init__(self) -> None:
        if not 0 <= self.token_count <= MAX_CHAIN_TOKENS:
            raise ProtocolError("token_count", f"not within 0 to {MAX_CHAIN_TOKENS}")
        whole, left = divmod(self.token_count, SEGMENT_TOKENS)
        if len(self.root) != DIGEST_BYTES:
            raise ProtocolError("root", f"{len(self.root)} bytes, not {DIGEST_BYTES}")
        if len(self.segments) != whole * DIGEST_BYTES:
            raise ProtocolError("segments", f"{len(self.segments)} bytes for {whole} whole segments")
        if len(self.tail) != (DIGEST_BYTES if left else 0):
            raise ProtocolError("tail", f"{len(self.tail)} bytes for {left} tokens left over")


def root_digest(key: bytes, identity: Identity) -> bytes:
    """The chain's first link, 16 bytes. Every field goes in behind its length: none can run into the next."""
    fields = (identity.model, identity.revision, identity.kv_layout, identity.lora, identity.salt)
    encoded = [field.encode() for field in fields]
    return keyed_digest(key, ROOT_PURPOSE, *(struct.pack("<I", len(field)) + field for field in encoded))


def build_chain(key: bytes, root: bytes, tokens: Sequence[int], media: Sequence[MediaItem] = ()) -> Chain:
    """The chain over `tokens` (each 0 to 2**32 - 1, else OverflowError).

    Items that start at or after the last token do not count: no KV of these tokens depends on them.
    10,000 tokens take well under 2 ms.
    """
    checked_key(key)
    token_bytes = _little_endian(tokens)
    by_segment = _media_by_segment(media, len(tokens))
    digests = []
    previous, blake2b = root, hashlib.blake2b
    for start in range(0, len(token_bytes), _SEGMENT_BYTES):
        link = token_bytes[start : start + _SEGMENT_BYTES]
        items = by_segment.get(start // _SEGMENT_BYTES) if by_segment else None
        if items is None:
            previous = blake2b(previous + link, key=key, digest_size=DIGEST_BYTES).digest()
        else:
            previous = _media_link(key, previous, link, items)
        digests.append(previous)
    tail = digests.pop() if len(tokens) % SEGMENT_TOKENS else b""
    return Chain(root, b"".join(digests), tail, len(tokens))


def matched_tokens(held: Chain, wanted: Chain) -> int:
    """How many tokens from the start are proven equal.

    All of `held` when `wanted` was built over at least as many tokens and agrees to the token (for the
    tails to compare, the caller builds `wanted` over the first `held.token_count` tokens of its prompt);
    else up to the last equal whole segment. 0 if the roots differ.
    """
    if held.root != wanted.root:
        return 0
    equal_bytes = _common_prefix_bytes(held.segments, wanted.segments)
    matched = equal_bytes // DIGEST_BYTES * SEGMENT_TOKENS
    whole_tokens = len(held.segments) // DIGEST_BYTES * SEGMENT_TOKENS
    if matched == whole_tokens and held.token_count == wanted.token_count and held.tail == wanted.tail:
        return held.token_count
    return matched


def cut_chain(chain: Chain, tokens: int) -> Chain:
    """The chain over the first `tokens` tokens: whole segments, or all of them; else ValueError."""
    if tokens == chain.token_count:
        return chain
    if not 0 <= tokens < chain.token_count or tokens % SEGMENT_TOKENS:
        raise ValueError(f"a chain over {chain.token_count} tokens cannot be cut to {tokens}")
    return Chain(chain.root, chain.segments[: tokens // SEGMENT_TOKENS * DIGEST_BYTES], b"", tokens)


def _common_prefix_bytes(left: bytes, right: bytes) -> int:
    """The length of the common prefix: the first differing byte is the highest set bit of the difference."""
    length = min(len(left), len(right))
    difference = int.from_bytes(left[:length]) ^ int.from_bytes(right[:length])
    return length - (difference.bit_length() + 7) // 8


def _little_endian(tokens: Sequence[int]) -> bytes:
    if isinstance(tokens, array) and tokens.typecode == "I" and sys.byteorder == "little":
        return tokens.tobytes()  # packed already: not to be looked at one by one
    numbers = array("I", tokens)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def _media_by_segment(media: Sequence[MediaItem], token_count: int) -> dict[int, list[MediaItem]]:
    by_segment: dict[int, list[MediaItem]] = {}
    for item in sorted(media, key=lambda item: item.start_token):
        if item.start_token < 0:
            raise ValueError(f"a multimodal item starts at token {item.start_token}")
        if item.start_token < token_count:
            by_segment.setdefault(item.start_token // SEGMENT_TOKENS, []).append(item)
    return by_segment


def _media_link(key: bytes, previous: bytes, link: bytes, items: list[MediaItem]) -> bytes:
    """A segment with items: its own purpose, so that an item's bytes can never pass for tokens."""
    parts = [previous, struct.pack("<I", len(link)), link]
    for item in items:
        parts += (struct.pack("<II", item.start_token % SEGMENT_TOKENS, len(item.digest)), item.digest)
    return keyed_digest(key, MEDIA_PURPOSE, *parts)
