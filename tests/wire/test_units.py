"""Units of a prompt: what a client sends again is the same bytes again, however it is wrapped."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloop.core.lineage import MAX_UNITS
from kvloop.wire.openai import Endpoint, RequestError, read_generation
from kvloop.wire.units import PROMPT_UNIT_BYTES, ROOT_FIELDS, root_of, user_item
from tests.wire.streams import NASTY

MARK = {"cache_control": {"type": "ephemeral"}}


def units(endpoint: Endpoint, **fields: Any) -> list[bytes]:
    """A request's units."""
    body = json.dumps({"model": "m", **fields}, separators=(",", ":")).encode()
    return [bytes(unit) for unit in read_generation(endpoint, body).units]


def root(endpoint: Endpoint, **fields: Any) -> list[bytes]:
    """A request's root."""
    prompt = {"input": "x", "messages": [], "prompt": "x"}
    return root_of(
        endpoint, read_generation(endpoint, json.dumps({"model": "m", **prompt, **fields}).encode()).fields
    )


def test_a_string_is_a_user_s_item() -> None:
    """The one that a client writes who goes on with the whole history."""
    item = {"role": "user", "content": NASTY}
    assert units(Endpoint.RESPONSES, input=NASTY) == units(Endpoint.RESPONSES, input=[item])
    assert json.loads(user_item(json.dumps(NASTY).encode())) == item


def test_cache_marks_are_no_part_of_a_message() -> None:
    """Whatever stands before or after them; text that looks like one stays."""

    def message(*blocks: dict[str, Any]) -> list[bytes]:
        return units(Endpoint.MESSAGES, messages=[{"role": "user", "content": list(blocks)}])

    text = {"type": "text", "text": 'say "cache_control": {"type":"ephemeral"}, please'}
    plain = message(text, text)
    for mark in (MARK, {"cache_control": {"type": "ephemeral", "ttl": "1h"}}, {"cache_control": None}):
        assert message({**text, **mark}, text) == message({**mark, **text}, {**text, **mark}) == plain
    assert message({**text, "text": "other"}, text) != plain
    assert b"please" in plain[0]
    chat = [{"role": "user", "content": [{**text, **MARK}]}]
    assert b'"cache_control":{' in units(Endpoint.CHAT, messages=chat)[0]


def test_roots() -> None:
    """Each field that stands before the first unit counts, on every endpoint; a billing line does not."""
    for endpoint in Endpoint:
        for name in ROOT_FIELDS:
            assert root(endpoint, **{name: {"a": 1}}) != root(endpoint)
            assert root(endpoint, **{name: {"a": 1}}) != root(endpoint, **{name: {"a": 2}})

    def system(*texts: str) -> list[dict[str, Any]]:
        return [{"type": "text", "text": text} for text in texts]

    billing = "x-anthropic-billing-header: cch="
    messages = Endpoint.MESSAGES
    same = root(messages, system=system(billing + "1", "be kind"))
    assert same == root(messages, system=system(billing + "2", "be kind"))
    assert same != root(messages, system=system(billing + "1", "be rude"))
    assert root(messages, system="a") != root(messages, system="b") != root(messages)
    assert root(messages, system=[{**system("a")[0], **MARK}]) == root(messages, system=system("a"))
    assert root(messages, system=billing) != root(messages)


@settings(deadline=None, max_examples=100)
@given(st.text(alphabet="ab\n", max_size=5000), st.text(alphabet="ab\n", max_size=2000))
def test_a_prompt_that_goes_on_keeps_its_units(prompt: str, more: str) -> None:
    """Every whole stretch of a prompt is one of the longer prompt's."""
    before, after = (
        units(Endpoint.COMPLETIONS, prompt=prompt),
        units(Endpoint.COMPLETIONS, prompt=prompt + more),
    )
    assert after[: len(before)] == before


def test_units_are_bounded() -> None:
    """However long a prompt or a history is."""
    long = "x" * (PROMPT_UNIT_BYTES * (MAX_UNITS + 100))
    assert len(units(Endpoint.COMPLETIONS, prompt=long)) < MAX_UNITS + 20
    assert len(units(Endpoint.RESPONSES, input=["an item of some length"] * (MAX_UNITS + 100))) == MAX_UNITS


@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.MESSAGES])
def test_messages_have_to_be_an_array(endpoint: Endpoint) -> None:
    """Else the field is named."""
    with pytest.raises(RequestError) as refused:
        units(endpoint, messages={"a": 1})
    assert refused.value.param == "messages"
