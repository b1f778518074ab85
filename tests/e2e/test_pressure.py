"""A decode engine full of leases that gets a burst schedules it as an engine without leases does."""

import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvloop.local.stack import Engine, Stack
from kvloop.local.stack_config import StackConfig
from tests.e2e.conftest import BLOCK_TOKENS, run_stack
from tests.e2e.counters import check_books, counters, grown
from tests.e2e.turns import post

DECODE_BLOCKS = 64
REQUESTS, PROMPT_TOKENS, ANSWER_TOKENS = 12, 200, 100
ARRIVAL_S = 2
"""While an engine is paused its requests queue up: long enough for a burst to arrive as a whole."""


@pytest.fixture(scope="module")
def decode(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """One decode engine that is short of memory, and can be paused."""
    flags = ("--max-model-len", "1024", "--block-size", str(BLOCK_TOKENS), "--max-num-batched-tokens", "256")
    config = StackConfig(
        router=False,
        engine_flags=flags,
        decode_flags=("--num-gpu-blocks-override", str(DECODE_BLOCKS)),
        engine_extra={"kvloop_check_every_step": True},
        decode_extra={"kvloop_max_retained": 1.0},
        env={"VLLM_SERVER_DEV_MODE": "1"},
    )
    stack: Stack
    for stack in run_stack(request, config):
        yield stack.decode[0]


def answers(engine: Engine, prompts: list[list[int]], max_tokens: int, *, retain: bool) -> list[list[int]]:
    """What the engine generates for each, greedily, to the last token allowed."""
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": prompts,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "kv_transfer_params": {
            "do_remote_decode": False,
            "do_remote_prefill": False,
            "kvloop_retain": retain,
        },
    }
    answer = json.loads(post(engine.url + "/v1/completions", body))
    return [choice["token_ids"] for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]


def prompts(count: int, tokens: int, seed: int) -> list[list[int]]:
    """Prompts that share nothing."""
    rng = random.Random(seed)
    return [[rng.randrange(1_000, 20_000) for _ in range(tokens)] for _ in range(count)]


def command(engine: Engine, path: str) -> dict[str, Any]:
    """One of vLLM's commands for developers."""
    answer: dict[str, Any] = json.loads(post(engine.url + path, {}))
    return answer


def burst(engine: Engine, *, retain: bool) -> tuple[list[list[int]], dict[str, float]]:
    """Fill the engine, then let the burst in, all of it before the first step: the answers, and what each
    counter has grown by."""
    assert command(engine, "/reset_prefix_cache")["success"], "blocks are still held"
    for prompt in prompts(20, 150, seed=1):
        answers(engine, [prompt], 4, retain=retain)
    before = counters(engine)
    wanted = prompts(REQUESTS, PROMPT_TOKENS, seed=2)
    with ThreadPoolExecutor(1) as pool:
        command(engine, "/sleep?level=0&mode=keep")
        running = pool.submit(answers, engine, wanted, ANSWER_TOKENS, retain=retain)
        time.sleep(ARRIVAL_S)
        command(engine, "/wake_up?tags=scheduling")
        generated = running.result()
    after = counters(engine)
    return generated, {name: grown(before, after, name) for name in after}


def test_a_burst_costs_neither_preemption_nor_wait_for_leases(
    decode: Engine,
) -> None:
    """Counted by vLLM (preemptions) and by its allocations that fail (a request waits, or is preempted)."""
    without, counted_without = burst(decode, retain=False)
    assert counters(decode)["kvloop_leases{state=granted}"] == 0
    with_leases, counted_with = burst(decode, retain=True)
    assert with_leases == without
    for name in ("vllm:num_preemptions_total", "kvloop_allocations_total{outcome=refused}"):
        assert counted_with[name] == counted_without[name] > 0, name
    assert counted_with["kvloop_allocations_total{outcome=relieved}"] > 0
    assert counted_without["kvloop_allocations_total{outcome=relieved}"] == 0
    assert counted_with["kvloop_leases_ended_total{state=reclaimed}"] > 0
    check_books(decode)


def hits_after_waiting(engine: Engine, *, retain: bool) -> float:
    """Tokens that a prompt hits behind three others that arrive before it, on an engine that was filled and
    has then computed that prompt once, not retained."""
    assert command(engine, "/reset_prefix_cache")["success"], "blocks are still held"
    for prompt in prompts(20, 150, seed=6):
        answers(engine, [prompt], 4, retain=retain)
    (wanted,) = prompts(1, 200, seed=7)
    answers(engine, [wanted], 4, retain=False)
    before = counters(engine)
    with ThreadPoolExecutor(1) as pool:
        command(engine, "/sleep?level=0&mode=keep")
        running = pool.submit(answers, engine, [*prompts(3, 200, seed=8), wanted], 4, retain=retain)
        time.sleep(ARRIVAL_S)
        command(engine, "/wake_up?tags=scheduling")
        running.result()
    return grown(before, counters(engine), "vllm:prefix_cache_hits_total")


def test_who_waits_hits_what_it_would_without_leases(decode: Engine) -> None:
    """256 tokens are computed in a step, so the fourth of four prompts waits while others take blocks."""
    before = counters(decode)
    with_leases = hits_after_waiting(decode, retain=True)
    assert grown(before, counters(decode), "kvloop_leases_ended_total{state=reclaimed}") > 0
    assert with_leases == hits_after_waiting(decode, retain=False) >= 200 - BLOCK_TOKENS
    check_books(decode)


def test_a_reset_of_the_prefix_cache_ends_every_lease(decode: Engine) -> None:
    """vLLM refuses it while blocks are in use: as when weights are updated, or the engine goes to sleep."""
    answers(decode, prompts(3, 150, seed=3), 4, retain=True)
    before = counters(decode)
    assert before["kvloop_leases{state=granted}"] > 0
    assert command(decode, "/reset_prefix_cache")["success"]
    now = counters(decode)
    assert now["kvloop_lease_blocks"] == now["kvloop_leases{state=granted}"] == 0
    assert now["kvloop_leases{state=soft}"] == 0
    check_books(decode)


def test_who_does_not_want_to_be_retained_is_not(decode: Engine) -> None:
    """`kvloop_retain: false`: no lease, no handle."""
    before = counters(decode)
    answers(decode, prompts(2, 150, seed=4), 4, retain=False)
    assert grown(before, counters(decode), "kvloop_leases_granted_total") == 0
    answers(decode, prompts(2, 150, seed=5), 4, retain=True)
    assert grown(before, counters(decode), "kvloop_leases_granted_total") == 2
