"""Turns through the router: what each engine is asked, and which earlier turn a request goes on from."""

import json
import tempfile
from typing import Any
from unittest import mock

from kvloop.router.config import Leases
from kvloop.router.metrics import MAX_MISS_REASONS
from tests.router.fake_engine import Answer, Asked, decode_plan, json_answer, prefill_plan
from tests.router.harness import HELLO, Stack, in_loop, post, raw_client, stack
from tests.wire.test_openai import DROPPED, EVERYTHING, SET

A1 = {"role": "assistant", "content": "Hello"}
MORE = {"role": "user", "content": "more"}


async def handle_sent(router: Stack, messages: list[Any], **rest: Any) -> str | None:
    """The handle that prefill got for a turn; the decode engine's own are h1, h2, ... in order."""
    answer = await router.chat(messages, **rest)
    assert answer.status_code == 200, answer.text
    handle: str | None = router.prefill[0].asked[-1].params.get("kvloop_handle")
    assert answer.headers["x-kvloop-route"] == ("return" if handle else "recompute")
    return handle


@in_loop
async def test_loop_closes() -> None:
    """The handle of one turn goes to prefill with the next one, and the client sees none of it."""
    async with stack() as router:
        first = await router.chat([HELLO])
        assert "kv_transfer" not in first.text
        assert first.json()["choices"][0]["message"]["content"] == "Hello"
        assert first.headers["x-kvloop-route"] == "recompute"
        assert first.headers["x-kvloop-reused-tokens"] == "0"
        second = await router.chat([HELLO, A1, MORE])
        assert second.headers["x-kvloop-route"] == "return"
        assert second.headers["x-kvloop-reused-tokens"] == "64"
        assert second.headers["x-kvloop-cached-tokens"] == "80"
        assert router.prefill[0].asked[1].params == {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "kvloop_handle": "h1",
        }
        handover = router.decode[0].asked[1].params
        assert handover["remote_block_ids"] == [[1, 2, 3]]
        assert handover["kvloop_turn"]["returned_tokens"] == 64


@in_loop
async def test_every_field_survives() -> None:
    """Every field that a client sends reaches decode as its bytes, and prefill unless it would cost."""
    async with stack() as router:
        body = json.dumps(EVERYTHING, indent=1).encode()
        headers = {
            "x-custom": "1",
            "traceparent": "00-1",
            "x-request-id": "mine",
            "content-type": "application/json",
        }
        answer = await router.client.post("/v1/chat/completions", content=body, headers=headers)
        assert answer.status_code == 200
        prefill, decode = router.prefill[0].asked[0], router.decode[0].asked[0]
        assert decode.raw.startswith(body[: body.rindex(b"}")])
        assert {**decode.body, "kv_transfer_params": 0} == {**EVERYTHING, "kv_transfer_params": 0}
        expected = {name: value for name, value in EVERYTHING.items() if name not in DROPPED}
        assert {**prefill.body, "kv_transfer_params": 0} == {**expected, **SET, "kv_transfer_params": 0}
        for asked in (prefill, decode):
            assert asked.headers["x-custom"] == "1"
            assert asked.headers["traceparent"] == "00-1"
            assert asked.headers["x-request-id"] == "mine"
            assert "accept-encoding" not in asked.headers
            assert asked.headers["content-type"] == "application/json"
        assert answer.headers["x-request-id"] == "mine"
        assert answer.headers["server"] == "fake"


@in_loop
async def test_completions_too() -> None:
    """A completion's prompt is followed by its bytes, text or tokens, from turn to turn."""
    async with stack() as router:
        story = "once upon a time " * 30
        for prompt in (story, list(range(500))):
            for grown in (prompt, prompt + (" and then" if isinstance(prompt, str) else [1, 2])):  # type: ignore[operator]
                answer = await router.client.post("/v1/completions", json={"model": "tiny", "prompt": grown})
            assert answer.headers["x-kvloop-route"] == "return"
        asked = router.prefill[0].asked
        assert [one.params.get("kvloop_handle") for one in asked] == [None, "h1", None, "h3"]
        assert {one.path for one in asked} == {"/v1/completions"}


@in_loop
async def test_the_next_turn_finds_the_last_one_however_early_it_comes() -> None:
    """Also where it is there already, on the same connection, when the last one's answer goes out; and with a
    secret, whose owner reads the handle's lease first."""
    with tempfile.NamedTemporaryFile() as secret:
        secret.write(bytes(32))
        secret.flush()
        for leases in (Leases(), Leases(secret.name)):
            for stream in (False, True):
                async with stack(leases=leases) as router, raw_client(router.port) as client:
                    turns = ([HELLO], [HELLO, A1, MORE], [HELLO, A1, MORE, A1, MORE])
                    bodies = [{"model": "t", "messages": turn, "stream": stream} for turn in turns]
                    client.send(b"".join(map(post, bodies)))
                    for _ in turns:
                        assert (await client.answer())[0] == 200
                    asked = [one.params.get("kvloop_handle") for one in router.prefill[0].generations()]
                    assert asked == [None, "h1", "h2"]


@in_loop
async def test_the_next_turn_may_come_with_the_last_byte() -> None:
    """On another connection, in the same moment in which the client has read the last byte, many times."""
    async with stack() as router, raw_client(router.port) as one, raw_client(router.port) as other:
        messages: list[Any] = [HELLO]
        for turn in range(50):
            (one if turn % 2 else other).send(
                post({"model": "t", "messages": messages, "stream": turn % 3 > 0})
            )
            assert (await (one if turn % 2 else other).answer())[0] == 200
            messages = [*messages, A1, MORE]
        asked = [one.params.get("kvloop_handle") for one in router.prefill[0].generations()]
        assert asked == [None, *(f"h{turn}" for turn in range(1, 50))]


@in_loop
async def test_forks_and_edits() -> None:
    """Forks, edits, compactions and regenerations go on from the longest turn that they share."""
    async with stack() as router:
        history = [HELLO, A1, MORE]
        other = {"role": "user", "content": "other"}
        assert await handle_sent(router, [HELLO]) is None  # h1
        assert await handle_sent(router, history) == "h1"  # h2
        assert await handle_sent(router, history) == "h2"  # regenerated: h3
        assert await handle_sent(router, [HELLO, A1, other]) == "h3"  # a fork: h4
        assert await handle_sent(router, [*history, A1, MORE]) == "h3"  # the first branch: h5
        assert await handle_sent(router, [HELLO, A1, other, A1, MORE]) == "h4"  # the second one: h6
        assert await handle_sent(router, [HELLO, MORE]) == "h6"  # compacted: the newest that shares the start
        assert await handle_sent(router, [MORE]) is None


@in_loop
async def test_what_else_makes_a_prompt() -> None:
    """Other tools, template arguments, models or salts are other prompts; sampling parameters are not."""
    async with stack() as router:
        tools = [{"type": "function", "function": {"name": "f"}}]
        assert await handle_sent(router, [HELLO]) is None
        assert await handle_sent(router, [HELLO], tools=tools) is None
        assert await handle_sent(router, [HELLO], chat_template_kwargs={"enable_thinking": False}) is None
        assert await handle_sent(router, [HELLO], model="other") is None
        assert await handle_sent(router, [HELLO], cache_salt="x") is None
        assert await handle_sent(router, [HELLO], temperature=1.5, tool_choice="auto", stop=["x"]) == "h1"
        assert await handle_sent(router, [HELLO], tools=tools) == "h2"


@in_loop
async def test_content_before_name() -> None:
    """A client that sends another conversation's name still goes on from its own content."""
    async with stack() as router:
        await handle_sent(router, [HELLO], conversation_id="mine")  # h1
        await handle_sent(router, [MORE], conversation_id="theirs")  # h2
        assert await handle_sent(router, [HELLO, A1, MORE], conversation_id="theirs") == "h1"


@in_loop
async def test_handle_expires() -> None:
    """After its time a handle is no longer sent."""
    with mock.patch("kvloop.router.serve.time.monotonic_ns", return_value=0) as clock:
        async with stack(retention_s=60) as router:
            assert await handle_sent(router, [HELLO]) is None
            clock.return_value = 60 * 10**9 - 1
            assert await handle_sent(router, [HELLO]) == "h1"
            clock.return_value += 60 * 10**9
            assert await handle_sent(router, [HELLO]) is None


@in_loop
async def test_return_off() -> None:
    """With the return path off, handles are neither sent nor kept, and clients still see none."""
    async with stack(return_enabled=False) as router:
        for _ in range(2):
            answer = await router.chat([HELLO])
            assert "kvloop_handle" not in answer.text
            assert answer.headers["x-kvloop-route"] == "recompute"
            assert "kvloop_handle" not in router.prefill[0].asked[-1].params
        assert (await router.admin.get("/conversations")).json()["total"] == 0


@in_loop
async def test_upstreams_parameters() -> None:
    """Upstream's own parameters go round in the same way, with the flags as the hop needs them."""

    def upstream(_: Asked) -> Answer:
        params = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[7]]}
        return json_answer({"id": "x", "choices": [], "kv_transfer_params": params})

    async with stack(decode=[upstream]) as router:
        await router.chat([HELLO])
        answer = await router.chat([HELLO, A1, MORE])
        assert answer.json() == {"id": "x", "choices": []}
        assert router.prefill[0].asked[1].params == {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_block_ids": [[7]],
        }


@in_loop
async def test_nothing_came_back() -> None:
    """A handle that brought nothing back is a recomputed turn, and its reason is counted."""

    def refused(_: Asked) -> Answer:
        turn = {
            "prompt_tokens": 9,
            "local_tokens": 2,
            "returned_tokens": 0,
            "computed_tokens": 7,
            "reason": "expired",
        }
        return json_answer({"kv_transfer_params": {"do_remote_prefill": True, "kvloop_turn": turn}})

    async with stack(prefill=[refused]) as router:
        await router.chat([HELLO])
        answer = await router.chat([HELLO])
        assert answer.headers["x-kvloop-route"] == "recompute"
        assert answer.headers["x-kvloop-cached-tokens"] == "2"
        assert await router.metric('return_misses_total{reason="expired"}') == 1
        assert await router.metric('prompt_tokens_total{source="computed"}') == 14


@in_loop
async def test_a_report_that_cannot_be_true() -> None:
    """The turn is served; no header and no metric has the engine's words, nor those of decode."""
    right = {"prompt_tokens": 9, "local_tokens": 2, "returned_tokens": 0, "computed_tokens": 7}
    more: dict[str, Any] = {"returned_tokens": 10}
    for part in (more, {"computed_tokens": -7}, {"local_tokens": 10**30}, {"local_tokens": True}):
        turn = {**right, **part, "reason": "x" * 1000}
        prefilled = json_answer({"kv_transfer_params": {"do_remote_prefill": True, "kvloop_turn": turn}})

        def decode(asked: Asked) -> Answer:
            answer = decode_plan(asked)
            answer.headers = {"x-kvloop-reused-tokens": "999", "x-kvloop-cached-tokens": "999"}
            return answer

        async with stack(prefill=[lambda _, prefilled=prefilled: prefilled], decode=[decode]) as router:
            for stream in (False, True):
                answer = await router.chat([HELLO], stream=stream)
                assert answer.status_code == 200
                assert not {"x-kvloop-reused-tokens", "x-kvloop-cached-tokens"} & answer.headers.keys()
            metrics = (await router.admin.get("/metrics")).text
            assert "prompt_tokens_total{" not in metrics
            assert "return_misses_total{" not in metrics


@in_loop
async def test_the_words_of_a_miss_are_bounded() -> None:
    """An engine's reason becomes a label if it is a short word, and one of few."""
    reasons = ["expired", "x" * 65, "a b", "\u00e9", *(f"r{one}" for one in range(40))]
    left = iter(reasons)

    def refused(asked: Asked) -> Answer:
        turn = {"prompt_tokens": 9, "local_tokens": 2, "returned_tokens": 0, "computed_tokens": 7}
        turn |= {"reason": next(left)} if "kvloop_handle" in asked.params else {}
        return json_answer({"kv_transfer_params": {"do_remote_prefill": True, "kvloop_turn": turn}})

    async with stack(prefill=[refused]) as router:
        for _ in range(len(reasons) + 1):
            await router.chat([HELLO])
        metrics = (await router.admin.get("/metrics")).text
        labels = [line for line in metrics.splitlines() if "return_misses_total{" in line]
        assert len(labels) <= MAX_MISS_REASONS + 1
        assert all(len(line) < 100 and line.isascii() for line in labels)
        assert await router.metric('return_misses_total{reason="expired"}') == 1
        assert await router.metric('return_misses_total{reason="other"}') >= 3


@in_loop
async def test_same_decode_engine() -> None:
    """The next turn prefers the decode engine of the last one; strangers take turns."""
    async with stack(decode=[decode_plan] * 3, prefill=[prefill_plan] * 2) as router:

        def served() -> list[int]:
            return [len(engine.asked) for engine in router.decode]

        messages: list[Any] = [HELLO]
        await router.chat(messages)
        home = served().index(1)
        for _ in range(5):
            messages += [A1, MORE]
            await router.chat(messages)
        assert served()[home] == 6
        for number in range(6):
            await router.chat([{"role": "user", "content": str(number)}])
        assert all(served())
        assert all(engine.asked for engine in router.prefill)


@in_loop
async def test_unsplit() -> None:
    """What cannot be split goes to decode alone, with the flags that say so."""
    async with stack() as router:
        for fields in ({"n": 2}, {"prompt_logprobs": 1}, {"use_beam_search": True}, {"echo": True}):
            answer = await router.chat([HELLO], **fields)
            assert answer.headers["x-kvloop-route"] == "decode"
            assert "x-kvloop-reused-tokens" not in answer.headers
        assert not router.prefill[0].asked
        flags = {"do_remote_decode": False, "do_remote_prefill": False}
        assert [one.params for one in router.decode[0].asked] == [flags] * 4
        assert await router.metric('unsplit_total{field="n"}') == 1


@in_loop
async def test_without_prefill_engines() -> None:
    """A router without prefill engines serves from decode alone."""
    async with stack(prefill=[]) as router:
        assert (await router.chat([HELLO])).headers["x-kvloop-route"] == "decode"
