"""Bodies: what is refused, what each hop gets, and that answers change by the handle alone."""

import json
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloop.wire.models import merged_models
from kvloop.wire.openai import (
    ALONE,
    Endpoint,
    RequestError,
    decode_body,
    filed_handle,
    prefill_body,
    read_generation,
    read_prefill_answer,
    take_handle,
)
from kvloop.wire.refusal import error_body
from tests.wire.streams import NASTY, PARAMS, UPSTREAM

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": NASTY}]}
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "once"}
# Every kind of field that vLLM 0.33 knows for chat, and two that it does not.
EVERYTHING: dict[str, Any] = {
    **CHAT,
    "frequency_penalty": 0.1,
    "logit_bias": {"5": -1.5},
    "logprobs": True,
    "top_logprobs": 3,
    "max_tokens": 50,
    "max_completion_tokens": 60,
    "n": 1,
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
    "seed": 2**60,
    "stop": ["a", "\n"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.0,
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "tool_choice": "auto",
    "reasoning_effort": "low",
    "parallel_tool_calls": False,
    "user": "u",
    "top_k": 4,
    "min_tokens": 3,
    "ignore_eos": True,
    "chat_template_kwargs": {"enable_thinking": False},
    "structured_outputs": {"regex": "a+"},
    "priority": 0,
    "request_id": "r1",
    "session_id": "s1",
    "return_token_ids": True,
    "cache_salt": "pepper",
    "vllm_xargs": {"x": 1},
    "metadata": {"session_id": "m"},
    "conversation_id": "c1",
    "something_new": [1, {"a": None}],
}
DROPPED = {"stream_options", "min_tokens", "logprobs", "top_logprobs", "return_token_ids"}
SET = {"stream": False, "max_tokens": 1, "max_completion_tokens": 1, "n": 1}


def raw(body: dict[str, Any], **json_options: Any) -> bytes:
    """A body as some client writes it."""
    return json.dumps(body, **json_options).encode()


def chat(**fields: Any) -> bytes:
    """A chat request with these fields."""
    return raw({**CHAT, **fields})


REFUSED = [
    (b"", None, "not valid JSON"),
    (b"{", None, "not valid JSON"),
    (b"[1]", None, "JSON object"),
    (b'"x"', None, "JSON object"),
    (b'{"a":NaN}', None, "not valid JSON"),
    (b'{"model":"\xff","messages":[]}', "model", "UTF-8"),
    (b'{"a":' * 100_000, None, "nested"),
    (raw({"messages": []}), "model", "must provide a model"),
    (raw({"model": "", "messages": []}), "model", "must provide a model"),
    (raw({"model": None, "messages": []}), "model", "must provide a model"),
    (raw({"model": 1, "messages": []}), "model", "Expected"),
    (raw({"model": "tiny"}), "messages", "must provide messages"),
    (raw({"model": "tiny", "messages": "x"}), "messages", "array"),
    (raw({"model": "tiny", "messages": None}), "messages", "array"),
    (chat(stream="yes"), "stream", "bool"),
    (chat(n="2"), "n", "int"),
    (chat(n=True), "n", "int"),
    (chat(echo=1), "echo", "bool"),
    (chat(prompt_logprobs="x"), "prompt_logprobs", "int"),
    (chat(use_beam_search="x"), "use_beam_search", "bool"),
    (chat(cache_salt=5), "cache_salt", "str"),
    (chat(cache_salt=""), "cache_salt", "1 to 128"),
    (chat(cache_salt="x" * 129), "cache_salt", "1 to 128"),
    (chat(cache_salt="kvloop.00"), "cache_salt", "may not start"),
    (chat(kv_transfer_params={"do_remote_decode": True}), "kv_transfer_params", "set by the router"),
    (chat(kv_transfer_params=None), "kv_transfer_params", "set by the router"),
    (b'{"model":"a","messages":[],"kv\\u005ftransfer_params":{}}', "kv_transfer_params", "set by the router"),
    (
        b'{"model":"a","messages":[],"kv_transfer_params":{},"model":"b"}',
        "kv_transfer_params",
        "set by the router",
    ),
]


@pytest.mark.parametrize(("body", "param", "message"), REFUSED)
def test_refused(body: bytes, param: str | None, message: str) -> None:
    """A body that cannot be served is refused with 400, and the field is named."""
    with pytest.raises(RequestError, match=message) as caught:
        read_generation(Endpoint.CHAT, body)
    assert (caught.value.param, caught.value.status) == (param, 400)


def test_prompt_wanted() -> None:
    """A completion needs a prompt, as text, tokens or embeddings."""
    with pytest.raises(RequestError, match="prompt") as caught:
        read_generation(Endpoint.COMPLETIONS, raw({"model": "tiny", "messages": []}))
    assert caught.value.param == "prompt"
    read_generation(Endpoint.COMPLETIONS, raw({"model": "tiny", "prompt_embeds": "x"}))


@settings(deadline=None)
@given(st.binary(max_size=60) | st.text(alphabet='{}[]":,\\u0de1 ntfkv', max_size=60).map(str.encode))
def test_any_bytes(body: bytes) -> None:
    """No bytes raise anything but RequestError."""
    for endpoint in Endpoint:
        with suppress(RequestError):
            read_generation(endpoint, body)


@pytest.mark.parametrize(
    ("endpoint", "fields", "alone"),
    [
        (Endpoint.CHAT, CHAT, None),
        (Endpoint.CHAT, EVERYTHING, None),
        (Endpoint.CHAT, {**CHAT, "n": None, "echo": None, "stream": None, "prompt_logprobs": None}, None),
        (Endpoint.CHAT, {**CHAT, "n": 2}, "n"),
        (Endpoint.CHAT, {**CHAT, "use_beam_search": True}, "use_beam_search"),
        (Endpoint.CHAT, {**CHAT, "prompt_logprobs": 0}, "prompt_logprobs"),
        (Endpoint.CHAT, {**CHAT, "echo": True}, "echo"),
        (Endpoint.CHAT, {**CHAT, "truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
        (Endpoint.CHAT, {**CHAT, "truncate_prompt_tokens": 5}, None),
        (Endpoint.COMPLETIONS, TEXT, None),
        (Endpoint.COMPLETIONS, {**TEXT, "best_of": 2}, "best_of"),
        (Endpoint.COMPLETIONS, {**TEXT, "prompt": ["a", "b"]}, "prompt"),
        (Endpoint.COMPLETIONS, {**TEXT, "prompt": ["a"]}, None),
        (Endpoint.COMPLETIONS, {**TEXT, "prompt": [1, 2, 3]}, None),
        (Endpoint.COMPLETIONS, {**TEXT, "prompt": [[1, 2], [3]]}, "prompt"),
        (Endpoint.COMPLETIONS, {**TEXT, "prompt_embeds": "x"}, "prompt_embeds"),
    ],
)
def test_alone(endpoint: Endpoint, fields: dict[str, Any], alone: str | None) -> None:
    """What has several prompts or answers, or looks back at its prompt, is not split."""
    assert read_generation(endpoint, raw(fields)).alone == alone


def test_prefill_asks_for_one_token() -> None:
    """Prefill gets every field but those that cost and bring nothing; lengths are one."""
    sent = json.loads(
        prefill_body(read_generation(Endpoint.CHAT, raw(EVERYTHING)), b'{"kvloop_handle":"h"}', None)
    )
    params = sent.pop("kv_transfer_params")
    assert params == {"do_remote_decode": True, "do_remote_prefill": False, "kvloop_handle": "h"}
    expected = {name: value for name, value in EVERYTHING.items() if name not in DROPPED}
    assert sent == {**expected, **SET}


def test_prefill_without_more() -> None:
    """Prefill is asked for one token where the client set no limit, and without a handle there is none."""
    sent = json.loads(prefill_body(read_generation(Endpoint.CHAT, raw(CHAT)), None, None))
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    assert sent == {**CHAT, "stream": False, "max_tokens": 1, "kv_transfer_params": params}


@pytest.mark.parametrize("options", [{}, {"indent": 2}, {"separators": (",", ":")}, {"ensure_ascii": False}])
def test_decode_gets_the_bytes(options: dict[str, Any]) -> None:
    """Decode gets the client's bytes, with one member more."""
    body = raw(EVERYTHING, **options) + b" \r\n"
    sent = decode_body(read_generation(Endpoint.CHAT, body), ALONE, None)
    end = body.rindex(b"}")
    assert sent == body[:end] + b',"kv_transfer_params":' + ALONE + body[end:]
    assert json.loads(sent) == {**EVERYTHING, "kv_transfer_params": json.loads(ALONE)}


@pytest.mark.parametrize("body", [CHAT, {**CHAT, "cache_salt": "own"}])
def test_salt_on_both_hops(body: dict[str, Any]) -> None:
    """A derived salt replaces the client's, or is added, on both hops, and stands there once."""
    generation = read_generation(Endpoint.CHAT, raw(body))
    for sent in (decode_body(generation, ALONE, "kvloop.1"), prefill_body(generation, None, "kvloop.1")):
        assert json.loads(sent)["cache_salt"] == "kvloop.1"
        assert sent.count(b'"cache_salt"') == 1


def test_own_salt_passes() -> None:
    """Without a derived salt the client's stays, byte for byte."""
    body = chat(cache_salt="own")
    assert decode_body(read_generation(Endpoint.CHAT, body), ALONE, "own").startswith(body[:-1])


def test_messages_are_the_clients_bytes() -> None:
    """A message's unit is exactly what the client wrote."""
    body = b'{"model":"m","messages":[ {"role" : "user"},\n{"a":"\\u00e9"} ]}'
    units = read_generation(Endpoint.CHAT, body).units
    assert [bytes(unit) for unit in units] == [b'{"role" : "user"}', b'{"a":"\\u00e9"}']


def test_text_at_paths() -> None:
    """Strings are found at a member or one level deeper; anything else is nothing."""
    generation = read_generation(Endpoint.CHAT, chat(a="x", b={"c": "y", "d": 1}, e=5, f="", g=None))
    found = {
        path: generation.text(path) for path in ("a", "b.c", "b.d", "b.x", "a.c", "e", "f", "g", "h", "h.i")
    }
    assert found == {**dict.fromkeys(found), "a": "x", "b.c": "y"}


def test_filed_handle() -> None:
    """What is filed leaves the flags to the router, and everything else as decode said it."""
    assert filed_handle(b'{"kvloop_handle":"h"}') == b'{"kvloop_handle":"h"}'
    upstream = filed_handle(json.dumps(UPSTREAM).encode())
    assert upstream is not None
    flags = {"do_remote_decode", "do_remote_prefill"}
    assert json.loads(upstream) == {name: value for name, value in UPSTREAM.items() if name not in flags}
    assert filed_handle(b'{"do_remote_decode":true}') is None
    sent = json.loads(prefill_body(read_generation(Endpoint.CHAT, raw(CHAT)), upstream, None))[
        "kv_transfer_params"
    ]
    assert sent == {**UPSTREAM, "do_remote_decode": True, "do_remote_prefill": False}


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"{}", b'{"kv_transfer_params":null}', b'{"kv_transfer_params":[]}']
)
def test_no_handover(body: bytes) -> None:
    """An answer of prefill's without a handover is none."""
    assert read_prefill_answer(body) is None


def test_handover() -> None:
    """The handover is passed on verbatim."""
    params = b'{"a" : [1,2], "kvloop_turn": "none"}'
    assert read_prefill_answer(b'{"id":"x","kv_transfer_params": %b }' % params) == params


ANSWER = {
    "id": "chatcmpl-1",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": NASTY, "tool_calls": []}}],
    "usage": {"prompt_tokens": 4, "kv_transfer_params": PARAMS},
}


@pytest.mark.parametrize("options", [{}, {"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": False}])
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_taken_out_of_json(options: dict[str, Any], place: str) -> None:
    """The handle is cut out of a JSON answer wherever it stands; not another byte changes."""
    members = list(ANSWER.items())
    members.insert({"first": 0, "middle": 1, "last": 3}[place], ("kv_transfer_params", PARAMS))
    body = json.dumps(dict(members), **options).encode()
    left, handle = take_handle(body)
    assert handle is not None
    assert json.loads(handle) == PARAMS
    assert json.loads(left) == ANSWER
    assert left == json.dumps(ANSWER, **options).encode() or "indent" in options


@pytest.mark.parametrize(
    "body", [json.dumps(ANSWER), json.dumps({**ANSWER, "kv_transfer_params": None}), "{", "no"]
)
def test_left_alone(body: str) -> None:
    """Without a handle nothing changes, whatever the text says; a null is left."""
    assert take_handle(body.encode()) == (body.encode(), None)


def test_member_sent_twice() -> None:
    """Even a member that stands there twice does not get through."""
    left, handle = take_handle(b'{"kv_transfer_params":{"a":1},"id":"x","kv_transfer_params":{"b":2}}')
    assert handle == b'{"b":2}'
    assert json.loads(left) == {"id": "x"}


def test_models_union() -> None:
    """Every model once, in the order of the answers; what is no list of models does not count."""
    one = b'{"object":"list","data":[{"id":"a","x":1},{"id":"b"}]}'
    two = b'{"object":"list","data":[{"id":"b","x":2},{"id":"c"}]}'
    merged = merged_models([b"<html>", one, two, b"{}"])
    assert merged is not None
    assert json.loads(merged) == {"object": "list", "data": [{"id": "a", "x": 1}, {"id": "b"}, {"id": "c"}]}
    assert merged_models([b"{}"]) is None


def test_error_shape() -> None:
    """Errors have OpenAI's shape, nulls included."""
    assert msgspec.json.decode(error_body("m", "t", "p")) == {
        "error": {"message": "m", "type": "t", "param": "p", "code": None}
    }
