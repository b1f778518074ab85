"""What a router does next with a turn, as the router's own machine decides it.

That machine stands in `kvloop.router`, which this layer does not import: whoever starts a fleet hands it in.
"""

from collections.abc import Callable, Collection
from enum import Enum
from typing import Protocol

from msgspec import Struct

from kvloop.core.decision import Option


class Trouble(Enum):
    """How far a hop got that failed."""

    UNREACHED = "unreached"
    BROKEN = "broken"
    ANSWERED = "answered"


class Prefill(Struct, frozen=True):
    """Ask this engine for the prompt; `with_handle`: to be read back from the turn that was found."""

    engine: str
    with_handle: bool


class Decode(Struct, frozen=True):
    """Ask this engine for the answer; `with_handover`: with what prefill left."""

    engine: str
    with_handover: bool


class Refuse(Struct, frozen=True):
    """There is no way left."""

    why: str


Step = Prefill | Decode | Refuse
ChoosePrefill = Callable[[Collection[str]], str | None]
ChooseDecode = Callable[[str | None, Collection[str], bool], str | None]


class TurnMachine(Protocol):
    """One turn's way."""

    def start(self) -> Step:
        """The first step."""

    def prefilled(self, returned_tokens: int | None) -> Step:
        """Prefill answered; what it read back, None if it does not say."""

    def prefill_failed(self, trouble: Trouble) -> Step:
        """Prefill gave nothing."""

    def decode_failed(self, trouble: Trouble) -> Step:
        """Decode gave nothing, not one byte."""


MakeTurn = Callable[[ChoosePrefill, ChooseDecode, bool, Option | None], TurnMachine]
"""Makes the machine of a turn; the last arguments: whether there is a handle, and the way that was chosen."""
