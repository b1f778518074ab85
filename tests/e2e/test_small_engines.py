"""The awkward deployment: prefill with a prefix cache, few blocks on both engines, leases of a few
seconds."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvloop.local.stack import Stack
from kvloop.local.stack_config import StackConfig
from tests.e2e.conftest import BLOCK_TOKENS, CLAIM_TIMEOUT_MS, run_stack
from tests.e2e.counters import check_living
from tests.e2e.test_histories import assistant, check, opening, two_turns, user
from tests.e2e.turns import Pair, counted

LEASE_S = 6
PREFILL_BLOCKS = 64
DECODE_BLOCKS = 96


@pytest.fixture(scope="module")
def small_stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """One engine of each role, short of memory; module-scoped, so that it is gone when others need the
    cores."""
    flags = ("--max-model-len", "1024", "--block-size", str(BLOCK_TOKENS), "--max-num-batched-tokens", "256")
    yield from run_stack(
        request,
        StackConfig(
            router=False,
            engine_flags=flags,
            prefill_flags=("--num-gpu-blocks-override", str(PREFILL_BLOCKS)),
            decode_flags=("--num-gpu-blocks-override", str(DECODE_BLOCKS)),
            engine_extra={
                "kvloop_claim_timeout_ms": CLAIM_TIMEOUT_MS,
                "decoder_kv_blocks_ttl": LEASE_S,
                "kvloop_check_every_step": True,
            },
        ),
    )


@pytest.fixture
def small(small_stack: Stack) -> Iterator[Pair]:
    """The engines, driven by hand; their books are right when a test ends."""
    pair = Pair(small_stack.prefill[0], small_stack.decode[0])
    yield pair
    check_living(pair)


def test_only_what_is_not_local_is_read(small: Pair) -> None:
    """With a prefix cache on prefill, the prompt is local and only the answer's tokens come from decode."""
    messages = opening("local", words=30)
    first = small.turn(messages, max_tokens=120)
    messages = [*messages, assistant(first.text), user("Go on.")]
    second = small.turn(messages, first.filed)
    assert second.tokens == small.oracle(messages)
    prompt = first.account["prompt_tokens"]
    assert second.account["local_tokens"] == prompt // BLOCK_TOKENS * BLOCK_TOKENS
    assert second.returned >= 64
    assert second.account["computed_tokens"] < 64


def test_retention_never_blocks_live_work(small: Pair) -> None:
    """Decode full of leases takes new work at once: leases give way, nothing waits for their term."""
    for i in range(8):
        small.turn(opening(f"full{i}", words=40), max_tokens=8)
    burst = [opening(f"burst{i}", words=60) for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        turns = list(pool.map(lambda messages: small.turn(messages, max_tokens=8), burst))
    assert all(turn.tokens for turn in turns)
    assert counted(small.decode, "vllm:num_preemptions_total") == 0


def test_preemption_during_a_return(small: Pair) -> None:
    """Where prefill preempts a request that was returned, it is computed again and answers the same."""
    history, last = two_turns(small, "preempted")
    messages = [*history, user("And?")]
    with ThreadPoolExecutor(8) as pool:
        long_runs = [
            pool.submit(small.oracle, opening(f"hog{i}", words=20), 400, ignore_eos=True) for i in range(6)
        ]
        time.sleep(1)
        asked = [[*messages[:-1], user(f"And {i}?")] for i in range(2)]
        turns = list(pool.map(lambda branch: small.turn(branch, last.filed), asked))
        for run in long_runs:
            run.result()
    for branch, turn in zip(asked, turns, strict=True):
        check(small, turn, branch)
    assert counted(small.prefill, "vllm:num_preemptions_total") > 0, (
        "nothing was preempted: the test shows nothing"
    )
