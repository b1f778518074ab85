"""Keyed digests, one key, several purposes.

Everything that kvloop proves or authenticates is BLAKE2b (RFC 7693) under one deployment secret. The
algorithm's personalisation field keeps the purposes apart: a digest made for one of them is worth
nothing for another, whatever bytes went in. An empty key would silently be no key, so it is refused.
"""

import hashlib

from kvloop.errors import UserError

KEY_MIN_BYTES = 16  # 128 bits: below that the key, not BLAKE2b, would be the weakest part
KEY_MAX_BYTES = 64  # BLAKE2b's own limit
MAC_BYTES = 16
DERIVED_KEY_BYTES = 32

ROOT_PURPOSE = b"kvloop.root"
MEDIA_PURPOSE = b"kvloop.media"
HANDLE_PURPOSE = b"kvloop.handle"
FRAME_PURPOSE = b"kvloop.frame"
CURVE_PURPOSE = b"kvloop.curve"


def checked_key(key: bytes) -> bytes:
    """`key` itself, if it is 16 to 64 bytes long; else UserError."""
    if not KEY_MIN_BYTES <= len(key) <= KEY_MAX_BYTES:
        raise UserError(
            f"the deployment key has {len(key)} bytes; it must have {KEY_MIN_BYTES} to {KEY_MAX_BYTES}"
        )
    return key


def keyed_digest(key: bytes, purpose: bytes, *parts: bytes) -> bytes:
    """16 bytes of BLAKE2b over the parts' concatenation: their boundaries are the caller's to mark."""
    digest = hashlib.blake2b(key=checked_key(key), digest_size=MAC_BYTES, person=purpose)
    for part in parts:
        digest.update(part)
    return digest.digest()


def derived_key(key: bytes, purpose: bytes) -> bytes:
    """32 bytes that only holders of `key` can make: the key of something else."""
    return hashlib.blake2b(key=checked_key(key), digest_size=DERIVED_KEY_BYTES, person=purpose).digest()
