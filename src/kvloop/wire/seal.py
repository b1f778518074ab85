"""Control frames: who said it, when, once, and unaltered.

    0   version       1 byte
    1   mac          16 bytes, keyed BLAKE2b over the version and everything that follows the mac
    17  sent          8 bytes, the sender's wall clock, ms since 1970, big-endian
    25  nonce        16 bytes, drawn anew for each frame
    41  reply flag    1 byte: 1 if the nonce of the question that this answers follows (16 bytes), else 0
    ..  sender        1 byte of length, then so many ASCII bytes
    ..  body          the message (`wire.control`)

A frame is measured, authenticated, dated and compared with those seen before, in this order, and only then is
its body looked at: whoever has not the key reaches no parser but this one.
"""

import hmac
import struct
from dataclasses import dataclass

from kvloop.core.key import CURVE_PURPOSE, FRAME_PURPOSE, MAC_BYTES, checked_key, derived_key, keyed_digest
from kvloop.errors import FrameForgedError, FrameMalformedError, FrameOversizeError, FrameVersionError
from kvloop.wire.control import Message, decode_message, encode_message
from kvloop.wire.replay import ReplayGuard

FRAME_VERSION = 1
NONCE_BYTES = 16
SENDER_MAX_BYTES = 128
MAX_FRAME_BYTES = 4 << 20  # a claim on 4 million tokens is 1 MiB; a grant of as many in blocks of 16, 1.3 MiB
MAX_SKEW_MS = 30_000
REPLAY_WINDOW = 1 << 16  # frames; twice the skew at 1,000 frames a second

_HEAD = struct.Struct(f">Q{NONCE_BYTES}sB")
_SEALED_FROM = 1 + MAC_BYTES


@dataclass(frozen=True, slots=True)
class Opened:
    """An authentic, fresh frame. `reply_to` is the nonce of the question that it answers, or empty."""

    sender: str
    message: Message
    nonce: bytes
    reply_to: bytes


class Seal:
    """Seals one sender's frames, and opens everybody's. Not thread-safe."""

    def __init__(
        self,
        key: bytes,
        sender: str,
        *,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        max_skew_ms: int = MAX_SKEW_MS,
        replay_window: int = REPLAY_WINDOW,
    ) -> None:
        """UserError for a key of the wrong length, ValueError for a sender not 1 to 128 printable ASCII."""
        self._key = checked_key(key)
        if not _is_sender(sender.encode()):
            raise ValueError(f"a sender is 1 to {SENDER_MAX_BYTES} printable ASCII bytes")
        self._sender = sender.encode()
        self._max_frame_bytes = max_frame_bytes
        self._guard = ReplayGuard(max_skew_ms, replay_window)

    def transport_secret(self) -> bytes:
        """32 bytes that only holders of the key can make, for the keys of the transport under the frames."""
        return derived_key(self._key, CURVE_PURPOSE)

    def seal(self, message: Message, now_ms: int, nonce: bytes, reply_to: bytes = b"") -> bytes:
        """The frame. `nonce`: 16 random bytes, never used before. FrameOversizeError if it is too long."""
        if len(nonce) != NONCE_BYTES or len(reply_to) not in (0, NONCE_BYTES):
            raise ValueError(f"a nonce has {NONCE_BYTES} bytes")
        head = _HEAD.pack(now_ms, nonce, bool(reply_to))
        sender = bytes((len(self._sender),)) + self._sender
        sealed = b"".join((head, reply_to, sender, encode_message(message)))
        version = bytes((FRAME_VERSION,))
        if _SEALED_FROM + len(sealed) > self._max_frame_bytes:
            raise FrameOversizeError(f"{_SEALED_FROM + len(sealed)} bytes")
        return version + keyed_digest(self._key, FRAME_PURPOSE, version, sealed) + sealed

    def open(self, frame: bytes, now_ms: int, elapsed_ms: int | None = None) -> Opened:
        """What the frame says. Whatever the bytes, nothing but a WireError is raised.

        `elapsed_ms`: of a clock that is never set, where there is one beside the wall clock.
        """
        if len(frame) > self._max_frame_bytes:
            raise FrameOversizeError(f"{len(frame)} bytes")
        if len(frame) < _SEALED_FROM + _HEAD.size:
            raise FrameMalformedError("too short")
        if frame[0] != FRAME_VERSION:
            raise FrameVersionError(str(frame[0]))
        mac, sealed = frame[1:_SEALED_FROM], frame[_SEALED_FROM:]
        if not hmac.compare_digest(mac, keyed_digest(self._key, FRAME_PURPOSE, frame[:1], sealed)):
            raise FrameForgedError
        sent_ms, nonce, reply_flag = _HEAD.unpack_from(sealed)
        rest = sealed[_HEAD.size :]
        reply_to, rest = _cut(rest, NONCE_BYTES) if reply_flag else (b"", rest)
        length, rest = _cut(rest, 1)
        sender, body = _cut(rest, length[0])
        if reply_flag > 1 or not _is_sender(sender):
            raise FrameMalformedError("reply flag or sender")
        name = sender.decode("ascii")
        self._guard.admit(name, nonce, sent_ms, now_ms, elapsed_ms)
        return Opened(name, decode_message(body), nonce, reply_to)


def _cut(data: bytes, length: int) -> tuple[bytes, bytes]:
    if len(data) < length:
        raise FrameMalformedError("cut off")
    return data[:length], data[length:]


def _is_sender(sender: bytes) -> bool:
    return 0 < len(sender) <= SENDER_MAX_BYTES and all(0x20 < byte < 0x7F for byte in sender)
