"""What a run asks beside its requests: models, tokens a word, metrics, decisions, a copy's speed."""

import asyncio
import subprocess
from typing import Any
from unittest import mock

import pytest

from kvloop.bench.load import copying
from kvloop.bench.load.api import Style
from kvloop.bench.load.calibration import tokens_per_word
from kvloop.bench.load.exchange import Endpoint
from kvloop.bench.load.explained import Split, splits
from kvloop.bench.load.play import Target
from kvloop.bench.load.served import Served, served
from kvloop.bench.load.watch import Watch, totals_of
from kvloop.errors import UserError
from tests.router.fake_engine import DONE, Answer, Asked, chunk, engines, json_answer, stream_answer
from tests.router.harness import in_loop

TRICKLE = Answer(pieces=[b" ", 0.02] * 500)

METRICS = """# HELP kvloop_lease_bytes held
# TYPE kvloop_lease_bytes gauge
kvloop_lease_bytes{engine="0"} 100
kvloop_lease_bytes{engine="1"} 20.5
vllm:kv_cache_usage_perc{model_name="m {x}"} 0.25
vllm:nixl_xfer_time_seconds_sum{} 1e-2
strange nonsense
"""


def counting(tokens_a_word: float) -> Any:
    """An endpoint that counts a prompt's words, with a template of 30 tokens."""

    def plan(asked: Asked) -> Answer:
        words = len(asked.body["messages"][0]["content"].split())
        usage = b'data: {"choices":[],"usage":{"prompt_tokens":%d}}\n\n' % (30 + round(words * tokens_a_word))
        return stream_answer(chunk("a"), usage, DONE)

    return plan


@in_loop
async def test_words_are_measured_without_the_template() -> None:
    """Whatever it adds to each prompt; an endpoint that does not count is believed to have a token a word."""
    for plan, expected in ((counting(1.5), 1.5), (lambda _: stream_answer(chunk("a"), DONE), 1.0)):
        async with engines(plan) as (engine,):
            target = Target(Endpoint(engine.url), "m", Style(), 5.0)
            assert await tokens_per_word(target, 1) == pytest.approx(expected, rel=0.01)
            target.endpoint.close()


@in_loop
async def test_an_endpoint_that_refuses_is_said_at_once() -> None:
    """Before anything is measured."""
    async with engines(lambda _: json_answer({"error": {"message": "no"}}, 400)) as (engine,):
        target = Target(Endpoint(engine.url), "m", Style(), 5.0)
        with pytest.raises(UserError, match="does not answer: HTTP 400"):
            await tokens_per_word(target, 1)
        target.endpoint.close()


@in_loop
async def test_models_that_only_trickle_in_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then is no answer."""
    monkeypatch.setattr("kvloop.bench.load.served.TIMEOUT_S", 0.2)
    async with engines(counting(1)) as (engine,):
        engine.models = TRICKLE
        with pytest.raises(UserError, match=r"no end after 0.2 s"):
            await asyncio.to_thread(served, engine.url, None, None)


@in_loop
async def test_models_are_asked_for() -> None:
    """The first, or the one that is named; with its bound where there is one."""
    async with engines(counting(1)) as (engine,):
        engine.models = json_answer({"data": [{"id": "a", "max_model_len": 100}, {"id": "b"}]})
        assert await asyncio.to_thread(served, engine.url, "key", None) == Served("a", 100)
        assert engine.listing_headers["authorization"] == "Bearer key"
        assert await asyncio.to_thread(served, engine.url, None, "b") == Served("b", None)
        for answer, said in (
            (engine.models, "serves a, b, not c"),
            (json_answer({"data": []}), "serves no model"),
            (json_answer(b"{"), "does not answer with models"),
            (json_answer({}, 401), "HTTP 401"),
        ):
            engine.models = answer
            with pytest.raises(UserError, match=said):
                await asyncio.to_thread(served, engine.url, None, "c")


def test_metrics_are_summed_over_their_labels() -> None:
    """And what is no number is passed over."""
    totals = totals_of(METRICS)
    assert totals["kvloop_lease_bytes"] == 120.5
    assert totals["vllm:kv_cache_usage_perc"] == 0.25
    assert totals["vllm:nixl_xfer_time_seconds_sum"] == 0.01


@in_loop
async def test_what_engines_hold_is_sampled() -> None:
    """Bytes are added up, usage is the mean; an engine that does not answer counts for nothing, and a leg
    without engines has no samples."""
    async with engines(lambda _: json_answer(METRICS.encode())) as (engine,):
        sample = await Watch(holders=[engine.url, engine.url]).sample("kvloop", 3, 1.5)
        assert sample is not None
        assert (sample.leg, sample.round, sample.held_bytes, sample.kv_usage) == ("kvloop", 3, 241.0, 0.25)
        totals = await Watch(engines=[engine.url, engine.url]).totals()
        assert totals.transfer_s == 0.02
        assert totals.transferred_bytes is None
        assert totals.cpu_s is None
    gone = await Watch(holders=["http://127.0.0.1:9"]).sample("x", 0, 0.0)
    assert gone is not None
    assert gone.held_bytes is None
    assert await Watch().sample("x", 0, 0.0) is None


@in_loop
async def test_prefill_is_divided_as_the_router_says() -> None:
    """Reading back, and the rest; of what it does not know, nothing."""

    def plan(asked: Asked) -> Answer:
        name = asked.path.rpartition("/")[2]
        decisions = {
            "returned": {"prefilled_ms": 50.0, "prefill": {"read_us": 12_000}},
            "computed": {"prefilled_ms": 80.0, "prefill": None},
            "appended": {"prefilled_ms": None, "prefill": None},
        }
        return json_answer(decisions.get(name, {}), 200 if name in decisions else 404)

    async with engines(plan) as (router,):
        found = await splits(router.url, ["returned", "computed", "appended", "unknown"])
    assert found == {"returned": Split(12.0, 38.0), "computed": Split(0.0, 80.0)}
    assert await splits(None, ["returned"]) == {}
    assert await splits("http://127.0.0.1:9", ["returned"]) == {}


def test_a_plain_copy_is_measured_or_not_there() -> None:
    """Where the system does not allow it, there is no figure; a child is never left behind."""
    rate = copying.copy_bytes_per_s()
    assert rate is None or rate > 1e6
    with mock.patch.object(copying, "_measured", side_effect=PermissionError):
        assert copying.copy_bytes_per_s() is None
    with mock.patch.object(copying, "_CHILD", "raise SystemExit(1)"):
        assert copying.copy_bytes_per_s() is None
    assert (
        subprocess.run(["pgrep", "-f", "ctypes.memset.held"], capture_output=True, check=False).stdout == b""
    )
