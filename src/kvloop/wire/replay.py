"""Each frame once, with bounded memory.

A frame is fresh while its sender's wall clock and ours differ by no more than the allowed skew, so only that
long need its nonce be remembered, and no less than twice the skew by a clock that nobody sets: a wall clock
that is set on forgets nothing at once that it would have to refuse when it is set back. When more fresh
nonces come than the window holds, the oldest are forgotten. What is forgotten takes with it the right to send
anything that old, since that could no longer be told from a replay: from anyone if it was forgotten by age,
and from its sender alone if it was for want of room.
"""

import heapq

from kvloop.errors import FrameReplayedError, FrameSkewedError


class ReplayGuard:
    """Remembers at most `replay_window` frames, each for as long as it would be accepted."""

    def __init__(self, max_skew_ms: int, replay_window: int) -> None:
        if min(max_skew_ms, replay_window) <= 0:
            raise ValueError("skew and window must be positive")
        self._max_skew_ms = max_skew_ms
        self._replay_window = replay_window
        self._seen: set[tuple[str, bytes]] = set()
        self._by_age: list[tuple[int, int, str, bytes]] = []  # when sent, and when heard
        self._floor_ms = -1  # no frame this old is accepted from anyone
        self._sender_floors_ms: dict[str, int] = {}

    def __len__(self) -> int:
        """Frames remembered."""
        return len(self._by_age)

    def admit(
        self, sender: str, nonce: bytes, sent_ms: int, now_ms: int, elapsed_ms: int | None = None
    ) -> None:
        """Accept a frame, once. FrameSkewedError or FrameReplayedError.

        `now_ms`: our wall clock. `elapsed_ms`: a clock that is never set; by default there is but the one.
        """
        heard_ms = now_ms if elapsed_ms is None else elapsed_ms
        if abs(now_ms - sent_ms) > self._max_skew_ms:
            raise FrameSkewedError(f"{now_ms - sent_ms} ms")
        if (sender, nonce) in self._seen:
            raise FrameReplayedError
        if sent_ms <= max(self._floor_ms, self._sender_floors_ms.get(sender, -1)):
            raise FrameReplayedError("older than the window")
        self._forget_stale(now_ms, heard_ms)
        if len(self._by_age) >= self._replay_window:
            self._forget_oldest()
        self._seen.add((sender, nonce))
        heapq.heappush(self._by_age, (sent_ms, heard_ms, sender, nonce))

    def check_integrity(self) -> None:
        """AssertionError where the guard contradicts itself."""
        assert len(self._seen) == len(self._by_age) <= self._replay_window
        assert {(sender, nonce) for _, _, sender, nonce in self._by_age} == self._seen
        assert len(self._sender_floors_ms) <= self._replay_window

    def _forget_stale(self, now_ms: int, heard_ms: int) -> None:
        sent_before, heard_before = now_ms - self._max_skew_ms, heard_ms - 2 * self._max_skew_ms
        while self._by_age and self._by_age[0][0] < sent_before and self._by_age[0][1] < heard_before:
            sent_ms, _, sender, nonce = heapq.heappop(self._by_age)
            self._seen.remove((sender, nonce))
            self._floor_ms = max(self._floor_ms, sent_ms)

    def _forget_oldest(self) -> None:
        sent_ms, _, sender, nonce = heapq.heappop(self._by_age)
        self._seen.remove((sender, nonce))
        floors = self._sender_floors_ms
        floors[sender] = max(floors.get(sender, -1), sent_ms)
        if len(floors) > self._replay_window:
            self._floor_ms = max(self._floor_ms, max(floors.values()))
            floors.clear()
