"""One request while it is served: what it is, how far it has come, and what is remembered of it."""

from dataclasses import dataclass, field

from kvloop.core.decision import Ask, Option
from kvloop.core.progress import Progress
from kvloop.core.report import TurnReport
from kvloop.router.belief import Size
from kvloop.router.conversations import Lookup
from kvloop.router.engine import Engine
from kvloop.router.leases import LeaseUse
from kvloop.router.opening import Opened
from kvloop.router.request import Request
from kvloop.router.response import Response
from kvloop.router.turn import Turn
from kvloop.router.upstream import Head
from kvloop.wire.ending import STOP
from kvloop.wire.ledger import Ledger
from kvloop.wire.openai import Generation


@dataclass(slots=True)
class Run:
    """`believed`: the turn as it was when `ways` were weighed. `report`: prefill's, `decoded`: decode's.
    `path`: where it is sent. `follows`: its answer may be gone on with elsewhere, so that decode is asked for
    its tokens; `ledger` has them. `rest`: it is itself what another engine says to the end of the answer that
    this is the ledger of.
    `first_ns`: when the answer's first byte came, 0 before; only a stream's says when the prompt was done.
    `prefilled_ns`: when prefill had answered, 0 before. `kept_tokens`: what decode keeps of it, None while
    that is not known; `ending`: how its answer ended.
    """

    request_id: bytes
    request: Request
    response: Response
    opened: Opened
    size: Size
    believed: Ask
    ways: list[Option]
    turn: Turn
    progress: Progress
    lines: bytes
    began_ns: int
    use: LeaseUse | None
    report: TurnReport | None = None
    decoded: TurnReport | None = None
    first_ns: int = 0
    prefilled_ns: int = 0
    refused: tuple[Head, bytes] | None = field(default=None)
    why: str = ""
    held: Engine | None = None
    path: str = ""
    kept_tokens: int | None = None
    ending: str = STOP
    follows: bool = False
    ledger: Ledger | None = None
    rest: Ledger | None = None

    def __post_init__(self) -> None:
        self.path = self.path or self.request.path

    def hold(self, engine: Engine) -> None:
        """Decode is going to read what `engine` has computed, until `let_go`."""
        self.let_go()
        self.held = engine
        engine.hold()

    def let_go(self) -> None:
        """It has read it, or never will."""
        if self.held is not None:
            self.held.let_go()
            self.held = None

    @property
    def generation(self) -> Generation:
        """What the client asked for."""
        return self.opened.generation

    @property
    def lookup(self) -> Lookup:
        """What it goes on from."""
        return self.opened.lookup

    @property
    def way(self) -> Option | None:
        """The one that was decided on."""
        return self.ways[0] if self.ways else None
