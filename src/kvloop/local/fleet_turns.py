"""The router's own turn machine, as the fleet simulation takes it.

The simulation stands beside the router and imports nothing of it; this is where the two meet.
"""

from __future__ import annotations

from kvloop.core.decision import Option
from kvloop.router.turn import AskDecode, AskPrefill, Failure, GiveUp, Step, Turn
from kvloop.sim.fleet import turns
from kvloop.wire.openai import ALONE

_HANDLE, _HANDOVER = b"handle", b"handover"
_FAILURES = {
    turns.Trouble.UNREACHED: Failure.UNREACHED,
    turns.Trouble.BROKEN: Failure.BROKEN,
    turns.Trouble.ANSWERED: Failure.ANSWERED,
}


class RouterTurn:
    """One turn's machine. Handle and handover stay with the caller; it only says whether to use them."""

    def __init__(
        self,
        choose_prefill: turns.ChoosePrefill,
        choose_decode: turns.ChooseDecode,
        has_handle: bool,
        way: Option | None,
    ) -> None:
        self._turn = Turn(choose_prefill, choose_decode, _HANDLE if has_handle else None, way)

    def start(self) -> turns.Step:
        """The first step."""
        return _shown(self._turn.start())

    def prefilled(self, returned_tokens: int | None) -> turns.Step:
        """Prefill answered."""
        return _shown(self._turn.prefilled(_HANDOVER, returned_tokens))

    def prefill_failed(self, trouble: turns.Trouble) -> turns.Step:
        """Prefill gave nothing."""
        return _shown(self._turn.prefill_failed(_FAILURES[trouble]))

    def decode_failed(self, trouble: turns.Trouble) -> turns.Step:
        """Decode gave nothing."""
        return _shown(self._turn.decode_failed(_FAILURES[trouble]))


def _shown(step: Step) -> turns.Step:
    match step:
        case AskPrefill():
            return turns.Prefill(step.engine, step.handle is not None)
        case AskDecode():
            return turns.Decode(step.engine, step.handover is not ALONE)
        case GiveUp():
            return turns.Refuse(step.message)
