"""Control messages: round trips, bounds, growth, and nothing but a WireError for anything else."""

import json
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloop.core.chain import Identity, build_chain, root_digest
from kvloop.core.handle import HANDLE_VERSION, Handle
from kvloop.core.lease import RefusalReason
from kvloop.errors import MessageInvalidError, MessageUnknownError, ProtocolError, WireError
from kvloop.wire.control import (
    MESSAGE_TYPES,
    Claim,
    Drop,
    Dropped,
    Failed,
    Granted,
    Message,
    Refused,
    Release,
    Released,
    Renew,
    Renewed,
    Source,
    Stat,
    StatReply,
    decode_message,
    encode_message,
)

KEY = bytes(32)
CHAIN = build_chain(KEY, root_digest(KEY, Identity("m", "", "", "", "")), range(100))
HANDLE = Handle(HANDLE_VERSION, "e", "i", "l", "localhost", 1, 1, 1, 1, 100, 1000)
SOURCE = Source("e", "r", "fd00::1", 5600, 8, 1, 1)
MESSAGES: list[Message] = [
    Claim.asking(HANDLE, CHAIN),
    Granted("c", 100, [[1, 2, 3], [0, 70_000, 2]], 30_000, SOURCE),
    Refused(RefusalReason.NO_MATCH),
    Release("c"),
    Released(True),
    Renew([("l", 60_000, 500), ("m", 1, 0)]),
    Renewed(["m"], ["n"]),
    Drop(["l", "m"], True),
    Dropped(2),
    Stat(),
    StatReply("e", "i", {"leases": 2, 'claims_total{outcome="granted"}': 300}),
    Failed("no route"),
]
VECTORS = json.loads((Path(__file__).parent.parent / "vectors" / "control.json").read_text())


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message: Message) -> None:
    """Every message comes out as it went in."""
    assert decode_message(encode_message(message)) == message


def test_every_message_is_tested() -> None:
    """The examples here and the golden bytes cover all messages there are."""
    assert [type(message) for message in MESSAGES] == list(MESSAGE_TYPES)
    assert list(VECTORS) == [kind.__struct_config__.tag for kind in MESSAGE_TYPES]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_bytes_never_change(message: Message) -> None:
    """Engines and routers of two versions understand each other: the bytes are those on file."""
    assert encode_message(message).hex() == VECTORS[message.__struct_config__.tag]


@pytest.mark.parametrize("kind", MESSAGE_TYPES, ids=lambda kind: kind.__name__)
def test_the_page_lists_every_field(kind: type[Message]) -> None:
    """Each message has its row in docs/protocol.md, and the row its fields, in order."""
    page = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text().partition("\n## Messages\n")[2]
    row = next(line for line in page.splitlines() if line.startswith(f"| `{kind.__struct_config__.tag}` |"))
    named = re.findall(r"`(\w+)`", row.split("|")[2])
    fields = [field.name for field in msgspec.structs.fields(kind)]
    assert [name for name in named if name in fields] == fields


def test_a_claim_carries_its_chain() -> None:
    """What decode compares is what prefill built."""
    claim = decode_message(encode_message(Claim.asking(HANDLE, CHAIN)))
    assert isinstance(claim, Claim)
    assert claim.wanted() == CHAIN
    assert (claim.lease_id, claim.incarnation) == ("l", "i")


def test_a_claim_whose_lengths_disagree_is_a_peers_fault() -> None:
    """Bounds alone do not make a chain; the value of `core` is checked where it is built."""
    claim = msgspec.structs.replace(Claim.asking(HANDLE, CHAIN), token_count=99_999)
    with pytest.raises(ProtocolError):
        claim.wanted()


def test_granted_blocks_are_tuples() -> None:
    """A grant's block ids are what `core` calls blocks."""
    granted = Granted("c", 100, [[1, 2], [3]], 1, SOURCE)
    assert granted.blocks() == ((1, 2), (3,))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_may_grow(message: Message) -> None:
    """An element that a later version appends is ignored by this one."""
    elements = msgspec.msgpack.decode(encode_message(message))
    assert decode_message(msgspec.msgpack.encode([*elements, {"new": [1]}])) == message


WHERE = ["e", "r", "h", 1, 1, 1, 1]
OUT_OF_BOUNDS: list[list[object]] = [
    ["claim", "", "i", bytes(16), b"", b"", 0],
    ["claim", "l" * 129, "i", bytes(16), b"", b"", 0],
    ["claim", "l", "i\n", bytes(16), b"", b"", 0],
    ["claim", "l", "i", bytes(15), b"", b"", 0],
    ["claim", "l", "i", bytes(16), bytes((1 << 20) + 1), b"", 0],
    ["claim", "l", "i", bytes(16), b"", bytes(17), 0],
    ["claim", "l", "i", bytes(16), b"", b"", -1],
    ["claim", "l", "i", bytes(16), b"", b"", (1 << 22) + 1],
    ["claim", "l", "i", bytes(16), b"", b""],
    ["granted", "c", 0, [[1]], 1, WHERE],
    ["granted", "c", 1, [], 1, WHERE],
    ["granted", "c", 1, [[]] * 65, 1, WHERE],
    ["granted", "c", 1, [[-1]], 1, WHERE],
    ["granted", "c", 1, [[1 << 31]], 1, WHERE],
    ["granted", "c", 1, [["1"]], 1, WHERE],
    ["granted", "c", 1, [[1]], 0, WHERE],
    ["granted", "c", 1, [[1]], 1, ["e", "r", "h", 0, 1, 1, 1]],
    ["granted", "c", 1, [[1]], 1, ["e", "r", "h", 1, 0, 1, 1]],
    ["granted", "c", 1, [[1]], 1, None],
    ["refused", "r" * 201],
    ["refused"],
    ["release", 7],
    ["released", "yes"],
    ["renew", [["l", 0, 1]]],
    ["renew", [["l", 86_400_001, 1]]],
    ["renew", [["l", 1]]],
    ["renew", [["l", 1, -1]]],
    ["renew", [["l", 1, 1001]]],
    ["renew", [["l", 1, 1]] * 10_001],
    ["renewed", ["l"]],
    ["renewed", [], ["l"] * 10_001],
    ["drop", ["l"] * 10_001, True],
    ["drop", ["l"], 1],
    ["dropped", -1],
    ["stat_reply", "e", "i", {"n": -7}],
    ["stat_reply", "e", "i", {"n": "7"}],
    ["stat_reply", "e", "i", {"": 7}],
    ["stat_reply", "e", "i", {"n" * 101: 7}],
    ["stat_reply", "e", "i", {"n\n": 7}],
    ["stat_reply", "e", "i", {str(number): 7 for number in range(257)}],
    ["stat_reply", "e", "i", [["n", 7]]],
]


@pytest.mark.parametrize("elements", OUT_OF_BOUNDS, ids=lambda elements: str(elements)[:40])
def test_bounds(elements: list[object]) -> None:
    """Whatever breaks a type or a bound is invalid, and goes no further."""
    with pytest.raises(MessageInvalidError):
        decode_message(msgspec.msgpack.encode(elements))


@pytest.mark.parametrize("tag", ["", "steal", "Claim", "granted "])
def test_an_unknown_tag_has_a_reason_of_its_own(tag: str) -> None:
    """A message of a later version is told from a broken one."""
    with pytest.raises(MessageUnknownError):
        decode_message(msgspec.msgpack.encode([tag, 1]))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x90",
        b"\xc0",
        msgspec.msgpack.encode({"claim": 1}),
        msgspec.msgpack.encode([1]),
        b"\x92\xa5renew\xdd\xff\xff\xff\xff",
        b"\x92\xa4stat\xdb\xff\xff\xff\xff",
        b"\x92\xa4stat" + b"\x91" * 100_000,
        b"\x92\xa6failed\xa2\xff\xff",
        b"\x91\xa2\xff\xff",
        msgspec.msgpack.encode(["stat"]) + b"\x00",
    ],
    ids=lambda body: repr(body[:16]),
)
def test_garbage_is_invalid(body: bytes) -> None:
    """Truncated, nested without end, claiming gigabytes, no UTF-8, trailing bytes: invalid, at once."""
    with pytest.raises(MessageInvalidError):
        decode_message(body)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200), st.sampled_from([b"", *(encode_message(message) for message in MESSAGES)]))
def test_only_wire_errors_come_out(noise: bytes, message: bytes) -> None:
    """Random bytes, alone or spliced into a message, give a message within bounds or a WireError."""
    for body in (noise, message[: len(noise)] + noise, message[: len(noise) // 8] + noise + message):
        try:
            decoded = decode_message(body)
        except WireError:
            continue
        assert decode_message(encode_message(decoded)) == decoded
