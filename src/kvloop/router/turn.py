"""What to do next with a turn: a machine without I/O, fed with what came of the last step.

    append at the decode engine that holds the history ── no ──┐
                                                               ▼
    prefill (with the filed handle) ── no ──► prefill without it ──► the other prefill engine ──► decode alone
                  │ handover                                                    │
                  ▼                                                             ▼
    decode with the handover ──── refused before the first byte ────► decode alone, elsewhere if there is one

A turn asks at most four times for prefill and at most three times for decode. What a client did wrong (4xx)
is not tried again, but for prefill's word on a request with a handle: the same request without one may be
right, and no return may cause an error that plain prefill would not. Nothing is tried again once a byte has
reached him.
"""

from collections.abc import Callable, Collection
from enum import Enum

import msgspec

from kvloop.core.decision import Option, Route
from kvloop.wire.openai import ALONE

MAX_PREFILL_ENGINES = 2  # the first, and one other
_NONE_LEFT = "no decode engine could serve the request"


class Failure(Enum):
    """How far a hop got that failed: no connection, no whole answer, or an answer that is of no use."""

    UNREACHED = "unreached"
    BROKEN = "broken"
    ANSWERED = "answered"


class AskPrefill(msgspec.Struct, frozen=True):
    """Send the prefill hop to `engine`, with `handle` to read back from."""

    engine: str
    handle: bytes | None


class AskDecode(msgspec.Struct, frozen=True):
    """Send the decode hop to `engine`. `handover` is the value of its `kv_transfer_params`."""

    engine: str
    handover: bytes


class GiveUp(msgspec.Struct, frozen=True):
    """Tell the client: the last engine's own answer if it gave one, else `message`."""

    message: str


Step = AskPrefill | AskDecode | GiveUp
ChoosePrefill = Callable[[Collection[str]], str | None]
ChooseDecode = Callable[[str | None, Collection[str], bool], str | None]


class Turn:
    """One turn's way through the engines. Feed each step's outcome in and take the next step.

    `way`: the one that was decided on, None where the request cannot be split and decode computes it all.
    `choose_prefill(excluded)` and `choose_decode(prefill, excluded, last_resort)` name an engine or None:
    another one for the prompt, one to go on from what `prefill` has computed. The last resort may be one that
    failed a moment ago. `failed`: decode engines that are not to be asked. `asked`: the hops so far, each its
    role and engine.
    """

    def __init__(
        self,
        choose_prefill: ChoosePrefill,
        choose_decode: ChooseDecode,
        handle: bytes | None,
        way: Option | None,
        failed: Collection[str] = (),
    ) -> None:
        self.route = Route.DECODE
        self._choose_prefill = choose_prefill
        self._choose_decode = choose_decode
        self._handle = handle
        self._way = way
        self.asked: list[tuple[str, str]] = []
        self._asked: AskPrefill | AskDecode | None = None
        self._tried_prefill: set[str] = set()
        self._failed_decode = set(failed)
        self._prefill_retried = False
        self._decode_retried = False

    @property
    def repeats(self) -> bool:
        """Whether the last step goes to a decode engine that has failed this turn already."""
        return isinstance(self._asked, AskDecode) and self._asked.engine in self._failed_decode

    def start(self) -> Step:
        """The first step."""
        way = self._way
        if way is None:
            return self._decode(None, ALONE)
        if way.prefill is not None:
            return self._prefill(way.prefill, self._handle if way.route is Route.RETURN else None)
        self.route = way.route
        return self._ask(AskDecode(way.decode, ALONE))

    def prefilled(self, handover: bytes, returned_tokens: int | None) -> Step:
        """Prefill answered. `returned_tokens` is what it read back, None if it does not say."""
        asked = self._asked
        assert isinstance(asked, AskPrefill)
        came_back = asked.handle is not None and returned_tokens != 0
        self.route = Route.RETURN if came_back else Route.RECOMPUTE
        return self._decode(asked.engine, handover)

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
            return self._prefill(asked.engine, None)
        if failure is Failure.BROKEN:
            self._handle = None
        return self._other_prefill()

    def prefill_refused(self) -> Step | None:
        """Prefill answered 4xx. None if that is the client's: there was no handle to blame.

        Else the engine is asked once more, and from then on nobody gets the handle.
        """
        asked = self._asked
        assert isinstance(asked, AskPrefill)
        if asked.handle is None:
            return None
        self._handle = None
        return self._prefill(asked.engine, None)

    def decode_failed(self, failure: Failure) -> Step:
        """Decode could not be reached, broke off before its first byte, or answered 5xx.

        Where it was to append, what it holds is as lost as itself. What prefill has computed for one that was
        not even reached, another one can still have.
        """
        refused = self._asked
        assert isinstance(refused, AskDecode)
        self._failed_decode.add(refused.engine)
        if self.route is Route.APPEND:
            self.route, self._handle = Route.DECODE, None
            return self._other_prefill()
        engine = None
        if not self._decode_retried:
            self._decode_retried = True
            engine = self._choose_decode(None, self._failed_decode, False)
            if engine is None and refused.handover is not ALONE:
                engine = refused.engine
        if engine is None:
            return GiveUp(_NONE_LEFT)
        if failure is Failure.UNREACHED and engine != refused.engine:
            return self._ask(AskDecode(engine, refused.handover))
        self.route = Route.DECODE
        return self._ask(AskDecode(engine, ALONE))

    def _prefill(self, engine: str, handle: bytes | None) -> Step:
        self._tried_prefill.add(engine)
        return self._ask(AskPrefill(engine, handle))

    def _other_prefill(self) -> Step:
        engine = None
        if len(self._tried_prefill) < MAX_PREFILL_ENGINES:
            engine = self._choose_prefill(self._tried_prefill)
        return self._decode(None, ALONE) if engine is None else self._prefill(engine, self._handle)

    def _decode(self, prefill: str | None, handover: bytes) -> Step:
        failed = self._failed_decode
        engine = self._choose_decode(prefill, failed, True)
        if engine is None and failed and handover is not ALONE:
            engine = self._choose_decode(prefill, (), True)
        if engine is None:
            return GiveUp(_NONE_LEFT if failed else "there is no decode engine")
        return self._ask(AskDecode(engine, handover))

    def _ask(self, step: AskPrefill | AskDecode) -> Step:
        self._asked = step
        self.asked.append(("prefill" if isinstance(step, AskPrefill) else "decode", step.engine))
        return step
