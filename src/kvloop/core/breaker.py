"""A circuit breaker: when an engine is left out, and how it is let back in.

Failures are of two kinds. One that says by itself that the engine is of no use now (it cannot be reached, it
let a hop time out) opens the breaker at once. One that may be a request's own fault (a 5xx, a broken answer)
counts: so many in a row open it, or so large a share of a window that the first such failure begins. Open, it
asks for nobody until a spell has passed, twice as long each time up to a bound; then one request at a time is
let through, and what comes of it decides. A trial of which nothing is heard gives way to the next after a
while, for its client may have left. Any answer closes the breaker and clears everything.

The table is the machine; a pair that is not in it is an illegal move.
"""

from dataclasses import dataclass
from enum import StrEnum

_NS_PER_S = 1_000_000_000


class BreakerState(StrEnum):
    """Whether requests pass: all, none, or one at a time."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class BreakerEvent(StrEnum):
    """What can happen. TRIP: a failure that is one too many; RETRY: the spell is over."""

    SUCCEED = "succeed"
    FAIL = "fail"
    TRIP = "trip"
    RETRY = "retry"


TRANSITIONS: dict[tuple[BreakerState, BreakerEvent], BreakerState] = {
    (BreakerState.CLOSED, BreakerEvent.SUCCEED): BreakerState.CLOSED,
    (BreakerState.CLOSED, BreakerEvent.FAIL): BreakerState.CLOSED,
    (BreakerState.CLOSED, BreakerEvent.TRIP): BreakerState.OPEN,
    (BreakerState.OPEN, BreakerEvent.SUCCEED): BreakerState.CLOSED,
    (BreakerState.OPEN, BreakerEvent.FAIL): BreakerState.OPEN,
    (BreakerState.OPEN, BreakerEvent.TRIP): BreakerState.OPEN,
    (BreakerState.OPEN, BreakerEvent.RETRY): BreakerState.HALF_OPEN,
    (BreakerState.HALF_OPEN, BreakerEvent.SUCCEED): BreakerState.CLOSED,
    (BreakerState.HALF_OPEN, BreakerEvent.FAIL): BreakerState.OPEN,
    (BreakerState.HALF_OPEN, BreakerEvent.TRIP): BreakerState.OPEN,
}
INITIAL = BreakerState.CLOSED


@dataclass(frozen=True, slots=True)
class BreakerRules:
    """When a breaker opens and for how long.

    max_failures: in a row. max_failure_permille: of the hops in a window of `window_ns`, once there are
    `min_hops` of them. trial_ns: how long a trial keeps others out.
    """

    max_failures: int = 5
    max_failure_permille: int = 500
    min_hops: int = 20
    window_ns: int = 10 * _NS_PER_S
    backoff_first_ns: int = _NS_PER_S // 2
    backoff_max_ns: int = 8 * _NS_PER_S  # an engine that is back is found within this
    trial_ns: int = 30 * _NS_PER_S


class Breaker:
    """One engine's breaker. Times are of one monotonic clock; `openings` counts how often it opened."""

    __slots__ = (
        "_backoff_ns",
        "_failures",
        "_hops",
        "_in_a_row",
        "_retry_ns",
        "_rules",
        "_trial",
        "_trial_until_ns",
        "_trials",
        "_window_end_ns",
        "openings",
        "state",
    )

    def __init__(self, rules: BreakerRules) -> None:
        self.state = INITIAL
        self.openings = 0
        self._rules = rules
        self._in_a_row = self._failures = self._hops = 0
        self._window_end_ns = 0
        self._backoff_ns = self._retry_ns = 0
        self._trials = 0
        self._trial = 0  # the number of the one under way, 0 for none
        self._trial_until_ns = 0

    def allows(self, now_ns: int) -> bool:
        """Whether a request may be sent."""
        if self.state is BreakerState.CLOSED:
            return True
        if self.state is BreakerState.OPEN:
            return now_ns >= self._retry_ns
        return not self._trial or now_ns >= self._trial_until_ns

    def begin(self, now_ns: int) -> int:
        """A request is sent, allowed or not. The number of a trial, to be given to `ended`; 0 for none."""
        if self.state is BreakerState.CLOSED or not self.allows(now_ns):
            return 0
        if self.state is BreakerState.OPEN:
            self._move(BreakerEvent.RETRY)
        self._trials += 1
        self._trial, self._trial_until_ns = self._trials, now_ns + self._rules.trial_ns
        return self._trial

    def ended(self, trial: int) -> None:
        """A trial is over. If nothing was heard of it, the next may begin."""
        if trial == self._trial:
            self._trial = 0

    def succeeded(self) -> None:
        """The engine answered."""
        self._hops += 1
        self._in_a_row = 0
        if self.state is not BreakerState.CLOSED:
            self._move(BreakerEvent.SUCCEED)
        if self._backoff_ns:
            self._backoff_ns = self._trial = self._failures = self._hops = 0

    def failed(self, now_ns: int, *, trips: bool) -> None:
        """The engine failed. `trips`: in a way that opens the breaker at once."""
        if self.state is BreakerState.OPEN and now_ns >= self._retry_ns:
            self._move(BreakerEvent.RETRY)
        if self.state is BreakerState.CLOSED and not trips:
            trips = self._is_one_too_many(now_ns)
        before = self.state
        self._move(BreakerEvent.TRIP if trips else BreakerEvent.FAIL)
        if self.state is BreakerState.OPEN and before is not BreakerState.OPEN:
            rules = self._rules
            self._backoff_ns = min(max(2 * self._backoff_ns, rules.backoff_first_ns), rules.backoff_max_ns)
            self._retry_ns = now_ns + self._backoff_ns
            self._trial = self._in_a_row = self._failures = self._hops = 0
            self.openings += 1

    def check_integrity(self) -> None:
        """AssertionError where the counts contradict the state or a bound does not hold."""
        assert 0 <= self._failures <= self._hops
        assert self._in_a_row < self._rules.max_failures
        assert self._backoff_ns <= self._rules.backoff_max_ns
        assert not self._trial or self.state is BreakerState.HALF_OPEN, (
            "a trial of a breaker that is not open"
        )
        assert (self._backoff_ns > 0) == (self.state is not BreakerState.CLOSED)

    def _is_one_too_many(self, now_ns: int) -> bool:
        if now_ns >= self._window_end_ns:
            self._window_end_ns = now_ns + self._rules.window_ns
            self._failures = self._hops = 0
        self._failures += 1
        self._hops += 1
        self._in_a_row += 1
        rules = self._rules
        share_is_large = self._failures * 1000 >= self._hops * rules.max_failure_permille
        return self._in_a_row >= rules.max_failures or (self._hops >= rules.min_hops and share_is_large)

    def _move(self, event: BreakerEvent) -> None:
        self.state = TRANSITIONS[self.state, event]
