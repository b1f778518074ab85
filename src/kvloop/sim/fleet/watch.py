"""What checkers are told, and what they say when something was not as promised.

A checker is told what happened by the world around the code under test, never by that code itself, and has
its own idea of what should be. Every method does nothing here; a checker has those that it needs.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvloop.core.lineage import Match
from kvloop.sim.request import Finished, Request, StartRead, Starved
from kvloop.wire.control import Claim, Granted, Message

if TYPE_CHECKING:
    from kvloop.sim.fleet.filing import Ask
    from kvloop.sim.fleet.node import EngineNode
    from kvloop.sim.fleet.people import Turn
    from kvloop.sim.fleet.world import World


class ViolationError(Exception):
    """A promise was broken. `checker` names the class that saw it."""

    def __init__(self, checker: str, what: str) -> None:
        super().__init__(f"{checker}: {what}")
        self.checker = checker
        self.what = what


@dataclass(frozen=True, slots=True)
class Asking:
    """`node` has sent a claim for a request with this id and salt, in a frame with this nonce."""

    node: "EngineNode"
    request_id: str
    nonce: bytes
    salt: str


@dataclass(frozen=True, slots=True)
class Grant:
    """`node` lends blocks to the sender of a frame, known by its name and the frame's nonce."""

    node: "EngineNode"
    claim: Claim
    answer: Granted
    asker: tuple[str, bytes]


@dataclass(frozen=True, slots=True)
class Service:
    """`node` answered a message."""

    node: "EngineNode"
    message: Message
    answer: Message


@dataclass(frozen=True, slots=True)
class Kept:
    """`node` gave a handle for a request with this salt."""

    node: "EngineNode"
    lease_id: str
    salt: str


@dataclass(frozen=True, slots=True)
class Reading:
    """`node` begins to read another engine's blocks; or the bytes have come, with what they are."""

    node: "EngineNode"
    read: StartRead
    contents: list[int] | None = None


@dataclass(frozen=True, slots=True)
class Hunger:
    """A request on `node` waits for blocks."""

    node: "EngineNode"
    event: Starved


@dataclass(frozen=True, slots=True)
class End:
    """A request has ended on `node`; `request` None for one that its client had given up."""

    node: "EngineNode"
    event: Finished
    request: Request | None


@dataclass(frozen=True, slots=True)
class Act:
    """`node` has done something. `woken`: because its time had come; `was_idle`: without work before."""

    node: "EngineNode"
    was_idle: bool
    woken: bool


class Checker:
    """Looks at one promise."""

    def fail(self, what: str) -> None:
        """The promise was broken."""
        raise ViolationError(type(self).__name__, what)

    def begin(self, world: "World") -> None:
        """A run begins."""

    def claimed(self, asking: Asking) -> None:
        """A claim was sent."""

    def granted(self, grant: Grant) -> None:
        """A claim was granted."""

    def served(self, service: Service) -> None:
        """A message was answered."""

    def retained(self, kept: Kept) -> None:
        """A lease was granted."""

    def read_began(self, reading: Reading) -> None:
        """A transfer begins."""

    def read_landed(self, reading: Reading) -> None:
        """A transfer has ended; the engine does not know yet. `contents` None: it failed."""

    def starved(self, hunger: Hunger) -> None:
        """A request waits for blocks."""

    def finished(self, end: End) -> None:
        """A request has ended."""

    def acted(self, act: Act) -> None:
        """An engine has done something."""

    def found(self, ask: "Ask", match: Match) -> None:
        """A router has found a turn that a request may go on from."""

    def delivered(self, turn: "Turn", body: bytes) -> None:
        """The bytes of an answer, as its client gets them."""

    def smuggled(self, turn: "Turn") -> None:
        """A router has taken a request that came with block metadata."""

    def answered(self, turn: "Turn", data: bytes) -> None:
        """A client has its answer, or the beginning of one."""

    def refused(self, turn: "Turn", why: str) -> None:
        """A client got an error instead, or the end of its answer is missing."""

    def drained(self, world: "World") -> None:
        """Faults were off for long enough: nothing should be left."""
