"""The messages between the connector's two halves: orders go down with a step, news comes up with its output.

Down: which reads carry a deadline, and which incarnation of a peer each transfer expects. Up: reads that
had to be abandoned while bytes could still arrive (late), and those whose transfer has since ended. The
scheduler half sets the blocks of a late read aside until every worker that was late has said that its
transfer ended.
"""

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata


class KvloopMetadata(NixlConnectorMetadata):
    """NIXL's step metadata plus what kvloop's worker needs to know.

    `deadlines_ns`: request id -> nanoseconds left for its read when the step was built.
    `incarnations`: engine id -> the incarnation that a transfer of this step expects there.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
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
