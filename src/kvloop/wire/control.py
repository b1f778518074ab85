"""The control channel's messages: what prefill and router ask a decode engine, and what it answers.

Each is a msgpack array whose first element is its tag. Types and bounds are checked while decoding, so
nothing downstream meets a negative block id or an endless string; what a bound cannot say (whether a
chain's lengths agree) is checked when the value of `core` is built. Elements after the last known one are
ignored: that is how a message grows.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from kvloop.core.chain import DIGEST_BYTES, MAX_CHAIN_TOKENS, SEGMENT_TOKENS, Chain
from kvloop.core.handle import Handle
from kvloop.core.lease_state import Blocks
from kvloop.errors import MessageInvalidError, MessageUnknownError

ID_MAX_CHARS = 128
HOST_MAX_CHARS = 255  # the longest DNS name
REASON_MAX_CHARS = 200
MAX_TERM_MS = 24 * 3_600_000
MAX_GROUPS = 64  # KV cache groups; the hybrid models in use have fewer than ten
MAX_BLOCKS = MAX_CHAIN_TOKENS  # per group, at a block size of one token
MAX_LEASES_PER_MESSAGE = 10_000  # one router's heartbeat; more go in several messages
MAX_COUNTERS = 256  # by name; an engine has well under a hundred
COUNTER_MAX_CHARS = 100
MAX_CHANCE = 1000  # permille
_MAX_SEGMENT_BYTES = MAX_CHAIN_TOKENS // SEGMENT_TOKENS * DIGEST_BYTES

Id = Annotated[str, msgspec.Meta(pattern=r"\A[!-~]+\Z", max_length=ID_MAX_CHARS)]
Host = Annotated[str, msgspec.Meta(pattern=r"\A[!-~]+\Z", max_length=HOST_MAX_CHARS)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Reason = Annotated[str, msgspec.Meta(max_length=REASON_MAX_CHARS)]
Ranks = Annotated[int, msgspec.Meta(ge=1, le=1024)]
TermMs = Annotated[int, msgspec.Meta(ge=1, le=MAX_TERM_MS)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_CHAIN_TOKENS)]
BlockId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62))]
Chance = Annotated[int, msgspec.Meta(ge=0, le=MAX_CHANCE)]
CounterName = Annotated[str, msgspec.Meta(pattern=r"\A[ -~]+\Z", max_length=COUNTER_MAX_CHARS)]


class Claim(msgspec.Struct, tag="claim", array_like=True, frozen=True):
    """Prefill asks for what the lease holds of this chain."""

    lease_id: Id
    incarnation: Id
    root: Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
    segments: Annotated[bytes, msgspec.Meta(max_length=_MAX_SEGMENT_BYTES)]
    tail: Annotated[bytes, msgspec.Meta(max_length=DIGEST_BYTES)]
    token_count: Tokens

    @classmethod
    def asking(cls, handle: Handle, wanted: Chain) -> "Claim":
        """The claim for `wanted` on the lease that `handle` names."""
        return cls(
            handle.lease_id, handle.incarnation, wanted.root, wanted.segments, wanted.tail, wanted.token_count
        )

    def wanted(self) -> Chain:
        """The chain asked for; ProtocolError if its lengths disagree."""
        return Chain(self.root, self.segments, self.tail, self.token_count)


class Source(msgspec.Struct, array_like=True, frozen=True):
    """Where the granted blocks are read: the decode engine's NIXL side channel and parallel sizes."""

    engine_id: Id
    request_id: Id
    host: Host
    port: Port
    tp_size: Ranks
    pp_size: Ranks
    dcp_size: Ranks


class Granted(msgspec.Struct, tag="granted", array_like=True, frozen=True):
    """The first `matched_tokens` tokens are proven, and held for `term_ms` from the grant."""

    claim_id: Id
    matched_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHAIN_TOKENS)]
    block_ids: Annotated[
        list[Annotated[list[BlockId], msgspec.Meta(max_length=MAX_BLOCKS)]],
        msgspec.Meta(min_length=1, max_length=MAX_GROUPS),
    ]
    term_ms: TermMs
    source: Source

    def blocks(self) -> Blocks:
        """The block ids as `core` has them."""
        return tuple(tuple(group) for group in self.block_ids)


class Refused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """Nothing is granted; `reason` is a `RefusalReason`, or one of a later version."""

    reason: Reason


class Release(msgspec.Struct, tag="release", array_like=True, frozen=True):
    """The reader is through with its claim."""

    claim_id: Id


class Released(msgspec.Struct, tag="released", array_like=True, frozen=True):
    """Whether the claim was still there."""

    ok: bool


class Renew(msgspec.Struct, tag="renew", array_like=True, frozen=True):
    """A router's heartbeat: let each lease last so many milliseconds from now.

    With each the chance, in permille, that its conversation returns: what the router has learned orders the
    leases that decode reclaims.
    """

    leases: Annotated[list[tuple[Id, TermMs, Chance]], msgspec.Meta(max_length=MAX_LEASES_PER_MESSAGE)]


class Renewed(msgspec.Struct, tag="renewed", array_like=True, frozen=True):
    """The leases that were not renewed: those `gone` for good, and those whose blocks are held no more but
    may still be claimed where nothing else was written to them (`soft`). All others were.
    """

    gone: Annotated[list[Id], msgspec.Meta(max_length=MAX_LEASES_PER_MESSAGE)]
    soft: Annotated[list[Id], msgspec.Meta(max_length=MAX_LEASES_PER_MESSAGE)]


class Drop(msgspec.Struct, tag="drop", array_like=True, frozen=True):
    """These leases need not be held. `is_over`: nobody will ask again, so nothing of them is remembered."""

    lease_ids: Annotated[list[Id], msgspec.Meta(max_length=MAX_LEASES_PER_MESSAGE)]
    is_over: bool = False


class Dropped(msgspec.Struct, tag="dropped", array_like=True, frozen=True):
    """How many of them were there."""

    dropped: Count


class Stat(msgspec.Struct, tag="stat", array_like=True, frozen=True):
    """How do you do?"""


class StatReply(msgspec.Struct, tag="stat_reply", array_like=True, frozen=True):
    """Who answers, and its gauges and totals by name: samples of its metrics, with their labels."""

    engine_id: Id
    incarnation: Id
    counters: Annotated[dict[CounterName, Count], msgspec.Meta(max_length=MAX_COUNTERS)]


class Failed(msgspec.Struct, tag="failed", array_like=True, frozen=True):
    """The question could not be answered, or not even asked."""

    reason: Reason


Message = (
    Claim
    | Granted
    | Refused
    | Release
    | Released
    | Renew
    | Renewed
    | Drop
    | Dropped
    | Stat
    | StatReply
    | Failed
)
MESSAGE_TYPES: Sequence[type[Message]] = (
    Claim,
    Granted,
    Refused,
    Release,
    Released,
    Renew,
    Renewed,
    Drop,
    Dropped,
    Stat,
    StatReply,
    Failed,
)


class _Tagged(msgspec.Struct, array_like=True, frozen=True):
    tag: Annotated[str, msgspec.Meta(max_length=ID_MAX_CHARS)]


_TAG_DECODER = msgspec.msgpack.Decoder(_Tagged)
_DECODERS: dict[str, msgspec.msgpack.Decoder[Message]] = {
    str(kind.__struct_config__.tag): msgspec.msgpack.Decoder(kind) for kind in MESSAGE_TYPES
}
_ENCODER = msgspec.msgpack.Encoder()


def encode_message(message: Message) -> bytes:
    """The message as msgpack. Bounds are the receiver's to check."""
    return _ENCODER.encode(message)


def decode_message(body: bytes) -> Message:
    """The message, types and bounds checked. MessageUnknownError for its tag, MessageInvalidError else."""
    try:
        decoder = _DECODERS.get(_TAG_DECODER.decode(body).tag)
        if decoder is None:
            raise MessageUnknownError
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise MessageInvalidError(str(error)[:REASON_MAX_CHARS]) from error
