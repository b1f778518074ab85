"""One prefill request's read, as the connector knows it beside the book: whom it asks, what goes where."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvloop.connector.turn import Turn
from kvloop.control.address import Address
from kvloop.core.handle import Handle
from kvloop.wire.control import Source


class Question(NamedTuple):
    """What a reply is the answer to."""

    request_id: str
    ask_id: int
    address: Address


@dataclass(slots=True)
class Read:
    """`handle` is None until a question has gone out, `source` until one was granted. `waited`: the scheduler
    was held for the last question's answer. `target_blocks` are empty until the read was ordered, and
    `left`: the request ended before its read did."""

    turn: Turn
    handle: Handle | None = None
    source: Source | None = None
    waited: bool = False
    matched_tokens: int = 0
    remote_blocks: tuple[int, ...] = ()
    deadline_ns: int = 0
    ordered_ns: int = 0
    target_blocks: list[int] = field(default_factory=list)
    in_flight: bool = False
    left: bool = False

    def where(self, source: Source) -> dict[str, Any]:
        """The transfer parameters for vLLM's worker: which blocks, at which engine."""
        return {
            "remote_block_ids": [list(self.remote_blocks)],
            "remote_engine_id": source.engine_id,
            "remote_request_id": source.request_id,
            "remote_host": source.host,
            "remote_port": source.port,
            "tp_size": source.tp_size,
            "pp_size": source.pp_size,
            "dcp_size": source.dcp_size,
            "remote_num_tokens": self.matched_tokens,
        }
