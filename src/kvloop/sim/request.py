"""What goes into a simulated engine, and what comes out: values, no behaviour.

Whoever drives an engine (an HTTP server, a simulation's event heap) carries these between it and the world:
requests in, events out. Times are nanoseconds of the engine's own monotonic clock.
"""

from enum import StrEnum

from msgspec import Struct

from kvloop.sim.text import Text
from kvloop.wire.control import Message

Address = tuple[str, int]  # of a control or side channel


class Hop(StrEnum):
    """What the router wants of a request: a prompt for another engine, an answer to it, or all of it."""

    PREFILL = "prefill"
    DECODE = "decode"
    ALONE = "alone"


class Reason(StrEnum):
    """Why an answer ended, in vLLM's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Handover(Struct, frozen=True):
    """Where prefill keeps a prompt's KV until decode has read it. `cached_tokens`: of its turn's account."""

    engine_id: str
    incarnation: str
    request_id: str
    address: Address
    blocks: tuple[int, ...]
    token_count: int
    cached_tokens: int = 0


class Request(Struct, frozen=True):
    """One prompt. `salt` as in vLLM's `cache_salt`; `hop` None: nobody will come back for it.

    `handle` is the text to read back from; `handover` is where to pull the prompt from; `retain` False asks
    decode to keep nothing. `ends_at`: answer after so many tokens, None: where the model likes.
    """

    request_id: str
    text: Text
    max_tokens: int
    salt: str = ""
    hop: Hop | None = None
    handle: object = None
    handover: Handover | None = None
    retain: bool = True
    ends_at: int | None = None


class Sampled(Struct, frozen=True):
    """Tokens of an answer, four bytes each, and how many prompt tokens had not to be computed here."""

    request_id: str
    data: bytes
    cached_tokens: int


class Finished(Struct, frozen=True):
    """A request has ended. `turn`, `handover`: prefill's account and blocks; `decoded`, `handle`: decode's.

    `wrong`: at some time it computed from KV that was not its own tokens'.
    """

    request_id: str
    reason: Reason
    wrong: bool
    turn: dict[str, object] | None = None
    handover: Handover | None = None
    handle: str | None = None
    decoded: dict[str, object] | None = None


class Send(Struct, frozen=True):
    """Send a control message; an answer comes back to `hear` with `tag`, None wants none."""

    address: Address
    message: Message
    tag: object = None


class StartRead(Struct, frozen=True):
    """Begin to read another engine's blocks, which takes `takes_ns`; then tell `read_ended` what they held.

    `request_id` is the handover's whose blocks these are, None for blocks under the claim `claim_id`;
    `reader` is the request here. Reading is what it is on real hardware: what lies there is copied, without
    anybody being asked.
    """

    read_id: str
    reader: str
    engine_id: str
    incarnation: str
    address: Address
    request_id: str | None
    blocks: tuple[int, ...]
    takes_ns: int
    claim_id: str = ""


class ReadDone(Struct, frozen=True):
    """Tell prefill that its handover is not needed any more."""

    engine_id: str
    address: Address
    request_id: str


class Starved(Struct, frozen=True):
    """A request has to wait for blocks, or lost its own, while so many leases are unclaimed: what has ended
    by the time that somebody hears of it is not in it."""

    request_id: str
    missing_blocks: int
    unclaimed_leases: int


Event = Sampled | Finished | Send | StartRead | ReadDone | Starved
