"""Turns through a router that decides by predicted time: which way they go, what is learned, what is told."""

import json
import logging
from typing import Any
from unittest import mock

import pytest

from kvloop.cli import main
from kvloop.router.config import Choice
from kvloop.router.explain_command import explained
from tests.router.fake_engine import (
    Answer,
    Asked,
    json_answer,
    prefill_plan,
    stream_answer,
)
from tests.router.harness import HELLO, Stack, in_loop, stack

ANSWER = {"role": "assistant", "content": "a"}
MORE = {"role": "user", "content": "and then?"}
HISTORY: list[Any] = [HELLO, ANSWER, MORE]
BY_TIME = Choice()


def counted(prompt: int, local: int, loaded: int) -> dict[str, Any]:
    """An engine's account."""
    computed = prompt - local - loaded
    return {
        "prompt_tokens": prompt,
        "local_tokens": local,
        "returned_tokens": loaded,
        "computed_tokens": computed,
        "reason": None,
        "read_us": 0,
    }


def large_prompts(asked: Asked) -> Answer:
    """Prefill, for prompts of 4,000 tokens."""
    answer = prefill_plan(asked)
    body = json.loads(bytes(answer.pieces[0]))  # type: ignore[arg-type]
    body["kv_transfer_params"]["kvloop_turn"] = counted(4000, 0, 0)
    return json_answer(body)


def accounting(asked: Asked) -> Answer:
    """Decode, that says what it found."""
    params = {"kvloop_handle": "h", "kvloop_turn": counted(4010, 3990, 0)}
    if not asked.body.get("stream"):
        return json_answer({"id": "x", "choices": [], "kv_transfer_params": params})
    event = {"object": "kvloop.handle", "choices": [], "kv_transfer_params": params}
    return stream_answer(
        b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n',
        b"data: " + json.dumps(event).encode() + b"\n\ndata: [DONE]\n\n",
    )


async def route(router: Stack, messages: list[Any], **fields: Any) -> str:
    """How one turn went."""
    return (await router.chat(messages, **fields)).headers["x-kvloop-route"]


@in_loop
async def test_a_short_suffix_goes_to_decode_alone() -> None:
    """With one hop, no handle sent anywhere, and its own handle filed for the next turn."""
    async with stack([large_prompts], [accounting], choice=BY_TIME) as router:
        assert await route(router, [HELLO]) == "recompute"
        for stream in (False, True):
            assert await route(router, HISTORY, stream=stream) == "append"
        assert len(router.prefill[0].asked) == 1
        params = router.decode[0].asked[-1].params
        assert params == {"do_remote_decode": False, "do_remote_prefill": False}
        assert await router.metric('requests_total{route="append",status="200"}') == 2
        assert await router.metric("handles_filed_total") == 3


@in_loop
async def test_appending_can_be_switched_off() -> None:
    """Then what decode holds is read back."""
    async with stack([large_prompts], [accounting], choice=Choice(append_max_tokens=0)) as router:
        await route(router, [HELLO])
        await route(router, HISTORY)
        assert router.prefill[0].asked[-1].params["kvloop_handle"]


@in_loop
async def test_an_append_that_fails_is_prefilled() -> None:
    """Before its first byte: without the handle, and the client gets his answer."""

    def refusing(asked: Asked) -> Answer:
        whole = asked.params == {"do_remote_decode": False, "do_remote_prefill": False}
        return Answer(500) if whole else accounting(asked)

    async with stack([large_prompts], [refusing], choice=BY_TIME) as router:
        await route(router, [HELLO])
        assert await route(router, HISTORY) == "recompute"
        assert "kvloop_handle" not in router.prefill[0].asked[-1].params
        assert len(router.decode[0].asked) == 3


@in_loop
async def test_a_decision_is_explained() -> None:
    """By the request's id: what was believed, every way with its parts, who was asked, what came of it."""
    async with stack([large_prompts], [accounting], choice=BY_TIME) as router:
        await router.chat([HELLO], headers={"x-request-id": "first"})
        await router.chat(HISTORY, headers={"x-request-id": "id/with slash"}, stream=True)
        found = (await router.admin.get("/decisions/id%2Fwith%20slash")).json()
        assert found["route"] == "append"
        assert {way["route"] for way in found["ways"]} == {"append", "return"}
        assert found["ways"][0]["route"] == "append"
        assert found["believed"]["held_tokens"] == 4010
        assert found["engines"] == [{"hop": "decode", "engine": router.decode[0].url}]
        assert found["decode"]["local_tokens"] == 3990
        assert found["first_byte_ms"] > 0
        text = explained(found)
        assert ", 4010 of them held by http" in text
        assert "decode counted: 4010 prompt tokens, 3990 in its own cache" in text
        assert (await router.admin.get("/decisions/unknown")).status_code == 404
        scores = [way["score_ms"] for way in found["ways"]]
        assert min(scores) >= scores[0] * 0.95


@in_loop
async def test_decisions_are_logged_one_in_so_many() -> None:
    """As JSON, with the request's id."""
    lines: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger = logging.getLogger("kvloop.router.decision")
    handler = Collector()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        async with stack(choice=Choice(explain_log_every=2)) as router:
            for number in range(5):
                await router.chat([HELLO], headers={"x-request-id": f"r{number}"})
    finally:
        logger.removeHandler(handler)
    assert [json.loads(line)["request_id"] for line in lines] == ["r1", "r3"]


@in_loop
async def test_what_came_is_compared_with_what_was_predicted() -> None:
    """For streams, whose first byte says when the prompt was done."""
    async with stack([large_prompts], [accounting], choice=BY_TIME) as router:
        await router.chat([HELLO], stream=True)
        await router.chat([HELLO], stream=False)
        assert await router.metric('prediction_error_ratio_count{route="recompute"}') == 1


def test_explain_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    """A router that is not there, and a URL that is none: one line, status 2."""
    assert main(["explain", "x", "--admin", "http://127.0.0.1:1"]) == 2
    assert main(["explain", "x", "--admin", "localhost:1"]) == 2
    assert main(["explain", "x", "--admin", "http://h:notaport"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("kvloop explain: http://127.0.0.1:1 does not answer")
    assert said[1].startswith("kvloop explain: --admin 'localhost:1' is not a URL")


def test_explain_against_something_else(capsys: pytest.CaptureFixture[str]) -> None:
    """An answer that is JSON and not a router's: one line, status 2."""
    for answer in ({"a": 1}, {"believed": 5, "request_id": "x", "route": "r", "ways": [], "engines": []}):
        with mock.patch("kvloop.router.explain_command._ask", return_value=answer):
            assert main(["explain", "x"]) == 2
    assert "does not answer as a router's admin port does" in capsys.readouterr().err


@in_loop
async def test_the_last_decisions_are_kept() -> None:
    """As many as the bound says."""
    with mock.patch("kvloop.router.explain.MAX_KEPT", 2):
        async with stack() as router:
            for number in range(3):
                await router.chat([HELLO], headers={"x-request-id": f"r{number}"})
            known = [(await router.admin.get(f"/decisions/r{number}")).status_code for number in range(3)]
            assert known == [404, 200, 200]


@in_loop
async def test_predictions_that_are_always_off_are_corrected() -> None:
    """By a factor per route: the parts' sum is not what is expected any more."""
    async with stack([large_prompts], [accounting], choice=BY_TIME) as router:
        for number in range(20):
            messages = [{"role": "user", "content": str(number)}]
            await router.chat(messages, stream=True, headers={"x-request-id": f"r{number}"})
        last = (await router.admin.get("/decisions/r19")).json()["ways"][0]
        parts = sum(last["parts"][name] for name in ("queue_ms", "read_ms", "compute_ms", "handover_ms"))
        assert last["expected_ms"] != pytest.approx(parts, rel=0.01)
