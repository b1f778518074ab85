"""Members are cut out and changed in place, whatever stands around them, and nothing else changes."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvloop.wire.members import FIELDS, spliced, with_value, without_member
from tests.wire.streams import NASTY

NAMES = st.sampled_from(["input", "output", 'a"input', "x"])
VALUES = st.recursive(
    st.none() | st.integers() | st.text(max_size=5) | st.just(NASTY) | st.just('"input":[1]'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(NAMES, VALUES, max_size=4).map(lambda made: {**made, "input": [1, "input"]})


def written(value: dict[str, Any], loose: bool) -> bytes:
    """An object as some writer writes it."""
    return json.dumps(value, indent=1 if loose else None, ensure_ascii=loose).encode()


@settings(deadline=None, max_examples=400)
@given(OBJECTS, VALUES, st.booleans())
def test_a_value_is_changed_in_place(value: dict[str, Any], new: Any, loose: bool) -> None:
    """The others keep their bytes, their order and the space around them."""
    body, sent = written(value, loose), json.dumps(new).encode()
    changed = with_value(body, FIELDS.decode(body), "input", sent)
    assert json.loads(changed) == {**value, "input": new}
    assert list(json.loads(changed)) == list(value)
    old = FIELDS.decode(body)["input"]
    assert len(changed) - len(sent) == len(body) - len(bytes(old))


@settings(deadline=None, max_examples=400)
@given(OBJECTS, st.booleans())
def test_a_member_is_cut_out(value: dict[str, Any], loose: bool) -> None:
    """Wherever it stands; and put in again before the closing brace."""
    body = written(value, loose)
    cut = without_member(body, FIELDS.decode(body), "input")
    assert json.loads(cut) == {name: inner for name, inner in value.items() if name != "input"}
    if len(value) > 1:
        assert json.loads(spliced(cut, "input", b"[]")) == {**value, "input": []}


def test_bytes_of_others_stay() -> None:
    """Numbers, escapes and space are not written anew."""
    body = b'{ "a" : 1.50, "input":"x" ,\n"b":"\\u00e9\\/", "c":{"input":"x"} }'
    fields = FIELDS.decode(body)
    assert with_value(body, fields, "input", b"[2]") == body.replace(b'"x" ,', b"[2] ,")
    assert without_member(body, fields, "input") == body.replace(b', "input":"x"', b"")
    assert with_value(body, fields, "c", b"0") == body.replace(b'{"input":"x"}', b"0")


def test_a_name_written_with_escapes() -> None:
    """Is found by no search; the object is written anew."""
    body = b'{"a":1,"\\u0069nput":2}'
    assert json.loads(with_value(body, FIELDS.decode(body), "input", b"3")) == {"a": 1, "input": 3}
    assert json.loads(without_member(body, FIELDS.decode(body), "input")) == {"a": 1}
