"""Leases that end early on real engines: what is still there is read back, and nothing else ever is.

Terms are short and no router renews them, so a lease is soft soon after its turn. Decode with a prefix cache
and without.
"""

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvloop.bench.control import ControlClient
from kvloop.core.handle import Handle
from kvloop.local.stack import Stack
from kvloop.local.stack_config import StackConfig
from kvloop.local.tiny import HEAD_DIM, KV_HEADS, LAYERS
from kvloop.wire.control import Message, Renew, Renewed
from kvloop.wire.handle import decode_handle
from tests.e2e.conftest import BLOCK_TOKENS, CLAIM_TIMEOUT_MS, run_stack
from tests.e2e.counters import check_books, counters, grown
from tests.e2e.test_histories import SEGMENT, Messages, check, two_turns, user
from tests.e2e.turns import Pair, Turn, post

TERM_S = 3
DECODE_BLOCKS = 96
USABLE_BLOCKS = DECODE_BLOCKS - 1  # vLLM keeps one as its null block
MAX_TOKENS = USABLE_BLOCKS * BLOCK_TOKENS
BLOCK_BYTES = LAYERS * 2 * KV_HEADS * HEAD_DIM * 4 * BLOCK_TOKENS
SOON_S = 30
CLAIMS = "kvloop_claims_total{outcome=granted}"
KEPT = "kvloop_reads_total{outcome=kept}"


@pytest.fixture(scope="module", params=["prefix cache", "no prefix cache"])
def stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """A prefill engine without a prefix cache, and a decode engine with few blocks."""
    caching = "--enable-prefix-caching" if request.param == "prefix cache" else "--no-enable-prefix-caching"
    yield from run_stack(
        request,
        StackConfig(
            router=False,
            engine_flags=(
                "--max-model-len",
                str(MAX_TOKENS),
                "--block-size",
                str(BLOCK_TOKENS),
            ),
            prefill_flags=("--no-enable-prefix-caching",),
            decode_flags=(caching, "--num-gpu-blocks-override", str(DECODE_BLOCKS)),
            engine_extra={"kvloop_claim_timeout_ms": CLAIM_TIMEOUT_MS, "kvloop_check_every_step": True},
            decode_extra={"kvloop_lease_term": TERM_S},
        ),
    )


@pytest.fixture
def pair(stack: Stack) -> Iterator[Pair]:
    """The engines, driven by hand. Whatever the test does, at every step every reference is accounted for."""
    made = Pair(stack.prefill[0], stack.decode[0])
    yield made
    check_books(made.prefill, made.decode)


@pytest.fixture
def secret(stack: Stack) -> bytes:
    """The deployment's secret."""
    return (stack.folder / "secret").read_bytes().strip()


def expired(pair: Pair, subject: str) -> tuple[Messages, Turn]:
    """A conversation whose lease has ended and whose decode engine is idle: its history with the next
    question, and the turn that left it."""
    history, last = two_turns(pair, subject)
    deadline = time.monotonic() + SOON_S
    while counters(pair.decode)["kvloop_leases{state=granted}"]:
        assert time.monotonic() < deadline, "a lease outlived its term"
        time.sleep(0.2)
    now = counters(pair.decode)
    assert now["kvloop_lease_blocks"] == 0
    assert now["kvloop_leases{state=soft}"] > 0
    return [*history, user("And?")], last


def held_tokens(turn: Turn) -> int:
    """Tokens whose KV decode had when the turn ended."""
    return int(turn.account["prompt_tokens"]) + len(turn.tokens) - 1


def reuse_blocks(pair: Pair, count: int) -> None:
    """Another request needs so many of decode's blocks at once."""
    rng = random.Random(count)
    body = {
        "model": "tiny",
        "prompt": [rng.randrange(1_000, 20_000) for _ in range(count * BLOCK_TOKENS - 1)],
        "max_tokens": 1,
        "temperature": 0,
    }
    post(pair.decode.url + "/v1/completions", body)


def ask(handle: Handle, secret: bytes, message: Message) -> Message:
    """What decode answers on the control channel."""
    with ControlClient(secret, handle.control_host, handle.control_port) as client:
        return client.ask(message)


def test_an_expired_lease_is_granted_again(pair: Pair) -> None:
    """The idle engine answers the claim at once, all that it held is read back, and the answer is right."""
    messages, last = expired(pair, "again")
    prefill, decode = counters(pair.prefill), counters(pair.decode)
    turn = pair.turn(messages, last.filed)
    check(pair, turn, messages)
    assert turn.returned > held_tokens(last) - SEGMENT
    assert grown(prefill, counters(pair.prefill), KEPT) == 1
    assert grown(decode, counters(pair.decode), CLAIMS) == 1


def test_forks_of_an_expired_lease(pair: Pair) -> None:
    """Several readers at once: each gets it."""
    messages, last = expired(pair, "forks")
    before = counters(pair.decode)
    branches = [[*messages[:-1], user(f"Branch {i}, please.")] for i in range(3)]
    with ThreadPoolExecutor(3) as pool:
        turns = list(pool.map(lambda branch: pair.turn(branch, last.filed), branches))
    for branch, turn in zip(branches, turns, strict=True):
        check(pair, turn, branch)
        assert turn.returned > held_tokens(last) - SEGMENT
    assert grown(before, counters(pair.decode), CLAIMS) == 3


@pytest.mark.parametrize("reused", [1, 5])
def test_of_a_lease_whose_blocks_were_reused_the_beginning_is_granted(pair: Pair, reused: int) -> None:
    """Other requests took so many of its blocks, from its end: what precedes them is read back, to the whole
    segment, and the rest computed."""
    messages, last = expired(pair, f"reused{reused}")
    blocks = -(-held_tokens(last) // BLOCK_TOKENS)
    reuse_blocks(pair, USABLE_BLOCKS - blocks + reused)
    turn = pair.turn(messages, last.filed)
    check(pair, turn, messages)
    assert turn.returned == (blocks - reused) * BLOCK_TOKENS // SEGMENT * SEGMENT


def test_of_a_lease_whose_blocks_were_all_reused_nothing_is_granted(pair: Pair) -> None:
    """The claim is refused, and the turn computed."""
    messages, last = expired(pair, "all reused")
    reuse_blocks(pair, USABLE_BLOCKS)
    turn = pair.turn(messages, last.filed)
    check(pair, turn, messages)
    assert (turn.returned, turn.reason) == (0, "unknown_lease")


def test_a_lease_that_is_renewed_outlives_its_term(pair: Pair, secret: bytes) -> None:
    """A router's heartbeat holds its blocks; without it they are free, and the next heartbeat is told so."""
    history, last = two_turns(pair, "renewed")
    handle = decode_handle((last.filed or {})["kvloop_handle"], secret)
    renewal = Renew([(handle.lease_id, TERM_S * 1_000, 900), ("never-was", 1_000, 0)])
    ends = time.monotonic() + 2 * TERM_S
    while time.monotonic() < ends:
        assert ask(handle, secret, renewal) == Renewed(["never-was"], [])
        time.sleep(0.5)
    held = counters(pair.decode)
    assert held["kvloop_leases{state=granted}"] == 1
    assert held["kvloop_lease_blocks"] == -(-held_tokens(last) // BLOCK_TOKENS)
    assert held["kvloop_lease_bytes"] == held["kvloop_lease_blocks"] * BLOCK_BYTES
    time.sleep(TERM_S + 0.5)
    assert counters(pair.decode)["kvloop_lease_blocks"] == 0
    assert ask(handle, secret, renewal) == Renewed(["never-was"], [handle.lease_id])
    messages = [*history, user("And?")]
    turn = pair.turn(messages, last.filed)
    check(pair, turn, messages)
    assert turn.returned > 0


def test_engines_count_what_they_do(pair: Pair) -> None:
    """On both engines' own `/metrics`, to the token and the byte."""
    history, last = two_turns(pair, "counted")
    messages = [*history, user("And?")]
    prefill, decode = counters(pair.prefill), counters(pair.decode)
    turn = pair.turn(messages, last.filed)
    counted: Any = counters(pair.prefill)
    for source in ("local", "returned", "computed"):
        name = f"kvloop_prompt_tokens_total{{source={source}}}"
        assert grown(prefill, counted, name) == turn.account[f"{source}_tokens"]
    read_blocks = -(-turn.returned // BLOCK_TOKENS)
    returned = "kvloop_read_bytes_total{direction=return}"
    assert grown(prefill, counted, returned) == read_blocks * BLOCK_BYTES
    assert grown(prefill, counted, KEPT) == 1
    counted = counters(pair.decode)
    assert grown(decode, counted, CLAIMS) == 1
    assert grown(decode, counted, "kvloop_leases_granted_total") >= 1
    assert grown(decode, counted, "kvloop_read_bytes_total{direction=handover}") > 0
    before = counted
    refused = pair.prefill_hop([user("nothing of the kind"), *messages], last.filed)["kvloop_turn"]
    assert refused["reason"] == "no_match"
    assert grown(before, counters(pair.decode), "kvloop_claims_total{outcome=no_match}") == 1
    name = "kvloop_recomputed_total{reason=no_match}"
    assert grown(prefill, counters(pair.prefill), name) == 1
    time.sleep(1)
    assert (
        counters(pair.decode)["kvloop_lease_block_seconds_total"] > before["kvloop_lease_block_seconds_total"]
    )
