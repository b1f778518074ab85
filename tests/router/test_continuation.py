"""A stream whose engine dies is gone on with by another one, from the tokens that the client has."""

import asyncio
import json
from typing import Any

import pytest

from kvloop.router.config import Choice, Limits
from tests.router.fake_engine import Answer, Asked, Counted, json_answer, prefill_plan, stream_answer
from tests.router.harness import HELLO, Stack, in_loop, post, raw_client, stack, until
from tests.router.token_engine import (
    EOS,
    PROMPT_IDS,
    Read,
    Speaker,
    pieces_of,
    read,
    refuses,
    tokens_of,
)

CHAT = ("/v1/chat/completions", {"messages": [HELLO]})
TEXT = ("/v1/completions", {"prompt": "Say it."})
USAGE = {"include_usage": True}
ONE_FIRST = Choice("tests.router.one_first:OneFirst")
apis = pytest.mark.parametrize(("path", "prompt"), [CHAT, TEXT], ids=["chat", "completions"])


def request(prompt: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A greedy streamed request."""
    start = {"model": "tiny", "stream": True, "temperature": 0, "max_tokens": 500, "stream_options": USAGE}
    return {**start, **prompt, **more}


async def ask(router: Stack, path: str, body: dict[str, Any]) -> Read:
    """What a client understands of its answer."""
    return read((await router.client.post(path, json=body)).content)


def first_dies(router: Stack, dying: Any, living: Any) -> None:
    """Whichever decode engine is asked first dies in its own way, the other lives in its."""
    plans = iter([dying])

    def plan(asked: Asked) -> Answer:
        answer: Answer = next(plans, living)(asked)
        return answer

    for engine in router.decode:
        engine.plan = plan


def asked_of(router: Stack) -> list[Asked]:
    """The continuations that decode engines got."""
    requests = [asked for engine in router.decode for asked in engine.asked]
    return [asked for asked in requests if isinstance(asked.body.get("prompt"), list)]


async def outcome(router: Stack, name: str) -> float:
    """How many streams ended so."""
    return await router.metric(f'streams_continued_total{{outcome="{name}"}}')


@apis
@pytest.mark.parametrize(("several", "width"), [(1, 3), (1, 1), (4, 3)])
def test_cut_anywhere(path: str, prompt: dict[str, Any], several: int, width: int) -> None:
    """Wherever the stream is cut, the client reads what he would have read without the cut, once."""

    @in_loop
    async def run() -> None:
        speaker = Speaker(several=several, width=width)
        async with stack(prefill=[], decode=[speaker.plan(), speaker.plan()]) as router:
            body = request(prompt)
            whole = await ask(router, path, body)
            assert (whole.text, whole.finish, whole.done) == (speaker.text, "stop", True)
            asked = json.dumps({**body, "return_token_ids": True}).encode()
            events = speaker.answer(Asked("POST", path, {}, asked))
            size, first = len(b"".join(events)), len(events[0])
            failed = 0
            for at in [*range(first + 1, size, 151), size - 1, size]:
                first_dies(router, speaker.dies(at), speaker.plan())
                got = await ask(router, path, body)
                if several > 1 and got.errors:  # an incomplete character at the seam, which cannot be seen
                    failed += 1
                    assert whole.text.startswith(got.text)
                else:
                    assert got == whole, at
            assert failed < size // 151 // 2

    run()


@apis
def test_byte_exact_while_all_is_well(path: str, prompt: dict[str, Any]) -> None:
    """The tokens that decode is asked for leave no trace: the stream is the one without them."""

    @in_loop
    async def run() -> None:
        for several in (1, 3):
            speaker = Speaker(several=several)
            plain = json.dumps(request(prompt)).encode()
            expected = b"".join(speaker.answer(Asked("POST", path, {}, plain))[:-2]) + b"data: [DONE]\n\n"
            for size in (1, 50, 1 << 20):

                def plan(asked: Asked, size: int = size, speaker: Speaker = speaker) -> Answer:
                    assert asked.body["return_token_ids"] is True
                    return stream_answer(*pieces_of(b"".join(speaker.answer(asked)), size))

                async with stack(prefill=[], decode=[plan]) as router:
                    assert (await router.client.post(path, json=request(prompt))).content == expected

    run()


@apis
def test_who_asks_for_ids_keeps_them(path: str, prompt: dict[str, Any]) -> None:
    """A client who asked for token ids himself gets them all, once, over the seam."""

    @in_loop
    async def run() -> None:
        speaker = Speaker()
        async with stack(prefill=[], decode=[speaker.plan(), speaker.plan()]) as router:
            body = request(prompt, return_token_ids=True)
            whole = await ask(router, path, body)
            assert whole.ids == [*[one for one, _ in tokens_of(speaker.text)], EOS]
            for at in range(900, 5000, 777):
                first_dies(router, speaker.dies(at), speaker.plan())
                assert await ask(router, path, body) == whole

    run()


@in_loop
async def test_what_is_asked_for() -> None:
    """The rest is asked for through prefill, with the tenant's salt, the request's headers, its sampling and
    what is left of its bounds."""
    speaker = Speaker()
    async with stack(prefill=[prefill_plan], decode=[speaker.plan(), speaker.plan()]) as router:
        first_dies(router, speaker.dies(3000), speaker.plan())
        body = request(CHAT[1], top_k=5, min_tokens=20, priority=3, metadata={"a": "b"}, user="u")
        headers = {"authorization": "Bearer t", "x-request-id": "r1", "traceparent": "00-1-2-01"}
        answer = await router.client.post(CHAT[0], json=body, headers=headers)
        assert read(answer.content).text == speaker.text
        (rest,) = asked_of(router)
        (hop,) = [asked for asked in router.prefill[0].asked if asked.path == "/v1/completions"]
        original = next(asked for engine in router.decode for asked in engine.asked if asked is not rest)
        assert rest.path == "/v1/completions"
        used = len(rest.body["prompt"]) - len(PROMPT_IDS)
        assert used > 1
        assert rest.body["prompt"] == PROMPT_IDS + [one for one, _ in tokens_of(speaker.text)][:used]
        assert rest.body["max_tokens"] == 500 - used
        assert rest.body["min_tokens"] == 20 - used or used >= 20
        assert rest.body["cache_salt"] == hop.body["cache_salt"] == original.body["cache_salt"]
        assert rest.body["kv_transfer_params"]["do_remote_prefill"] is True
        assert hop.body["prompt"] == rest.body["prompt"]
        assert [rest.body[name] for name in ("model", "top_k", "priority", "temperature")] == [
            "tiny",
            5,
            3,
            0,
        ]
        assert not {"messages", "metadata", "tools"} & rest.body.keys()
        for name in ("authorization", "x-request-id", "traceparent"):
            assert rest.headers[name] == headers[name]
        assert await outcome(router, "continued") == 1
        assert await router.metric('answers_cut_total{side="engine"}') == 0
        assert await router.metric("handles_filed_total") == 1


@in_loop
async def test_another_engine() -> None:
    """The rest is asked of another engine than the one that broke off; of that one if there is no other."""
    speaker = Speaker()
    for others in (1, 0):
        async with stack(decode=[speaker.plan()] * (1 + others), choice=ONE_FIRST) as router:
            for _ in range(4):
                first_dies(router, speaker.dies(2000), speaker.plan())
                for engine in router.decode:
                    engine.asked.clear()
                assert (await ask(router, CHAT[0], request(CHAT[1]))).text == speaker.text
                assert [len(engine.asked) for engine in router.decode if engine.asked] == (
                    [1, 1] if others else [2]
                )


@in_loop
async def test_next_turn_reads_back() -> None:
    """The handle of the rest is filed for the conversation."""
    speaker = Speaker()
    async with stack(decode=[speaker.plan(), speaker.plan()]) as router:
        first_dies(router, speaker.dies(3000), speaker.plan())
        assert (await ask(router, CHAT[0], request(CHAT[1]))).done
        await router.chat([HELLO, {"role": "assistant", "content": speaker.text}, HELLO])
        assert router.prefill[0].asked[-1].params["kvloop_handle"] == "h1"


@in_loop
async def test_second_engine_dies_too() -> None:
    """Two engines may go on with an answer; when the second of them dies, the client is told, once."""
    speaker = Speaker()
    plans = [speaker.plan()] * 4
    for deaths, finishes in ((2, True), (3, False)):
        async with stack(prefill=[], decode=plans) as router:
            dying = iter([speaker.dies(2500)] + [speaker.dies(1500)] * (deaths - 1))

            def plan(asked: Asked, dying: Any = dying) -> Answer:
                answer: Answer = next(dying, speaker.plan())(asked)
                return answer

            for engine in router.decode:
                engine.plan = plan
            got = await ask(router, CHAT[0], request(CHAT[1]))
            assert (got.done, got.errors) == (finishes, not finishes)
            assert speaker.text.startswith(got.text)
            assert (got.text == speaker.text) == finishes
            assert len(asked_of(router)) == 2
            assert await outcome(router, "continued" if finishes else "failed") == 1
            assert await router.metric('answers_cut_total{side="engine"}') == (not finishes)


@in_loop
async def test_nobody_else() -> None:
    """Where no engine takes the rest, or the rest is not one, the client is told, once."""
    speaker, other = Speaker(), Speaker(text="Something else altogether, at every place, and longer. " * 3)

    def json_instead(_: Asked) -> Answer:
        return json_answer({"choices": []})

    def elsewhere(_: Asked) -> Answer:
        return stream_answer(*other.events(0, chat=False, ids=True, usage=True, most=100))

    mute = Speaker(several=5)
    for living in (refuses, json_instead, lambda _: Answer(no_answer=True), elsewhere):
        async with stack(prefill=[], decode=[speaker.plan(), speaker.plan()]) as router:
            dying = mute if living is elsewhere else speaker  # whose last event is made again, and compared
            first_dies(router, dying.dies(1500), living)
            got = await ask(router, CHAT[0], request(CHAT[1]))
            assert (got.errors, got.done) == (1, False)
            assert speaker.text.startswith(got.text)
            assert await outcome(router, "failed") == 1


@in_loop
async def test_failed_engine_says_so() -> None:
    """An engine that fails inside tells it in an event and ends the stream: that is a death like others."""
    speaker = Speaker()
    error = b'data: {"error": {"message": "EngineCore died", "type": "x", "param": null, "code": %d}}\n\n'
    for code, finishes in ((500, True), (400, False)):
        async with stack(prefill=[], decode=[speaker.plan(), speaker.plan()]) as router:

            def fails(asked: Asked, code: int = code) -> Answer:
                return stream_answer(*speaker.answer(asked)[:9], error % code, b"data: [DONE]\n\n")

            first_dies(router, fails, speaker.plan())
            content = (await router.client.post(CHAT[0], json=request(CHAT[1]))).content
            if finishes:
                assert read(content).text == speaker.text
            else:
                assert content.endswith(error % code + b"data: [DONE]\n\n")


@in_loop
async def test_silent_stop() -> None:
    """A stream that ends as HTTP has it, but without its last word, is none that has ended."""
    speaker = Speaker()
    async with stack(prefill=[], decode=[speaker.plan(), speaker.plan()]) as router:
        first_dies(router, lambda asked: stream_answer(*speaker.answer(asked)[:9]), speaker.plan())
        assert (await ask(router, CHAT[0], request(CHAT[1]))).text == speaker.text


@in_loop
async def test_client_gone() -> None:
    """Nobody is asked to go on for a client who has left; and who leaves during the rest ends it."""
    speaker = Speaker()
    hold = asyncio.Event()

    def stays(asked: Asked) -> Answer:
        return stream_answer(*speaker.answer(asked)[:2], hold)

    async with stack(prefill=[], decode=[speaker.plan(), speaker.plan()]) as router:
        first_dies(router, speaker.dies(2000), stays)
        async with raw_client(router.port) as client:
            client.send(post(request(CHAT[1])))
            await until(lambda: len(asked_of(router)) == 1)
            await client.reader.readuntil(b'"content":"')
        living = next(
            engine for engine in router.decode if any(one in asked_of(router) for one in engine.asked)
        )
        await living.cancelled.wait()
        first_dies(router, stays, speaker.plan())
        async with raw_client(router.port) as client:
            client.send(post(request(CHAT[1])))
            await client.reader.readuntil(b'"role"')
        await asyncio.sleep(0.05)
        assert len(asked_of(router)) == 1


@in_loop
async def test_slow_client_stops_the_second_engine() -> None:
    """While a client reads nothing, the engine that goes on stands still, too; then all arrives."""
    speaker, pieces = Speaker(text="x" * 64 * 1024 * 400, width=64 * 1024), Counted()

    def counted(asked: Asked) -> Answer:
        pieces.extend(speaker.answer(asked))
        return Answer(content_type="text/event-stream", pieces=pieces)

    async with (
        stack(prefill=[], decode=[speaker.plan(), speaker.plan()]) as router,
        raw_client(router.port) as client,
    ):
        first_dies(router, speaker.dies(100_000), counted)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.send(post(request(CHAT[1])))
        await pieces.stand_still()
        assert pieces.written < 400  # 25 MB are more than all the sockets' buffers on the way
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert read((await client.answer())[2]).text == speaker.text


@in_loop
async def test_switched_off() -> None:
    """Without it, or where the prompt's ids might be too long an event, nothing is asked for, and a broken
    stream ends with an error event."""
    speaker = Speaker()
    async with stack(decode=[speaker.dies(2000), speaker.plan()], continue_streams=False) as router:
        first_dies(router, speaker.dies(2000), speaker.plan())
        got = await ask(router, CHAT[0], request(CHAT[1]))
        assert (got.errors, got.done) == (1, False)
        assert all("return_token_ids" not in one.body for engine in router.decode for one in engine.asked)
    async with stack(decode=[speaker.plan()], limits=Limits(max_event_bytes=4000)) as router:
        for words, asked in ((1, True), (200, False)):
            await ask(router, CHAT[0], request({"messages": [HELLO] * words}))
            assert ("return_token_ids" in router.decode[0].asked[-1].body) == asked


@in_loop
async def test_bounded_memory() -> None:
    """A stream beyond the bound is passed on as ever, and ends as it would have; what was kept is given
    back."""
    speaker = Speaker()
    limits = Limits(max_continuation_bytes=120)
    async with stack(prefill=[], decode=[speaker.plan(), speaker.plan()], limits=limits) as router:
        for _ in range(5):
            first_dies(router, speaker.dies(3500), speaker.plan())
            got = await ask(router, CHAT[0], request(CHAT[1]))
            assert (got.errors, got.done) == (1, False)
        assert await outcome(router, "unknown") == 5
        for _ in range(5):
            first_dies(router, speaker.dies(900), speaker.plan())
            assert (await ask(router, CHAT[0], request(CHAT[1]))).done


@pytest.mark.parametrize(
    "spoiled",
    [
        b'"token_ids":[-1]',
        b'"token_ids":[1.5]',
        b'"token_ids":["1"]',
        b'"token_ids":[4294967296]',
        b'"token_ids":[99999999999999999999999]',
        b'"token_ids":[[1]]',
        b'"token_ids":[1',
        b'"token_ids":{}',
    ],
    ids=lambda spoiled: spoiled.decode(),
)
def test_hostile_ids(spoiled: bytes) -> None:
    """Ids that are none end the stream with an error event, and are sent to nobody."""

    @in_loop
    async def run() -> None:
        speaker = Speaker(width=1)
        for place in (3, 60):

            def spoils(asked: Asked, place: int = place) -> Answer:
                events = speaker.answer(asked)
                start, _, _ = events[place].partition(b'"token_ids"')
                events[place] = start + spoiled + b"}]}\n\n"
                return stream_answer(*events[: place + 5], None)

            async with stack(prefill=[], decode=[speaker.plan(), speaker.plan()]) as router:
                first_dies(router, spoils, speaker.plan())
                answer = await router.client.post(CHAT[0], json=request(CHAT[1]))
                assert answer.content.count(b'"error":{') == 1
                assert not asked_of(router)

    run()
