"""What a row of probes says about an engine: up until so many in a row missed, down until so many passed.

One lost probe takes no engine out and one lucky one brings none back. The table is the machine; the counts
say when an event is one of it.
"""

from enum import StrEnum


class ProbeState(StrEnum):
    """Whether the probes find the engine."""

    UP = "up"
    DOWN = "down"


class ProbeEvent(StrEnum):
    """A row of probes that is long enough."""

    FALL = "fall"
    RISE = "rise"


TRANSITIONS: dict[tuple[ProbeState, ProbeEvent], ProbeState] = {
    (ProbeState.UP, ProbeEvent.FALL): ProbeState.DOWN,
    (ProbeState.DOWN, ProbeEvent.RISE): ProbeState.UP,
}
INITIAL = ProbeState.UP
"""Nobody waits for a first probe: whoever cannot be reached is found out by the first request."""


class ProbeGate:
    """One engine's probes: `fall` misses in a row take it out, `rise` passes in a row bring it back."""

    __slots__ = ("_fall", "_rise", "_row", "missed", "passed", "state")

    def __init__(self, fall: int, rise: int) -> None:
        self.state = INITIAL
        self._fall = fall
        self._rise = rise
        self._row = 0
        self.passed = self.missed = 0

    def heard(self, passed: bool) -> ProbeEvent | None:
        """Count a probe. The event, if it was the one that made the row long enough."""
        if passed:
            self.passed += 1
        else:
            self.missed += 1
        if passed == (self.state is ProbeState.UP):
            self._row = 0
            return None
        self._row += 1
        if self._row < (self._rise if passed else self._fall):
            return None
        event = ProbeEvent.RISE if passed else ProbeEvent.FALL
        self.state, self._row = TRANSITIONS[self.state, event], 0
        return event
