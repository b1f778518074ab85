"""Virtual time: what is to happen, in order, and nothing between.

A discrete-event simulation on a binary heap. What happens at the same nanosecond happens in the order in
which it was planned, so one plan has one history.
"""

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Loop:
    """The events to come. `now_ns` is the time of the one that happens."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._heap: list[tuple[int, int, Action]] = []
        self._planned = 0

    def __len__(self) -> int:
        """Events to come."""
        return len(self._heap)

    def next_ns(self) -> int | None:
        """When the next event happens, or None."""
        return self._heap[0][0] if self._heap else None

    def at(self, time_ns: int, action: Action) -> None:
        """Let `action` happen at `time_ns`, or now, if that has passed."""
        self._planned += 1
        now_ns = self.now_ns
        heapq.heappush(self._heap, (time_ns if time_ns > now_ns else now_ns, self._planned, action))

    def after(self, delay_ns: int, action: Action) -> None:
        """Let `action` happen in so many nanoseconds."""
        self._planned += 1
        now_ns = self.now_ns
        heapq.heappush(self._heap, (now_ns + delay_ns if delay_ns > 0 else now_ns, self._planned, action))

    def step(self) -> bool:
        """Let the next event happen. False if there is none."""
        if not self._heap:
            return False
        self.now_ns, _, action = heapq.heappop(self._heap)
        action()
        return True

    def run(self, until_ns: int | None = None) -> None:
        """Let everything happen, or everything up to `until_ns`, which it is then."""
        heap, pop = self._heap, heapq.heappop
        while heap and (until_ns is None or heap[0][0] <= until_ns):
            self.now_ns, _, action = pop(heap)
            action()
        if until_ns is not None:
            self.now_ns = max(self.now_ns, until_ns)
