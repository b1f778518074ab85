"""What a client's answer carries about the KV that decode kept: where to ask, and for what.

A handle names a lease; it holds no block ids and proves nothing. Whoever presents one still has to show,
digest by digest, that its prompt is what the KV was computed for. The incarnation is drawn anew each
time an engine starts, so a handle outlives neither the process nor its memory.
"""

from dataclasses import dataclass
from typing import NamedTuple

HANDLE_VERSION = 1


@dataclass(frozen=True, slots=True)
class Handle:
    """Where a lease lives. `expires_in_ms` counts from when the handle was made, and is a hint only.

    engine_id, incarnation, lease_id, control_host: printable ASCII. control_port: 1 to 65535.
    tp_size, pp_size, dcp_size: ranks of the decode engine. token_count: tokens whose KV is held.
    """

    version: int
    engine_id: str
    incarnation: str
    lease_id: str
    control_host: str
    control_port: int
    tp_size: int
    pp_size: int
    dcp_size: int
    token_count: int
    expires_in_ms: int


class LeaseRef(NamedTuple):
    """What a router needs of a handle: which lease, of which run of which engine, and where to reach it.

    address: the engine's control host and port. token_count: tokens whose KV is held. term_ms: how long it
    lasts without a renewal, from when the handle was made.
    """

    lease_id: str
    incarnation: str
    address: tuple[str, int]
    token_count: int
    term_ms: int

    @classmethod
    def of(cls, handle: Handle) -> "LeaseRef":
        """The lease that `handle` names."""
        address = (handle.control_host, handle.control_port)
        return cls(handle.lease_id, handle.incarnation, address, handle.token_count, handle.expires_in_ms)
