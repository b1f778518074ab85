"""Everything that one engine counts, under the names that `metrics` explains."""

import time
from collections.abc import Callable

from kvloop.connector.conservation import Conservation
from kvloop.connector.leases import Leases
from kvloop.connector.metrics import labelled, sample
from kvloop.connector.pressure import Pressure
from kvloop.connector.settings import NS_PER_S
from kvloop.connector.tally import Tally
from kvloop.core.lease import LeaseState


class Account:
    """Puts together what the parts count. `frames_dropped()`: the control channel's, by reason."""

    def __init__(
        self,
        leases: Leases,
        pressure: Pressure,
        conservation: Conservation,
        tally: Tally,
        *,
        frames_dropped: Callable[[], dict[str, int]],
    ) -> None:
        self._leases = leases
        self._pressure = pressure
        self._conservation = conservation
        self._tally = tally
        self._frames_dropped = frames_dropped

    def counters(self) -> dict[str, int]:
        """All of it now. For whoever holds the leases' lock, on any thread."""
        table = self._leases.table
        counts, totals = table.counts(), table.totals
        now = {state: counts[state] for state in (LeaseState.GRANTED, LeaseState.CLAIMED)}
        ended = {state.value: count for state, count in counts.items() if state not in now}
        held_block_s = table.held_block_ns(time.monotonic_ns()) // NS_PER_S
        states = {state.value: count for state, count in now.items()} | {"soft": self._leases.soft_count()}
        allocations = {
            "relieved": self._pressure.relieved_total,
            "refused": self._pressure.refused_total,
        }
        return {
            **labelled("kvloop_leases", "state", states),
            sample("kvloop_lease_blocks"): table.held_blocks,
            sample("kvloop_lease_bytes"): table.held_blocks * self._tally.block_bytes,
            sample("kvloop_lease_block_seconds_total"): held_block_s,
            sample("kvloop_leases_granted_total"): totals.granted,
            **labelled("kvloop_leases_ended_total", "state", ended),
            **labelled("kvloop_claims_total", "outcome", totals.claims),
            **labelled(
                "kvloop_renewals_total", "outcome", {"renewed": totals.renewed, "lost": totals.renewals_lost}
            ),
            **labelled("kvloop_allocations_total", "outcome", allocations),
            **labelled("kvloop_control_frames_dropped_total", "reason", self._frames_dropped()),
            sample("kvloop_unbalanced_blocks"): self._conservation.worst_unbalanced,
            sample("kvloop_balance_checks_total"): self._conservation.checks_total,
            **self._tally.counts(),
        }
