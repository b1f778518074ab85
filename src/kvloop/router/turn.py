"""What to do next with a turn: a machine without I/O, fed with what came of the last step.

    prefill (with the filed handle) ── no ──► prefill without it ──► the other prefill engine ──► decode alone
                  │ handover                                                    │
                  ▼                                                             ▼
    decode with the handover ──── refused before the first byte ────► decode alone, elsewhere if there is one

A turn asks at most four times for prefill and at most twice for decode. What a client did wrong (4xx) is not
tried again, but for prefill's word on a request with a handle: the same request without one may be right, and
no return may cause an error that plain prefill would not. Nothing is tried again once a byte has reached him.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum, StrEnum

from kvloop.wire.openai import ALONE

MAX_PREFILL_ENGINES = 2  # the first, and one other


class Route(StrEnum):
    """How a turn was served, as the response header and the metrics say it."""

    RETURN = "return"
    RECOMPUTE = "recompute"
    DECODE = "decode"


class Failure(Enum):
    """How far a hop got that failed: no connection, no whole answer, or an answer that is of no use."""

    UNREACHED = "unreached"
    BROKEN = "broken"
    ANSWERED = "answered"


@dataclass(frozen=True, slots=True)
class AskPrefill:
    """Send the prefill hop to `engine`, with `handle` to read back from."""

    engine: str
    handle: bytes | None


@dataclass(frozen=True, slots=True)
class AskDecode:
    """Send the decode hop to `engine`. `handover` is the value of its `kv_transfer_params`."""

    engine: str
    handover: bytes


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Tell the client: the last engine's own answer if it gave one, else `message`."""

    message: str


Step = AskPrefill | AskDecode | GiveUp
ChoosePrefill = Callable[[Collection[str]], str | None]
ChooseDecode = Callable[[Collection[str], bool], str | None]


class Turn:
    """One turn's way through the engines.

    `choose_prefill(excluded)` and `choose_decode(excluded, last_resort)` name an engine or None; the last
    resort may be one that failed a moment ago. Feed each step's outcome in and take the next step.
    """

    def __init__(
        self,
        choose_prefill: ChoosePrefill,
        choose_decode: ChooseDecode,
        handle: bytes | None,
        alone: bool,
    ) -> None:
        self.route = Route.DECODE
        self._choose_prefill = choose_prefill
        self._choose_decode = choose_decode
        self._handle = handle
        self._alone = alone
        self._asked: AskPrefill | AskDecode | None = None
        self._tried_prefill: set[str] = set()
        self._prefill_retried = False
        self._decode_retried = False

    def start(self) -> Step:
        """The first step."""
        return self._decode(ALONE) if self._alone else self._prefill()

    def prefilled(self, handover: bytes, returned_tokens: int | None) -> Step:
        """Prefill answered. `returned_tokens` is what it read back, None if it does not say."""
        assert isinstance(self._asked, AskPrefill)
        came_back = self._asked.handle is not None and returned_tokens != 0
        self.route = Route.RETURN if came_back else Route.RECOMPUTE
        return self._decode(handover)

    def prefill_failed(self, failure: Failure) -> Step:
        """Prefill gave no handover, and no 4xx either.

        An engine that answers may only be unable to read back: it is asked once more, without the handle. If
        it fails even so, the handle was not to blame and goes to the next engine; after one that broke off it
        may have been, and does not.
        """
        asked = self._asked
        assert isinstance(asked, AskPrefill)
        if failure is Failure.ANSWERED and asked.handle is not None and not self._prefill_retried:
            self._prefill_retried = True
            self._asked = AskPrefill(asked.engine, None)
            return self._asked
        if failure is Failure.BROKEN:
            self._handle = None
        return self._prefill()

    def prefill_refused(self) -> AskPrefill | None:
        """Prefill answered 4xx. None if that is the client's: there was no handle to blame.

        Else the engine is asked once more, and from then on nobody gets the handle.
        """
        asked = self._asked
        assert isinstance(asked, AskPrefill)
        if asked.handle is None:
            return None
        self._handle = None
        self._asked = AskPrefill(asked.engine, None)
        return self._asked

    def decode_failed(self) -> Step:
        """Decode could not be reached, broke off before its first byte, or answered 5xx."""
        assert isinstance(self._asked, AskDecode)
        self.route = Route.DECODE
        refused = self._asked
        engine = None
        if not self._decode_retried:
            self._decode_retried = True
            engine = self._choose_decode((refused.engine,), False)
            if engine is None and refused.handover is not ALONE:
                engine = refused.engine
        if engine is None:
            return GiveUp("no decode engine could serve the request")
        self._asked = AskDecode(engine, ALONE)
        return self._asked

    def _prefill(self) -> Step:
        engine = None
        if len(self._tried_prefill) < MAX_PREFILL_ENGINES:
            engine = self._choose_prefill(self._tried_prefill)
        if engine is None:
            return self._decode(ALONE)
        self._tried_prefill.add(engine)
        self._asked = AskPrefill(engine, self._handle)
        return self._asked

    def _decode(self, handover: bytes) -> Step:
        engine = self._choose_decode((), True)
        if engine is None:
            return GiveUp("there is no decode engine")
        self._asked = AskDecode(engine, handover)
        return self._asked
