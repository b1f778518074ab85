"""Each frame once, with bounded memory.

A frame is fresh while its sender's wall clock and ours differ by no more than the allowed skew, so only
that long need its nonce be remembered. When more fresh nonces come than the window holds, the oldest are
forgotten, and with them the right to send anything that old: its sender's frames from before are refused,
since they can no longer be told from replays. The same holds where our own clock is set back.
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
        self._by_age: list[tuple[int, str, bytes]] = []
        self._floor_ms = -1  # no frame this old is accepted from anyone
        self._sender_floors_ms: dict[str, int] = {}

    def __len__(self) -> int:
        """Frames remembered."""
        return len(self._by_age)

    def admit(self, sender: str, nonce: bytes, sent_ms: int, now_ms: int) -> None:
        """Accept a frame, once. FrameSkewedError or FrameReplayedError."""
        if abs(now_ms - sent_ms) > self._max_skew_ms:
            raise FrameSkewedError(f"{now_ms - sent_ms} ms")
        if (sender, nonce) in self._seen:
            raise FrameReplayedError
        if sent_ms <= max(self._floor_ms, self._sender_floors_ms.get(sender, -1)):
            raise FrameReplayedError("older than the window")
        self._forget_stale(now_ms)
        if len(self._by_age) >= self._replay_window:
            self._forget_oldest()
        self._seen.add((sender, nonce))
        heapq.heappush(self._by_age, (sent_ms, sender, nonce))

    def check_integrity(self) -> None:
        """AssertionError where the guard contradicts itself."""
        assert len(self._seen) == len(self._by_age) <= self._replay_window
        assert {(sender, nonce) for _, sender, nonce in self._by_age} == self._seen
        assert len(self._sender_floors_ms) <= self._replay_window

    def _forget_stale(self, now_ms: int) -> None:
        while self._by_age and self._by_age[0][0] < now_ms - self._max_skew_ms:
            sent_ms, sender, nonce = heapq.heappop(self._by_age)
            self._seen.remove((sender, nonce))
            self._floor_ms = max(self._floor_ms, sent_ms)

    def _forget_oldest(self) -> None:
        sent_ms, sender, nonce = heapq.heappop(self._by_age)
        self._seen.remove((sender, nonce))
        floors = self._sender_floors_ms
        floors[sender] = max(floors.get(sender, -1), sent_ms)
        if len(floors) > self._replay_window:
            self._floor_ms = max(self._floor_ms, max(floors.values()))
            floors.clear()
