"""Whatever fails costs time, never an answer: every arrow of the turn machine, over real connections."""

import asyncio
from collections.abc import Callable
from typing import Any

from kvloop.router.config import Limits, Timeouts
from tests.router.fake_engine import Answer, Asked, decode_plan, json_answer, prefill_plan, stream_answer
from tests.router.harness import HELLO, Stack, in_loop, stack

ALONE = {"do_remote_decode": False, "do_remote_prefill": False}
Plan = Callable[[Asked], Answer]


def status(code: int) -> Plan:
    """An engine that answers with this status."""
    return lambda _: json_answer({"error": {"message": f"status {code}", "code": code}}, code)


def hangs(_: Asked) -> Answer:
    """An engine that never answers."""
    return Answer(before_head=asyncio.Event())


def dies(_: Asked) -> Answer:
    """An engine that closes the connection without a word."""
    return Answer(no_answer=True)


def breaks_off(_: Asked) -> Answer:
    """An engine that breaks off in the middle of a JSON answer."""
    return Answer(pieces=[b'{"id":', None])


def garbles(_: Asked) -> Answer:
    """An engine that answers 200 with something that is no handover."""
    return json_answer(b"<html>")


def refuses_handles(asked: Asked) -> Answer:
    """A prefill engine that fails whenever it has a handle to read back from."""
    return status(500)(asked) if "kvloop_handle" in asked.params else prefill_plan(asked)


def refuses_handover(asked: Asked) -> Answer:
    """A decode engine that fails whenever it has something to pull."""
    return decode_plan(asked) if asked.params == ALONE else status(500)(asked)


def dies_once(plan: Plan) -> Plan:
    """An engine that closes the connection of one request, and answers the others."""
    left = [dies]
    return lambda asked: left.pop()(asked) if left else plan(asked)


async def served(router: Stack, **fields: Any) -> str:
    """One turn that must succeed; the route it took."""
    answer = await router.chat([HELLO], **fields)
    assert answer.status_code == 200, answer.text
    assert "Hello" in answer.text or "Hel" in answer.text
    return answer.headers["x-kvloop-route"]


@in_loop
async def test_prefill_fails() -> None:
    """Whatever a lone prefill engine does wrong, decode serves the request alone."""
    for plan in (status(500), status(503), status(302), dies, breaks_off, garbles, hangs):
        async with stack(prefill=[plan], prefill_timeout_s=0.3) as router:
            assert await served(router) == "decode"
            assert [one.params for one in router.decode[0].asked] == [ALONE]
            assert len(router.prefill[0].asked) == 1


@in_loop
async def test_prefill_gone() -> None:
    """A prefill engine that cannot be reached is left out for a moment, and found again when it is back."""
    async with stack() as router:
        port = int(router.prefill[0].url.rsplit(":", 1)[1])
        await router.prefill[0].stop()
        assert await served(router) == "decode"
        assert await served(router) == "decode"
        assert (
            await router.metric('fallbacks_total{hop="prefill",reason="connect"}') == 1
        )  # asked once, not twice
        url = router.prefill[0].url
        assert await router.metric(f'engine_up{{engine="{url}",role="prefill"}}') == 0
        await router.prefill[0].start(port)
        await asyncio.sleep(0.6)
        assert await served(router) == "return"
        assert await router.metric(f'engine_up{{engine="{url}",role="prefill"}}') == 1


@in_loop
async def test_other_prefill_engine() -> None:
    """One other prefill engine is tried, and no third one."""
    for plan in (status(500), dies, hangs):
        async with stack(prefill=[plan, plan, plan], prefill_timeout_s=0.3) as router:
            assert await served(router) == "decode"
            assert sorted(len(engine.asked) for engine in router.prefill) == [0, 1, 1]
        async with stack(prefill=[plan, prefill_plan], prefill_timeout_s=0.3) as router:
            assert await served(router) == "recompute"
            routes = [await served(router) for _ in range(3)]
            if plan not in (dies, hangs):  # one that broke off over a handle puts it under suspicion
                assert routes == ["return"] * 3


@in_loop
async def test_hung_prefill_left_out() -> None:
    """A prefill engine that let one request time out does not get the next one at once."""
    async with stack(prefill=[hangs], prefill_timeout_s=0.3) as router:
        assert [await served(router), await served(router)] == ["decode", "decode"]
        assert len(router.prefill[0].asked) == 1
        await router.prefill[0].cancelled.wait()


@in_loop
async def test_handle_refused() -> None:
    """A prefill engine that fails over a handle is asked once more without it: the turn is recomputed."""
    async with stack(prefill=[refuses_handles]) as router:
        assert [await served(router), await served(router)] == ["recompute", "recompute"]
        handles = [one.params.get("kvloop_handle") for one in router.prefill[0].asked]
        assert handles == [None, "h1", None]
        assert await router.metric('fallbacks_total{hop="prefill",reason="status_5xx"}') == 1


@in_loop
async def test_a_4xx_over_a_handle() -> None:
    """Prefill is asked once more without it, and its client never hears of it."""
    for stream in (False, True):
        for code in (400, 404, 422, 429):

            def wrong(asked: Asked, code: int = code) -> Answer:
                return status(code)(asked) if "kvloop_handle" in asked.params else prefill_plan(asked)

            async with stack(prefill=[wrong, wrong]) as router:
                assert [await served(router, stream=stream) for _ in range(2)] == ["recompute"] * 2
                asked = [one for engine in router.prefill for one in engine.asked]
                assert sum("kvloop_handle" in one.params for one in asked) == 1
                assert len(asked) == 3
                assert await router.metric('fallbacks_total{hop="prefill",reason="status_4xx"}') == 1


@in_loop
async def test_a_4xx_without_the_handle_is_the_client_s() -> None:
    """Also where one with it came before; the client gets the plain request's, and decode is not asked."""
    for stream in (False, True):
        async with stack() as router:
            await served(router, stream=stream)

            def wrong(asked: Asked) -> Answer:
                return status(422 if "kvloop_handle" in asked.params else 400)(asked)

            router.prefill[0].plan = wrong
            answer = await router.chat([HELLO], stream=stream)
            assert (answer.status_code, answer.json()["error"]["message"]) == (400, "status 400")
            handles = [one.params.get("kvloop_handle") for one in router.prefill[0].asked]
            assert handles == [None, "h1", None]
            assert len(router.decode[0].asked) == 1


@in_loop
async def test_prefill_says_the_client_is_wrong() -> None:
    """A 4xx of prefill's is the client's, as it is, and decode is not asked."""
    async with stack(prefill=[status(400), status(404)]) as router:
        codes = set()
        for _ in range(2):
            answer = await router.chat([HELLO])
            codes.add(answer.status_code)
            assert answer.json() == {
                "error": {"message": f"status {answer.status_code}", "code": answer.status_code}
            }
        assert codes == {400, 404}
        assert not router.decode[0].asked


@in_loop
async def test_handover_refused() -> None:
    """A lone decode engine that refuses the handover, by a status or by dying, gets a plain request."""

    def dies_over_handover(asked: Asked) -> Answer:
        return decode_plan(asked) if asked.params == ALONE else dies(asked)

    for plan in (refuses_handover, dies_over_handover):
        for stream in (False, True):
            async with stack(decode=[plan]) as router:
                assert await served(router, stream=stream) == "decode"
                assert [one.params == ALONE for one in router.decode[0].asked] == [False, True]


@in_loop
async def test_other_decode_engine() -> None:
    """The plain request goes to another decode engine where there is one."""
    async with stack(decode=[refuses_handover, refuses_handover]) as router:
        assert await served(router) == "decode"
        assert [len(engine.asked) for engine in router.decode] in ([1, 1],)
    async with stack(decode=[dies, decode_plan], prefill=[]) as router:
        assert [await served(router), await served(router)] == ["decode", "decode"]


@in_loop
async def test_stream_that_never_began() -> None:
    """A stream that breaks off before its first event is tried again: nothing has gone out."""
    left = [stream_answer(None)]
    async with stack(decode=[lambda asked: left.pop() if left else decode_plan(asked)]) as router:
        assert await served(router, stream=True) == "decode"
        assert len(router.decode[0].asked) == 2


@in_loop
async def test_decode_cannot() -> None:
    """When decode fails twice, the client gets decode's own error, or a 502 that says what happened."""
    async with stack(decode=[status(503)]) as router:
        answer = await router.chat([HELLO])
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, "status 503")
        assert len(router.decode[0].asked) == 2
    async with stack(decode=[dies]) as router:
        answer = await router.chat([HELLO])
        assert answer.status_code == 502
        assert answer.json()["error"] == {
            "message": "no decode engine could serve the request (closed)",
            "type": "server_error",
            "param": None,
            "code": None,
        }
    async with stack(decode=[hangs], timeouts=Timeouts(idle_timeout_s=0.1, drain_timeout_s=0.1)) as router:
        assert (await router.chat([HELLO])).status_code == 504


@in_loop
async def test_alone_fails() -> None:
    """What cannot be split and fails is tried on another decode engine, and not again on the same."""
    async with stack(decode=[status(500)]) as router:
        assert (await router.chat([HELLO], n=2)).status_code == 500
        assert len(router.decode[0].asked) == 1


@in_loop
async def test_decode_gone_and_back() -> None:
    """While decode is gone it is 502 and unhealthy; the first request after its return is served."""
    async with stack() as router:
        port = int(router.decode[0].url.rsplit(":", 1)[1])
        await router.decode[0].stop()
        assert (await router.chat([HELLO])).status_code == 502
        assert (await router.client.get("/health")).status_code == 503
        assert (await router.admin.get("/health")).json()["status"] == "down"
        await router.decode[0].start(port)
        assert await served(router) == "recompute"
        assert (await router.client.get("/health")).status_code == 200


@in_loop
async def test_kept_connection_closed() -> None:
    """An engine that closes a kept connection as a request goes out gets the request on a new one."""
    async with stack() as router:
        for _ in range(3):
            await served(router)
        for engine in (*router.prefill, *router.decode):
            engine.plan = dies_once(engine.plan)
            assert await served(router) == "return"
            assert engine.connections == 2


@in_loop
async def test_engine_without_keep_alive() -> None:
    """An engine that closes after each answer is served as well, with or without saying so."""
    async with stack() as router:
        for engine in (*router.prefill, *router.decode):
            engine.close_after_answer = True
        for _ in range(4):
            await served(router)
            await served(router, stream=True)


@in_loop
async def test_json_answer_bounded() -> None:
    """A JSON answer beyond the bound is a 502, not memory."""

    def long(_: Asked) -> Answer:
        return json_answer(b'{"a":"' + b"x" * 5000 + b'"}')

    async with stack(decode=[long], prefill=[], limits=Limits(max_answer_bytes=4000)) as router:
        answer = await router.chat([HELLO])
        assert answer.status_code == 502
        assert "oversize" in answer.json()["error"]["message"]


@in_loop
async def test_lost_slots() -> None:
    """After any mixture of failures no engine counts a request that is over."""
    for plan in (status(500), dies, breaks_off, hangs, refuses_handover):
        async with stack(
            decode=[plan],
            prefill=[plan],
            prefill_timeout_s=0.05,
            timeouts=Timeouts(0.1, idle_timeout_s=0.1, drain_timeout_s=0.1),
        ) as router:
            await asyncio.gather(*(router.chat([HELLO], stream=bool(number % 2)) for number in range(6)))
            health = (await router.admin.get("/health")).json()
            assert [engine["in_flight"] for engine in health["engines"]] == [0, 0]
            rows = (await router.admin.get("/engines")).json()["engines"]
            assert [row["held"] for row in rows] == [0, 0]


@in_loop
async def test_a_prefill_engine_whose_handovers_are_of_no_use() -> None:
    """It answers at once, and decode answers 5xx to whatever it hands over: it is left out, too."""

    def picky(asked: Asked) -> Answer:
        return decode_plan(asked) if asked.params == ALONE else Answer(500)

    async with stack(decode=[picky]) as router:
        for _ in range(40):
            assert await served(router) == "decode"
        url = router.prefill[0].url
        assert await router.metric(f'breaker_openings_total{{engine="{url}",role="prefill"}}') > 0
