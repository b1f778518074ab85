"""Answers in every shape: what a benchmark's client makes of them."""

import asyncio

import pytest

from kvloop.bench.load.api import Api, Style, body_of
from kvloop.bench.load.exchange import Endpoint, Heard
from kvloop.errors import UserError
from tests.router.fake_engine import DONE, Answer, Asked, chunk, engines, json_answer, stream_answer
from tests.router.harness import in_loop

USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":10,"completion_tokens":2,'
    b'"prompt_tokens_details":{"cached_tokens":8}}}\n\n'
)
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'


async def heard(
    answer: Answer, *, stream: bool = True, timeout_s: float = 5.0, max_tokens: int = 100
) -> Heard:
    """What is heard of one answer."""
    async with engines(lambda _: answer) as (engine,):
        endpoint = Endpoint(engine.url + "/v1")
        try:
            return await endpoint.ask(
                "/chat/completions", b"{}", timeout_s, stream=stream, max_tokens=max_tokens
            )
        finally:
            endpoint.close()


@in_loop
async def test_a_stream_is_timed_at_its_events_with_a_token() -> None:
    """Neither the role's event nor usage is a token; the text is whole, and usage is the endpoint's."""
    found = await heard(stream_answer(ROLE, 0.05, chunk("Hel"), 0.05, chunk("lo"), USAGE, DONE))
    assert found.is_good
    assert found.text == "Hello"
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.cached_tokens) == (10, 8)
    assert found.first_s is not None
    assert found.first_s >= 0.05
    assert len(found.between_s) == 1
    assert found.took_s >= found.first_s + found.between_s[0] >= 0.1


@in_loop
async def test_an_event_may_come_byte_by_byte() -> None:
    """What is split over reads is one event."""
    data = chunk("Hel") + chunk("lo ä") + USAGE + DONE
    found = await heard(stream_answer(*(data[at : at + 1] for at in range(len(data)))))
    assert found.is_good
    assert found.text == "Hello ä"


@in_loop
async def test_an_answer_that_is_not_streamed() -> None:
    """Its text and usage are the same; it has no first token."""
    body = {
        "choices": [{"message": {"content": "Hello", "tool_calls": []}}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 1},
    }
    found = await heard(json_answer(body), stream=False)
    assert found.is_good
    assert (found.text, found.first_s) == ("Hello", None)
    assert found.usage is not None
    assert found.usage.cached_tokens is None


BAD = {
    "refused": (json_answer({"error": {"message": "no such model"}}, 404), "no such model"),
    "an error event": (stream_answer(chunk("a"), b'data: {"error":{"message":"dead"}}\n\n', DONE), "dead"),
    "broken off": (stream_answer(chunk("a"), None), "closed"),
    "without an end": (stream_answer(chunk("a")), "without [DONE]"),
    "no answer": (Answer(no_answer=True), "closed"),
    "no JSON": (stream_answer(b"data: {nonsense\n\n", DONE), "an answer that is none"),
    "other types": (stream_answer(b'data: {"choices":7}\n\n', DONE), "an answer that is none"),
    "nested": (stream_answer(b"data: " + b"[" * 100_000 + b"\n\n", DONE), "an answer that is none"),
    "without a token": (stream_answer(ROLE, DONE), "without a token"),
    "no HTTP": (Answer(raw=b"garbage\r\n\r\n"), "garbled"),
    "silent": (Answer(before_head=2.0), "timeout"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_answer_is_an_error_to_record(kind: str) -> None:
    """Nothing that an endpoint does raises; what was wrong can be read."""
    answer, why = BAD[kind]
    found = asyncio.run(heard(answer, timeout_s=0.5))
    assert not found.is_good
    assert found.error is not None
    assert why in found.error
    assert len(found.error) <= 300


LINE_BYTES = 17 * 1024 * 1024
ENDLESS = {
    "tokens": (stream_answer(*[chunk("a") * 100] * 11, 60.0), "1008 events with a token, and no end"),
    "a line": (stream_answer(b"x" * LINE_BYTES, 60.0), "an event of more than"),
    "after its end": (stream_answer(chunk("a"), DONE, 0.05, b": ping\n\n", 60.0), "goes on after [DONE]"),
    "a refusal": (Answer(status=500, pieces=[b"x" * 100_000, 60.0]), "HTTP 500: xxx"),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_what_has_no_end_is_given_up(kind: str) -> None:
    """However steadily it comes, what is more than can be wanted is an error, and is not waited for."""
    answer, why = ENDLESS[kind]
    found = asyncio.run(heard(answer, timeout_s=600.0, max_tokens=1))
    assert found.error is not None
    assert why in found.error
    assert not found.is_good


@in_loop
async def test_a_whole_answer_has_a_bound() -> None:
    """As one that is streamed has."""
    found = await heard(Answer(pieces=[b" " * LINE_BYTES, 60.0]), stream=False, timeout_s=600.0)
    assert "an answer of more than" in (found.error or "")


@in_loop
async def test_nobody_there_is_an_error_to_record() -> None:
    """As when an endpoint has just been stopped."""
    endpoint = Endpoint("http://127.0.0.1:9")
    found = await endpoint.ask("/chat/completions", b"{}", 1.0, stream=True)
    assert (found.status, found.is_good) == (0, False)


@in_loop
async def test_headers_and_base_are_as_given() -> None:
    """A base path goes before the API's, and a key into its header; ids of requests differ."""
    asked: list[Asked] = []

    def plan(one: Asked) -> Answer:
        asked.append(one)
        return stream_answer(chunk("a"), DONE)

    async with engines(plan) as (engine,):
        endpoint = Endpoint(engine.url + "/base/v1/", api_key="k", headers={"X-Team": "blue"})
        for _ in range(2):
            await endpoint.ask("/completions", b"{}", 5.0, stream=True)
        endpoint.close()
    assert {one.path for one in asked} == {"/base/v1/completions"}
    assert asked[0].headers["authorization"] == "Bearer k"
    assert asked[0].headers["x-team"] == "blue"
    assert len({one.headers["x-request-id"] for one in asked}) == 2


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://a", "http://", "http://a:b", "http://a?x=1"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    """With one line that shows it."""
    with pytest.raises(UserError, match="URL"):
        Endpoint(url)


def test_a_header_cannot_smuggle_another() -> None:
    """A line break in a key would be one."""
    with pytest.raises(UserError, match="one line"):
        Endpoint("http://a", api_key="k\r\nx: y")


def test_a_body_asks_for_exact_lengths_greedily() -> None:
    """Both APIs; fields of the user's come last and win."""
    prompt = [("system", " a"), ("user", " b")]
    chat = body_of(Style(fields={"temperature": 1}), "m", prompt, 7)
    assert b'"messages":[{"role":"system","content":" a"},{"role":"user","content":" b"}]' in chat
    assert b'"temperature":1' in chat
    plain = body_of(Style(Api.COMPLETIONS, stream=False, exact_lengths=False), "m", prompt, 7)
    assert b'"prompt":" a b"' in plain
    assert b'"temperature":0' in plain
    assert b"ignore_eos" not in plain
    assert b"stream" not in plain
