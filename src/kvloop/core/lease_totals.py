"""What a lease table has seen so far: counts that only grow, and how much memory was held for how long."""

from dataclasses import dataclass, field

from kvloop.core.lease_state import ClaimRefused, RefusalReason

GRANTED = "granted"  # the one outcome of a claim that is no refusal


@dataclass(slots=True)
class LeaseTotals:
    """Since the table was made. Leases that have ended are counted by state elsewhere (`LeaseTable.counts`).

    granted: leases, and of those not_held: given back at once, for the table was full. renewed, and
    renewals_lost: of leases that were gone or ending. claims: by outcome, `granted` or the refusal's reason.
    """

    granted: int = 0
    not_held: int = 0
    renewed: int = 0
    renewals_lost: int = 0
    claims: dict[str, int] = field(
        default_factory=lambda: {GRANTED: 0, **{reason.value: 0 for reason in RefusalReason}}
    )

    def refused(self, reason: RefusalReason) -> ClaimRefused:
        """Count a refusal; the refusal."""
        self.claims[reason.value] += 1
        return ClaimRefused(reason)


class HeldBlocks:
    """How many block references are held, and for how long they have been: blocks x nanoseconds."""

    def __init__(self) -> None:
        self.count = 0
        self._block_ns = 0
        self._since_ns = 0

    def change(self, blocks: int, now_ns: int) -> None:
        """From `now_ns` on so many more, or fewer."""
        self._block_ns = self.block_ns(now_ns)
        self._since_ns = max(self._since_ns, now_ns)
        self.count += blocks

    def block_ns(self, now_ns: int) -> int:
        """The integral up to `now_ns`. A time before the last change counts as that one."""
        return self._block_ns + self.count * max(0, now_ns - self._since_ns)
