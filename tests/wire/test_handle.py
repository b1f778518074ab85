"""A handle's text: short, the same for ever, and nothing but a HandleError for anything else."""

import base64
import json
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloop.core.handle import HANDLE_VERSION, Handle
from kvloop.core.key import HANDLE_PURPOSE, keyed_digest
from kvloop.errors import HandleError, UserError
from kvloop.wire.handle import HANDLE_MAX_BYTES, decode_handle, encode_handle

KEY = bytes(range(32))
HANDLE = Handle(HANDLE_VERSION, "decode-0", "5f3a", "9c1e", "fd00::1", 5600, 8, 1, 1, 130_000, 480_000)
VECTORS = json.loads((Path(__file__).parent.parent / "vectors" / "handle.json").read_text())
quick = settings(deadline=None, max_examples=200)

printable = st.characters(min_codepoint=0x21, max_codepoint=0x7E)
handles = st.builds(
    Handle,
    version=st.just(HANDLE_VERSION),
    engine_id=st.text(printable, min_size=1, max_size=64),
    incarnation=st.text(printable, min_size=1, max_size=32),
    lease_id=st.text(printable, min_size=1, max_size=32),
    control_host=st.text(printable, min_size=1, max_size=40),
    control_port=st.integers(1, 65535),
    tp_size=st.integers(1, 1024),
    pp_size=st.integers(1, 1024),
    dcp_size=st.integers(1, 1024),
    token_count=st.integers(1, 1 << 22),
    expires_in_ms=st.integers(0, 86_400_000),
)


def sealed(fields: object) -> str:
    """Any msgpack body, authenticated with the right key."""
    body = msgspec.msgpack.encode(fields)
    return base64.urlsafe_b64encode(body + keyed_digest(KEY, HANDLE_PURPOSE, body)).decode().rstrip("=")


def refusal(text: str, key: bytes = KEY) -> str:
    """The reason for which `text` is no handle."""
    with pytest.raises(HandleError) as caught:
        decode_handle(text, key)
    return caught.value.reason


@quick
@given(handles)
def test_round_trip_is_short(handle: Handle) -> None:
    """What is encoded is decoded, in under 300 ASCII bytes that need no quoting in a URL or in JSON."""
    text = encode_handle(handle, KEY)
    assert decode_handle(text, KEY) == handle
    assert len(text.encode("ascii")) <= HANDLE_MAX_BYTES < 300
    assert text.replace("-", "").replace("_", "").isalnum()


def test_a_uuid_engine_in_a_cluster_fits() -> None:
    """The longest names in practice: a data-parallel rank's uuid, random ids, a pod's full DNS name."""
    engine_id, host = (
        "01234567-89ab-cdef-0123-456789abcdef_dp15",
        "decode-15.decode.llm-serving.svc.cluster.local",
    )
    handle = replace(HANDLE, engine_id=engine_id, control_host=host, incarnation="f" * 16, lease_id="f" * 32)
    assert len(encode_handle(handle, KEY)) <= HANDLE_MAX_BYTES


def test_names_that_are_too_long_together_are_refused() -> None:
    """Each within its own bound and all of them too long: an error where the handle is made, not later."""
    with pytest.raises(HandleError) as caught:
        encode_handle(replace(HANDLE, engine_id="e" * 64, lease_id="l" * 64, control_host="h" * 64), KEY)
    assert caught.value.reason == "too_long"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("engine_id", ""),
        ("engine_id", "e" * 65),
        ("engine_id", "ümlaut"),
        ("incarnation", "a b"),
        ("lease_id", "line\n"),
        ("lease_id", "\udc80"),
        ("control_host", "h" * 129),
        ("control_port", 0),
        ("control_port", 65536),
        ("tp_size", 0),
        ("pp_size", 1025),
        ("dcp_size", -1),
        ("token_count", 0),
        ("token_count", (1 << 22) + 1),
        ("expires_in_ms", -1),
        ("expires_in_ms", 1 << 80),
        ("version", HANDLE_VERSION + 1),
    ],
)
def test_fields_are_bounded_when_encoding(field: str, value: object) -> None:
    """A field out of its bounds never leaves the engine."""
    with pytest.raises(HandleError) as caught:
        encode_handle(replace(HANDLE, **{field: value}), KEY)  # type: ignore[arg-type]
    assert caught.value.reason == "field"


@pytest.mark.parametrize(
    ("position", "value"),
    [(1, "ü"), (3, ""), (4, "h" * 129), (5, 0), (6, 4096), (9, -1), (9, 1.5), (10, None), (2, b"bytes")],
)
def test_fields_are_bounded_when_decoding(position: int, value: object) -> None:
    """Even with the right key, a field out of its bounds is refused, and named."""
    fields = list(asdict(HANDLE).items())
    values = [content for _, content in fields]
    values[position] = value
    with pytest.raises(HandleError) as caught:
        decode_handle(sealed(values), KEY)
    assert (caught.value.reason, caught.value.field) == ("field", fields[position][0])


def test_a_missing_or_an_additional_field_is_refused() -> None:
    """This version has eleven fields, no fewer and no more."""
    values = list(asdict(HANDLE).values())
    assert refusal(sealed(values[:-1])) == "field"
    assert refusal(sealed([*values, "more"])) == "field"


def test_a_handle_from_the_future_is_told_from_garbage() -> None:
    """An authentic handle of a later version, whatever its fields: version, not malformed."""
    assert refusal(sealed([HANDLE_VERSION + 1, {"all": "new"}])) == "version"
    assert refusal(sealed([HANDLE_VERSION + 1])) == "version"


@quick
@given(st.data())
def test_every_changed_character_is_noticed(data: st.DataObject) -> None:
    """Tampering at any place, and truncation anywhere, gives forged or malformed, never another handle."""
    text = encode_handle(HANDLE, KEY)
    place = data.draw(st.integers(0, len(text) - 1))
    changed = data.draw(
        st.characters(min_codepoint=1, max_codepoint=0x2FF).filter(lambda c: c != text[place])
    )
    assert refusal(text[:place] + changed + text[place + 1 :]) in ("forged", "malformed")
    assert refusal(text[:place]) in ("forged", "malformed")


def test_another_key_is_forged() -> None:
    """A handle of another deployment is none of ours."""
    assert refusal(encode_handle(HANDLE, KEY), bytes(32)) == "forged"


def test_a_digest_made_for_something_else_is_forged() -> None:
    """The same key and bytes under another purpose authenticate nothing here."""
    body = msgspec.msgpack.encode(list(asdict(HANDLE).values()))
    text = base64.urlsafe_b64encode(body + keyed_digest(KEY, b"kvloop.frame", body)).decode().rstrip("=")
    assert refusal(text) == "forged"


def test_one_handle_has_one_text() -> None:
    """Padding, other alphabets, trailing bits and white space are not accepted as spellings of it."""
    handle = replace(HANDLE, lease_id="9c1e0")  # a length whose last character has bits to spare
    text = encode_handle(handle, KEY)
    assert len(text) % 4 != 0
    last = chr(ord(text[-1]) + 1)
    for variant in (text + "=", text + "\n", " " + text, text[:-1] + last, text + "==="):
        assert refusal(variant) in ("malformed", "forged")


@pytest.mark.parametrize("text", ["", "A", "AAAA", "ü", "\udc80", "A" * 16, "=" * 20, "A" * 299])
def test_garbage_is_malformed_or_forged(text: str) -> None:
    """The empty string, single letters, non-ASCII: an answer each."""
    assert refusal(text) in ("malformed", "forged")


def test_oversize_is_not_even_looked_at() -> None:
    """300 characters are one too many."""
    assert refusal("A" * (HANDLE_MAX_BYTES + 1)) == "too_long"


@quick
@given(st.text(max_size=310) | st.binary(max_size=220).map(lambda b: base64.urlsafe_b64encode(b).decode()))
def test_only_handle_errors_come_out(text: str) -> None:
    """No text makes anything but a HandleError."""
    refusal(text)


@quick
@given(st.binary(max_size=200))
def test_only_handle_errors_come_out_of_authentic_garbage(body: bytes) -> None:
    """Not even bytes that were authenticated with our key."""
    text = base64.urlsafe_b64encode(body + keyed_digest(KEY, HANDLE_PURPOSE, body)).decode().rstrip("=")
    assert refusal(text) in ("malformed", "version", "field")


def test_a_short_key_is_the_operators_fault() -> None:
    """No handle is made or read under a key that could be guessed."""
    with pytest.raises(UserError):
        encode_handle(HANDLE, b"")


@pytest.mark.parametrize("vector", VECTORS["handles"], ids=lambda vector: vector["fields"]["engine_id"])
def test_text_never_changes(vector: dict[str, object]) -> None:
    """Handles that routers have on file stay readable: fields and text are those of the vector."""
    handle = Handle(**vector["fields"])  # type: ignore[arg-type]
    key = bytes.fromhex(VECTORS["key"])
    assert encode_handle(handle, key) == vector["text"]
    assert decode_handle(str(vector["text"]), key) == handle
