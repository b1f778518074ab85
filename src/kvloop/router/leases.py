"""The leases behind filed turns: read out of handles, in use while a turn may claim them, ended with it.

Decode's handle names a lease; whoever has the deployment's secret can read which, and where. The keeper
(`core.keeper`) decides what becomes of it. Here it hears what happens to conversations: a turn was filed, one
goes on from it, its answer has begun, nothing leads to it any more. A lease that decode knows no more is not
offered again.
"""

import logging
from collections import Counter
from collections.abc import Iterable

import msgspec

from kvloop.core.handle import LeaseRef
from kvloop.core.keeper import Ending
from kvloop.core.lineage import CONTENT, FiledTurn, Match
from kvloop.errors import HandleError
from kvloop.router.names import SHARED_KINDS
from kvloop.router.renewal import Renewal
from kvloop.wire.handle import decode_handle

logger = logging.getLogger("kvloop.router")

LOG_EVERY_NS = 10_000_000_000


class _Filed(msgspec.Struct):
    kvloop_handle: str | None = None


_FILED = msgspec.json.Decoder(_Filed)


def is_return(match: Match) -> bool:
    """Whether a request goes on from the turn that it found, and does not only share a part with it.

    All of the turn's units say so, or the conversation's own name, whatever became of the history.
    """
    if match.by == CONTENT:
        return match.depth >= match.turn.depth
    return match.by not in SHARED_KINDS


class LeaseUse:
    """One request's time with the lease that it found, from its making to its end."""

    def __init__(self, renewal: Renewal, lease: LeaseRef, returns: bool) -> None:
        """`returns`: the request goes on from all of the lease's turn."""
        self._renewal = renewal
        self._lease_id = lease.lease_id
        renewal.keeper.used(lease.lease_id, renewal.clock_ns(), returns)

    def end(self) -> None:
        """The request needs nothing of the lease any more. To be called once."""
        self._renewal.keeper.done(self._lease_id, self._renewal.clock_ns())
        self._renewal.nudge()


class TurnLeases:
    """The leases of one router's filed turns. `refused` counts handles that could not be read, by reason."""

    def __init__(self, renewal: Renewal, key: bytes) -> None:
        self.refused: Counter[str] = Counter()
        self.renewal = renewal
        self._keeper = renewal.keeper
        self._clock_ns = renewal.clock_ns
        self._key = key
        self._silent_until_ns = 0

    def read(self, handle: bytes) -> LeaseRef | None:
        """The lease that a filed handle names; None for upstream's, or one that our secret does not open."""
        try:
            text = _FILED.decode(handle).kvloop_handle
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            text = None
        if text is None:
            return None
        try:
            return LeaseRef.of(decode_handle(text, self._key))
        except HandleError as error:
            self.refused[error.reason] += 1
            now_ns = self._clock_ns()
            if now_ns >= self._silent_until_ns:
                self._silent_until_ns = now_ns + LOG_EVERY_NS
                logger.warning("a handle cannot be read (%s); is --secret-file the engines' own?", error)
            return None

    def filed(self, turn: FiledTurn, ending: str, keep_ns: int | None) -> None:
        """A turn that ended so was filed. `keep_ns`: its client's wish, None for none."""
        if turn.lease is not None:
            self._keeper.filed(turn.lease, turn.tenant, Ending(ending), self._clock_ns(), keep_ns)
            self.renewal.nudge()

    def keep(self, turn: FiledTurn, keep_ns: int) -> bool:
        """Keep a turn's lease so long from now. False where it has none, or decode has let it go."""
        if turn.lease is None or self.are_gone(turn):
            return False
        kept = self._keeper.keep(turn.lease.lease_id, keep_ns, self._clock_ns())
        self.renewal.nudge()
        return kept

    def use(self, match: Match) -> LeaseUse | None:
        """A request that found this may claim its lease from now on; None where there is none."""
        return (
            None if match.turn.lease is None else LeaseUse(self.renewal, match.turn.lease, is_return(match))
        )

    def ended(self, turns: Iterable[FiledTurn]) -> None:
        """Nothing leads to these turns any more."""
        for turn in turns:
            if turn.lease is not None:
                self.renewal.gone.pop(turn.lease.lease_id, None)
                self._keeper.ended(turn.lease.lease_id, self._clock_ns())
        self.renewal.nudge()

    def are_gone(self, turn: FiledTurn) -> bool:
        """Whether there is nothing to read back for this turn."""
        return turn.lease is not None and turn.lease.lease_id in self.renewal.gone
