"""The messages between the connector's two halves: orders go down with a step, news comes up with its output.

Down: which reads carry a deadline, and which incarnation of a peer each transfer expects. Up: reads that
had to be abandoned while bytes could still arrive (late), and those whose transfer has since ended. The
scheduler half sets the blocks of a late read aside until every worker that was late has said that its
transfer ended.

Deadlines go down as instants and not as time left: a step may reach its worker late, and vLLM begins a
step's reads after the step's forward pass. Time that passes on the way must not be given to the read.
"""

import time
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@cache
def _boot_id() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class ClockReading:
    """One moment on a process's clocks, from which another process places the first one's instants.

    Monotonic clocks can be compared within one boot of one machine. Between machines only wall clocks can,
    as well as they are kept; what they are off by is part of what every claim's term is cut by.
    """

    boot_id: str
    monotonic_ns: int
    wall_ns: int

    @classmethod
    def now(cls) -> "ClockReading":
        """This process's clocks."""
        return cls(_boot_id(), time.monotonic_ns(), time.time_ns())

    def placed_here(self, instant_ns: int) -> int:
        """When an instant of the clock that was read is on this process's monotonic clock."""
        here = ClockReading.now()
        if self.boot_id and self.boot_id == here.boot_id:
            return instant_ns
        age_ns = max(0, here.wall_ns - self.wall_ns)
        return here.monotonic_ns - age_ns + (instant_ns - self.monotonic_ns)


class KvloopMetadata(NixlConnectorMetadata):
    """NIXL's step metadata plus what kvloop's worker needs to know.

    `clock`: the scheduler's, when the step was built.
    `deadlines_ns`: request id -> the instant on that clock by which its read must have ended.
    `incarnations`: engine id -> the incarnation that a transfer of this step expects there.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.clock = ClockReading.now()
        self.deadlines_ns: dict[str, int] = {}
        self.incarnations: dict[str, str] = {}

    @classmethod
    def extend(cls, base: NixlConnectorMetadata) -> "KvloopMetadata":
        """The same orders as `base`, with room for kvloop's own."""
        meta = cls()
        meta.__dict__.update(base.__dict__)
        return meta


@dataclass
class WorkerNews(KVConnectorWorkerMetadata):
    """Counts of workers, by request id: how many had to give up a read, how many of those transfers ended."""

    late: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerNews":
        """Sum over tensor-parallel workers."""
        if not isinstance(other, WorkerNews):
            raise TypeError(f"cannot add {type(other).__name__} to kvloop's worker news")
        return WorkerNews(self.late + other.late, self.ended + other.ended)
