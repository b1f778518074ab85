"""A conversation that is put together is the one that its turns were, item by item."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloop.wire.openai import Endpoint, Generation, RequestError, read_generation
from kvloop.wire.thread import expanded, is_stored, own_stretch, previous_of, response_id_of
from tests.wire.streams import NASTY

ITEMS = st.lists(
    st.dictionaries(
        st.sampled_from(["role", "content", "input", "previous_response_id", "output"]),
        st.text(max_size=4) | st.just(NASTY) | st.just('"input":[1],') | st.none(),
        max_size=3,
    ),
    max_size=3,
)
INPUTS = ITEMS | st.text(max_size=6) | st.just(NASTY)


def request(loose: bool = False, **fields: Any) -> Generation:
    """A request, as some client writes it."""
    body = json.dumps({"model": "m", "input": "x", **fields}, indent=1 if loose else None)
    return read_generation(Endpoint.RESPONSES, body.encode())


def whole(sent: Any) -> list[Any]:
    """The items that an input stands for."""
    return [{"role": "user", "content": sent}] if isinstance(sent, str) else list(sent)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(INPUTS, ITEMS), max_size=3), INPUTS, st.booleans(), st.booleans())
def test_any_conversation(turns: list[tuple[Any, list[Any]]], own: Any, loose: bool, late: bool) -> None:
    """Whatever items say, and whatever stands between them: earlier turns first, then the request's own."""
    stretches, history = [], []
    for sent, output in turns:
        response = json.dumps({"id": "r", "output": output}, indent=2 if loose else None).encode()
        stretches.append(own_stretch(json.dumps(sent, indent=1 if loose else None).encode(), response))
        history += whole(sent) + output
    previous = {"previous_response_id": "r"}
    fields = {"input": own, **previous} if late else {**previous, "input": own}
    going_on = request(loose, **fields, temperature=0.5)
    put_together = expanded(going_on, stretches)
    assert json.loads(put_together.raw) == {
        "model": "m",
        "input": history + whole(own),
        "temperature": 0.5,
    }
    assert len(put_together.units) == len(history) + len(whole(own))
    assert previous_of(put_together) is None


@pytest.mark.parametrize("wrong", ["", "x" * 257, 5, ["a"], {}])
def test_what_is_no_id(wrong: Any) -> None:
    """Is refused by its name; null is none."""
    with pytest.raises(RequestError) as refused:
        previous_of(request(previous_response_id=wrong))
    assert refused.value.param == "previous_response_id"
    assert previous_of(request(previous_response_id=None)) is previous_of(request()) is None
    assert previous_of(request(previous_response_id="x" * 256)) == "x" * 256


def test_what_is_stored() -> None:
    """All that does not say otherwise, and has come to an end under a name."""
    assert is_stored(request())
    assert is_stored(request(store=None))
    assert is_stored(request(store=True))
    assert not is_stored(request(store=False))
    for body, name in (
        (b'{"id":"a","status":"completed"}', "a"),
        (b'{"id":"a","status":"incomplete"}', "a"),
        (b'{"id":"a","status":"failed"}', None),
        (b'{"id":"a"}', None),
        (b'{"id":"","status":"completed"}', None),
        (b'{"id":"%b","status":"completed"}' % (b"x" * 257), None),
        (b'{"id":5,"status":"completed"}', None),
        (b"[]", None),
        (b"no", None),
    ):
        assert response_id_of(body) == name
