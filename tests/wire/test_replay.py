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


HOUR = 3_600_000


def test_a_clock_that_was_wrong_for_a_while_deafens_nobody() -> None:
    """Our wall clock is set an hour on, hears somebody, and is set right: whoever is behind us is heard."""
    guard = ReplayGuard(SKEW, 8)
    guard.admit("p", nonce(1), 5_000 + SKEW, 5_000, 50)
    guard.admit("p", nonce(2), 5_000 + HOUR, 5_000 + HOUR, 51)
    guard.admit("q", nonce(3), 5_000 - SKEW, 5_000, 52)
    for sender, number, sent_ms in (("p", 1, 5_000 + SKEW), ("q", 3, 5_000 - SKEW)):
        with pytest.raises(FrameReplayedError):
            guard.admit(sender, nonce(number), sent_ms, 5_000, 53)
    guard.check_integrity()


def test_clocks_that_were_wrong_together_hear_each_other_when_they_are_right() -> None:
    """What was sent in an hour that has not yet come is remembered until then, and blocks nothing earlier."""
    guard = ReplayGuard(SKEW, 8)
    guard.admit("p", nonce(1), 5_000 + HOUR, 5_000 + HOUR, 50)
    later = 3 * SKEW
    for number in range(2, 20):
        guard.admit("p", nonce(number), 5_000 + number * later, 5_000 + number * later, 50 + number * later)
    assert len(guard) == 2
    with pytest.raises(FrameReplayedError):
        guard.admit("p", nonce(1), 5_000 + HOUR, 5_000 + HOUR, 50 + HOUR)


def test_a_frame_is_remembered_for_as_long_as_it_would_be_accepted() -> None:
    """From a sender that is ahead of us by the skew, until it is stale; then it is forgotten."""
    guard = ReplayGuard(SKEW, 8)
    guard.admit("p", nonce(1), 5_000 + SKEW, 5_000, 50)
    with pytest.raises(FrameReplayedError):
        guard.admit("p", nonce(1), 5_000 + SKEW, 5_000 + 2 * SKEW, 50 + 2 * SKEW)
    later = 2 * SKEW + 1
    guard.admit("p", nonce(2), 5_000 + later, 5_000 + later, 50 + later)
    assert len(guard) == 1


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


frames = st.tuples(
    *(st.sampled_from("pq"), st.integers(0, 6), st.integers(0, 300), st.integers(0, 300)),
    st.integers(0, 150),
)


@settings(deadline=None, max_examples=300)
@given(st.lists(frames, max_size=60), st.integers(1, 5))
def test_no_frame_is_ever_admitted_twice(script: list[tuple[str, int, int, int, int]], window: int) -> None:
    """Under any wall clock, also one that jumps, and any window, a frame gets in at most once."""
    guard, admitted = ReplayGuard(SKEW, window), set[tuple[str, int, int]]()
    sent_at: dict[tuple[str, int], int] = {}
    elapsed_ms = 0
    for sender, number, sent_ms, now_ms, passed_ms in script:
        elapsed_ms += passed_ms
        sent_ms = sent_at.setdefault((sender, number), sent_ms)
        try:
            guard.admit(sender, nonce(number), sent_ms, now_ms, elapsed_ms)
        except WireError:
            continue
        finally:
            guard.check_integrity()
        assert (sender, number, sent_ms) not in admitted
        admitted.add((sender, number, sent_ms))
