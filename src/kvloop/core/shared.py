"""Equal values that are kept once: an engine's address, a tenant's digest, as a million turns name them.

What comes off the wire is a new object each time. Where many records hold equal values, each holds the first
one that came. A cache, no register: when it is full it forgets all, and what came before is shared no more.
"""

from collections.abc import Hashable
from typing import TypeVar

MAX_SHARED = 10_000

Value = TypeVar("Value", bound=Hashable)


class Shared:
    """Any hashable values that do not change."""

    def __init__(self, bound: int = MAX_SHARED) -> None:
        self._bound = bound
        self._known: dict[Hashable, Hashable] = {}

    def __len__(self) -> int:
        return len(self._known)

    def of(self, value: Value) -> Value:
        """The object to hold in the place of `value`, equal to it."""
        known: Value | None = self._known.get(value)  # type: ignore[assignment]
        if known is not None:
            return known
        if len(self._known) >= self._bound:
            self._known.clear()
        self._known[value] = value
        return value
