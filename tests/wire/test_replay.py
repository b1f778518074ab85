"""The replay window: each frame once, whatever is forgotten, in bounded memory."""

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloop.errors import FrameReplayedError, FrameSkewedError, WireError
from kvloop.wire.replay import ReplayGuard

SKEW = 100


def nonce(number: int) -> bytes:
    """The frame's own 16 bytes."""
    return number.to_bytes(16)


def test_once() -> None:
    """A frame is admitted, and never again."""
    guard = ReplayGuard(SKEW, 8)
    guard.admit("p", nonce(1), 1_000, 1_000)
    for now_ms in (1_000, 1_000 + SKEW):
        with pytest.raises(FrameReplayedError):
            guard.admit("p", nonce(1), 1_000, now_ms)
    guard.check_integrity()


@pytest.mark.parametrize("sent_ms", [1_000 - SKEW - 1, 1_000 + SKEW + 1, 0, 2**64 - 1])
def test_skewed(sent_ms: int) -> None:
    """A clock further off than the skew, in either direction, is refused."""
    with pytest.raises(FrameSkewedError):
        ReplayGuard(SKEW, 8).admit("p", nonce(1), sent_ms, 1_000)


@pytest.mark.parametrize("sent_ms", [1_000 - SKEW, 1_000 + SKEW])
def test_skew_is_inclusive(sent_ms: int) -> None:
    """A clock off by exactly the skew is accepted."""
    ReplayGuard(SKEW, 8).admit("p", nonce(1), sent_ms, 1_000)


def test_a_clock_may_begin_at_zero() -> None:
    """In virtual time the first frame is of the first millisecond."""
    ReplayGuard(SKEW, 8).admit("p", nonce(1), 0, 0)


def test_overflow_forgets_the_right_to_replay() -> None:
    """When the window overflows, its oldest frame cannot be replayed although it is not remembered."""
    guard = ReplayGuard(SKEW, 2)
    for number in range(4):
        guard.admit("p", nonce(number), 1_000 + number, 1_000)
    assert len(guard) == 2
    with pytest.raises(FrameReplayedError):
        guard.admit("p", nonce(0), 1_000, 1_000)


def test_one_busy_sender_does_not_lock_out_another() -> None:
    """What is forgotten of one sender says nothing about another with a slower clock."""
    guard = ReplayGuard(SKEW, 2)
    for number in range(10):
        guard.admit("fast", nonce(number), 1_050 + number, 1_000)
    guard.admit("slow", nonce(20), 950, 1_000)
    guard.admit("slow", nonce(21), 951, 1_000)
    guard.check_integrity()


def test_a_clock_set_back_replays_nothing() -> None:
    """A frame forgotten by age is refused although our clock has been set back into its time."""
    guard = ReplayGuard(SKEW, 8)
    guard.admit("p", nonce(1), 1_000, 1_000)
    guard.admit("p", nonce(2), 5_000, 5_000)
    assert len(guard) == 1
    with pytest.raises(FrameReplayedError):
        guard.admit("p", nonce(1), 1_000, 1_000)
    guard.admit("p", nonce(3), 1_001, 1_000)


def test_senders_are_bounded() -> None:
    """A thousand sender names in an overflowing window leave no more behind than the window's size."""
    guard = ReplayGuard(SKEW, 4)
    for number in range(1_000):
        with suppress(FrameReplayedError):
            guard.admit(f"p{number}", nonce(number), 1_000 + number % 100, 1_050)
        guard.check_integrity()


def test_forgetting_senders_forgets_no_frame() -> None:
    """When too many senders have been forgotten to tell them apart, what each of them sent stays refused."""
    guard = ReplayGuard(SKEW, 1)
    for number, sender in enumerate("abc"):
        guard.admit(sender, nonce(number), 1_000 + number, 1_000)
    for number, sender in enumerate("abc"):
        with pytest.raises(FrameReplayedError):
            guard.admit(sender, nonce(number), 1_000 + number, 1_000)


def test_bounds_must_be_positive() -> None:
    """A guard that remembers nothing is a mistake in the configuration."""
    with pytest.raises(ValueError, match="positive"):
        ReplayGuard(SKEW, 0)


frames = st.tuples(st.sampled_from("pq"), st.integers(0, 6), st.integers(0, 300), st.integers(0, 300))


@settings(deadline=None, max_examples=300)
@given(st.lists(frames, max_size=60), st.integers(1, 5))
def test_no_frame_is_ever_admitted_twice(script: list[tuple[str, int, int, int]], window: int) -> None:
    """Under any clock, also one that jumps, and any window, a frame gets in at most once."""
    guard, admitted = ReplayGuard(SKEW, window), set[tuple[str, int, int]]()
    sent_at: dict[tuple[str, int], int] = {}
    for sender, number, sent_ms, now_ms in script:
        sent_ms = sent_at.setdefault((sender, number), sent_ms)
        try:
            guard.admit(sender, nonce(number), sent_ms, now_ms)
        except WireError:
            continue
        finally:
            guard.check_integrity()
        assert (sender, number, sent_ms) not in admitted
        admitted.add((sender, number, sent_ms))
