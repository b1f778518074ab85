"""How answers ended, in streams and in JSON."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloop.wire.ending import ENDINGS, STOP, ending_of_answer, ending_of_events
from kvloop.wire.sse import HandleFilter

HANDLE = b'data: {"object":"kvloop.handle","choices":[],"kv_transfer_params":{"kvloop_handle":"h"}}\n\n'
USAGE = b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":1}}\n\n'
DONE = b"data: [DONE]\n\n"


def event(content: str, reason: str | None) -> bytes:
    """One event as vLLM writes it: compact JSON."""
    choice = {"index": 0, "delta": {"content": content}, "logprobs": None, "finish_reason": reason}
    return b"data: " + msgspec.json.encode({"id": "x", "choices": [choice]}) + b"\n\n"


@given(st.lists(st.text(), max_size=6), st.sampled_from(ENDINGS), st.booleans(), st.data())
def test_a_stream_s_ending_is_known_with_its_handle(
    texts: list[str], reason: str, usage: bool, data: st.DataObject
) -> None:
    """Whatever the model says, wherever the reads are cut, with usage behind it or not."""
    last = [event("", reason), USAGE * usage, HANDLE, DONE]
    stream = b"".join([*(event(text, None) for text in texts), *last])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    seen = HandleFilter(1 << 20)
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        seen.feed(stream[start:end])
        if seen.handle is not None:
            assert seen.ending == reason
    assert seen.handle is not None


@given(st.text())
def test_text_of_the_model_ends_nothing(text: str) -> None:
    """Not even the very member, quoted in an answer."""
    for said in (text, f'"finish_reason":"length"{text}', f'{text}\\"finish_reason\\":\\"length\\"'):
        assert ending_of_events(event(said, None)) is None


@pytest.mark.parametrize("reason", ["abort", "error", "content_filter", "function_call", "", "stop"])
def test_any_other_word_is_a_stop(reason: str) -> None:
    """In both shapes: the model of returns knows three."""
    assert ending_of_events(event("", reason)) == STOP
    assert ending_of_answer(json.dumps({"choices": [{"finish_reason": reason}]}).encode()) == STOP


@pytest.mark.parametrize("reason", ENDINGS)
def test_a_json_answer_s_ending_is_its_choice_s(reason: str) -> None:
    """The member of the choice, with any spacing; one of the answer or the message is none."""
    choice: dict[str, Any] = {"message": {"finish_reason": "length"}, "finish_reason": reason}
    for separators in ((",", ":"), (", ", ": ")):
        body = json.dumps({"finish_reason": "length", "choices": [choice]}, separators=separators)
        assert ending_of_answer(body.encode()) == reason


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b'{"choices":[]}', b'{"choices":7}', b'{"choices":[{"finish_reason":null}]}', b"\xff"],
)
def test_an_answer_without_an_ending_is_a_stop(body: bytes) -> None:
    """Nothing that an engine sends makes it raise."""
    assert ending_of_answer(body) == STOP


def test_an_ending_that_is_cut_off_is_a_stop() -> None:
    """A stream may break off in the middle of the word."""
    assert ending_of_events(b'data: {"choices":[{"finish_reason":"leng') == STOP
