"""Two prefill and two decode servers, one of the latter with two data-parallel ranks: a turn may land on any
of them, and what one holds is read back by whichever computes the next turn."""

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import pytest

from kvloop.bench.control import Middleman
from kvloop.local.stack import Engine, Stack
from kvloop.wire.control import Granted, Message
from kvloop.wire.handle import decode_handle
from tests.e2e.conftest import run_stack
from tests.e2e.test_histories import SEGMENT, Messages, assistant, check, opening, user
from tests.e2e.test_router import Answer, Client, grow
from tests.e2e.turns import Pair, counted

RANKS = 2
CONVERSATIONS = 4
SERVED = "vllm:request_success_total"


@pytest.fixture(scope="module")
def ranks_stack(
    request: pytest.FixtureRequest, pair_stack: Stack, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """One more prefill engine and a decode server of two ranks, of the same deployment as the pair: the same
    secret."""
    folder = tmp_path_factory.mktemp("ranks")
    shutil.copy(pair_stack.folder / "secret", folder)
    plain = pair_stack.config
    flags = (*plain.decode_flags, "--data-parallel-size", str(RANKS))
    yield from run_stack(request, replace(plain, folder=folder, decode_flags=flags))


@pytest.fixture
def prefills(pair: Pair, ranks_stack: Stack) -> list[Engine]:
    """Both prefill engines."""
    return [pair.prefill, *ranks_stack.prefill]


@pytest.fixture
def decodes(pair: Pair, ranks_stack: Stack) -> list[Engine]:
    """Both decode servers."""
    return [pair.decode, *ranks_stack.decode]


@contextmanager
def router_over(pair_stack: Stack, ranks_stack: Stack, *flags: str) -> Iterator[Client]:
    """A router in front of all four servers."""
    others = ("--prefill", ranks_stack.prefill[0].url, "--decode", ranks_stack.decode[0].url)
    router = pair_stack.add_router("router-over-all", (*others, "--policy", "sticky", *flags))
    try:
        yield Client(router.url)
    finally:
        router.shut_down()
        del pair_stack.routers[router.name]


@pytest.mark.parametrize(("prefill", "decode"), list(product(range(2), range(2))))
def test_any_engine_reads_back_from_any_other(
    prefills: list[Engine], decodes: list[Engine], prefill: int, decode: int
) -> None:
    """A turn on one pair of engines, the next on the other pair: read back to the token, and exact."""
    messages = opening("crossings")
    first = Pair(prefills[prefill], decodes[decode]).turn(messages)
    messages = [*messages, assistant(first.text), user("And?")]
    others = Pair(prefills[1 - prefill], decodes[1 - decode])
    turn = others.turn(messages, first.filed)
    check(others, turn, messages)
    assert turn.returned == first.account["prompt_tokens"] + len(first.tokens) - 1


def test_each_rank_has_ports_of_its_own(ranks_stack: Stack, pair: Pair, secret: bytes) -> None:
    """A conversation that vLLM moves from rank to rank: each rank's leases are claimed at its own control
    port and read at its own side channel."""
    server = ranks_stack.decode[0]
    ranks = Pair(pair.prefill, server)
    sides: dict[int, int] = {}

    def listen(message: Message, ask: Callable[[Message], Message]) -> Message:
        answer = ask(message)
        if isinstance(answer, Granted):
            sides[rank] = answer.source.port
        return answer

    messages: Messages = opening("ranks")
    turn = ranks.turn(messages)
    for _ in range(2 * RANKS):
        rank = decode_handle((turn.filed or {})["kvloop_handle"], secret).control_port - server.control_port
        assert 0 <= rank < RANKS
        held = turn.account["prompt_tokens"] + len(turn.tokens) - 1
        messages = [*messages, assistant(turn.text), user("And?")]
        with Middleman(secret, listen) as middleman:
            turn = ranks.turn(messages, middleman.take_over(turn.filed or {}))
        check(ranks, turn, messages)
        assert turn.returned == held
    assert len(sides) == len(set(sides.values())) == RANKS
    assert sides[1] - sides[0] == 1


def test_conversations_spread_over_all_engines(
    pair_stack: Stack, ranks_stack: Stack, prefills: list[Engine], decodes: list[Engine]
) -> None:
    """Several conversations at a time through one router: every engine takes part, everything held comes
    back, and every answer is a cold engine's."""
    engines = [*prefills, *decodes]
    before = [counted(engine, SERVED) for engine in engines]

    def hold(client: Client, number: int) -> list[tuple[Messages, Answer]]:
        messages = opening(f"crowd{number}-")
        turns = []
        for question in ("And?", "And then?", "And in the end?"):
            turns.append((messages, client.chat(messages)))
            messages = grow(*turns[-1], question)
        return turns

    with router_over(pair_stack, ranks_stack) as client, ThreadPoolExecutor(CONVERSATIONS) as pool:
        held = list(pool.map(lambda number: hold(client, number), range(CONVERSATIONS)))
    after = [counted(engine, SERVED) for engine in engines]
    assert all(now > then for now, then in zip(after, before, strict=True)), (before, after)
    oracle = Pair(prefills[0], decodes[0]).oracle
    for (first_messages, first), *later in held:
        assert (first.route, first.tokens) == ("recompute", oracle(first_messages))
        for messages, answer in later:
            assert (answer.route, answer.tokens) == ("return", oracle(messages))
            assert answer.body["usage"]["prompt_tokens"] - answer.reused < 2 * SEGMENT


def test_return_off(pair_stack: Stack, ranks_stack: Stack, pair: Pair) -> None:
    """Plain one-way serving: the same answers, and nothing is read back."""
    with router_over(pair_stack, ranks_stack, "--return", "off") as client:
        messages = opening("one-way")
        for question in ("And?", "And then?"):
            answer = client.chat(messages)
            assert (answer.route, answer.reused) == ("recompute", 0)
            assert answer.tokens == pair.oracle(messages)
            messages = grow(messages, answer, question)
