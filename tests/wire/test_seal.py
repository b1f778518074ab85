"""Sealed frames: who, when, once, unaltered; and whatever comes in, nothing but a WireError comes out."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloop.core.key import FRAME_PURPOSE, keyed_digest
from kvloop.errors import (
    FrameForgedError,
    FrameMalformedError,
    FrameOversizeError,
    FrameReplayedError,
    FrameSkewedError,
    FrameVersionError,
    MessageInvalidError,
    MessageUnknownError,
    UserError,
    WireError,
)
from kvloop.wire.control import Failed, Release, Stat
from kvloop.wire.seal import MAX_SKEW_MS, Opened, Seal

KEY = bytes(range(32))
NONCE, QUESTION = bytes(range(16)), bytes(range(16, 32))
NOW_MS = 1_780_000_000_000
VECTORS = json.loads((Path(__file__).parent.parent / "vectors" / "frames.json").read_text())
quick = settings(deadline=None, max_examples=300)


def sealed(reply_to: bytes = b"", nonce: bytes = NONCE) -> bytes:
    """A frame that prefill sealed just now."""
    return Seal(KEY, "prefill-0").seal(Release("c"), NOW_MS, nonce, reply_to)


def authentic(rest: bytes) -> bytes:
    """Any bytes after the mac, authenticated with the right key."""
    return b"\x01" + keyed_digest(KEY, FRAME_PURPOSE, b"\x01", rest) + rest


def head(reply_flag: int = 0, sent_ms: int = NOW_MS) -> bytes:
    """Sent, nonce, reply flag."""
    return sent_ms.to_bytes(8) + NONCE + bytes((reply_flag,))


@pytest.mark.parametrize("reply_to", [b"", QUESTION])
def test_round_trip(reply_to: bytes) -> None:
    """Who said it, what, under which nonce, in answer to which question."""
    opened = Seal(KEY, "decode-0").open(sealed(reply_to), NOW_MS)
    assert opened == Opened("prefill-0", Release("c"), NONCE, reply_to)


def test_one_seal_opens_for_several_peers() -> None:
    """Frames of two senders with one nonce are two frames."""
    receiver = Seal(KEY, "decode-0")
    for sender in ("prefill-0", "prefill-1"):
        frame = Seal(KEY, sender).seal(Stat(), NOW_MS, NONCE)
        assert receiver.open(frame, NOW_MS).sender == sender


def test_replayed() -> None:
    """The same frame a second time is refused, also by way of a failed attempt in between."""
    receiver = Seal(KEY, "decode-0")
    receiver.open(sealed(), NOW_MS)
    with pytest.raises(FrameForgedError):
        receiver.open(sealed()[:-1] + b"?", NOW_MS)
    with pytest.raises(FrameReplayedError):
        receiver.open(sealed(), NOW_MS + MAX_SKEW_MS)


@pytest.mark.parametrize("offset_ms", [MAX_SKEW_MS + 1, -MAX_SKEW_MS - 1])
def test_skewed(offset_ms: int) -> None:
    """A frame from 30 seconds ago, or ahead, is refused."""
    with pytest.raises(FrameSkewedError):
        Seal(KEY, "decode-0").open(sealed(), NOW_MS + offset_ms)


def test_forged() -> None:
    """Another key's frame is refused."""
    with pytest.raises(FrameForgedError):
        Seal(bytes(32), "decode-0").open(sealed(), NOW_MS)


def test_a_forged_frame_uses_nothing_up() -> None:
    """Whoever has not the key cannot block a nonce: the true frame still opens."""
    receiver = Seal(KEY, "decode-0")
    with pytest.raises(FrameForgedError):
        receiver.open(Seal(bytes(32), "prefill-0").seal(Release("c"), NOW_MS, NONCE), NOW_MS)
    receiver.open(sealed(), NOW_MS)


@quick
@given(st.integers(0, len(sealed()) - 1), st.integers(1, 255))
def test_every_changed_byte_is_noticed(place: int, change: int) -> None:
    """No byte of a frame, from the version to the last of the body, can be altered, or cut off."""
    frame = bytearray(sealed())
    frame[place] ^= change
    with pytest.raises(FrameVersionError if place == 0 else FrameForgedError):
        Seal(KEY, "decode-0").open(bytes(frame), NOW_MS)
    with pytest.raises((FrameForgedError, FrameMalformedError)):
        Seal(KEY, "decode-0").open(sealed()[:place], NOW_MS)


@pytest.mark.parametrize("version", [0, 2, 255])
def test_another_version_has_a_reason_of_its_own(version: int) -> None:
    """A frame of a later version is told from a forged one."""
    with pytest.raises(FrameVersionError):
        Seal(KEY, "decode-0").open(bytes((version,)) + sealed()[1:], NOW_MS)


def test_oversize() -> None:
    """Too long a frame is neither sent nor looked at."""
    with pytest.raises(FrameOversizeError):
        Seal(KEY, "p", max_frame_bytes=100).seal(Failed("x" * 100), NOW_MS, NONCE)
    small = Seal(KEY, "p", max_frame_bytes=len(sealed()))
    small.open(sealed(), NOW_MS)
    with pytest.raises(FrameOversizeError):
        small.open(sealed() + b"?", NOW_MS)


@pytest.mark.parametrize(
    "rest",
    [
        head(),
        head() + b"\x00",
        head() + b"\x05pre",
        head() + b"\x01\xff",
        head() + b"\x81" + b"p" * 129,
        head(1) + QUESTION[:9],
        head(1) + QUESTION,
        head(2) + QUESTION + b"\x01p",
    ],
    ids=repr,
)
def test_malformed(rest: bytes) -> None:
    """Authentic, but cut off, without a sender, or with one that is not ASCII."""
    with pytest.raises(FrameMalformedError):
        Seal(KEY, "decode-0").open(authentic(rest), NOW_MS)


def test_unknown_and_invalid_messages() -> None:
    """An authentic frame with a message that is not ours, or not whole."""
    with pytest.raises(MessageUnknownError):
        Seal(KEY, "d").open(authentic(head() + b"\x01p\x91\xa5steal"), NOW_MS)
    with pytest.raises(MessageInvalidError):
        Seal(KEY, "d").open(authentic(head() + b"\x01p"), NOW_MS)


@quick
@given(st.binary(max_size=120))
def test_only_wire_errors_come_out(noise: bytes) -> None:
    """Random bytes, raw, as a version's rest, and authenticated with the right key."""
    receiver = Seal(KEY, "decode-0")
    for frame in (noise, b"\x01" + noise, authentic(noise), authentic(head() + noise)):
        try:
            receiver.open(frame, NOW_MS)
        except WireError:
            continue


@pytest.mark.parametrize("key", [b"", b"short", bytes(65)])
def test_a_weak_key_is_the_operators_fault(key: bytes) -> None:
    """No channel runs under a key that could be guessed."""
    with pytest.raises(UserError):
        Seal(key, "p")


@pytest.mark.parametrize("sender", ["", "p" * 129, "a b", "ü", "p\n"])
def test_a_sender_has_a_printable_name(sender: str) -> None:
    """Names go into logs and metrics."""
    with pytest.raises(ValueError, match="sender"):
        Seal(KEY, sender)


def test_a_nonce_has_its_length() -> None:
    """A short nonce would repeat: refused where the frame is made."""
    with pytest.raises(ValueError, match="nonce"):
        sealed(nonce=b"short")
    with pytest.raises(ValueError, match="nonce"):
        sealed(reply_to=b"short")


@pytest.mark.parametrize("vector", VECTORS["frames"], ids=lambda vector: vector["name"])
def test_bytes_never_change(vector: dict[str, str]) -> None:
    """Engines and routers of two versions authenticate each other: the frames are those on file."""
    frame = bytes.fromhex(vector["frame"])
    opened = Seal(bytes.fromhex(VECTORS["key"]), "d").open(frame, VECTORS["sent_ms"])
    reply_to = bytes.fromhex(vector["reply_to"])
    assert (opened.sender, opened.reply_to) == (vector["sender"], reply_to)
    seal = Seal(bytes.fromhex(VECTORS["key"]), vector["sender"])
    assert seal.seal(opened.message, VECTORS["sent_ms"], opened.nonce, reply_to) == frame
