"""A transition table drawn as a Mermaid state diagram, so that no page can show another machine."""

from collections.abc import Mapping, Set
from enum import StrEnum
from typing import TypeVar

State = TypeVar("State", bound=StrEnum)
Event = TypeVar("Event", bound=StrEnum)


def state_diagram(transitions: Mapping[tuple[State, Event], State], initial: State, final: Set[State]) -> str:
    """A `stateDiagram-v2` in the table's order; events between the same two states share an arrow."""
    events: dict[tuple[str, str], list[str]] = {}
    for (before, event), after in transitions.items():
        events.setdefault((before.value, after.value), []).append(event.value)
    arrows = [f"    {before} --> {after}: {', '.join(names)}" for (before, after), names in events.items()]
    ends = sorted(f"    {state.value} --> [*]" for state in final)
    return "\n".join(["stateDiagram-v2", f"    [*] --> {initial.value}", *arrows, *ends])
