"""Conversations as an endpoint sees them: order, histories, pauses, forks, failures."""

import asyncio
import json
from collections.abc import Callable

from kvloop.bench.load.api import Style
from kvloop.bench.load.exchange import Endpoint
from kvloop.bench.load.flags import pauses_s
from kvloop.bench.load.play import Asked, Pace, Player, Target
from kvloop.bench.workload.turns import Answer, Conversation, MadeUp, Said, Turn
from tests.router.fake_engine import DONE, chunk, engines, json_answer, stream_answer
from tests.router.fake_engine import Answer as EngineAnswer
from tests.router.fake_engine import Asked as EngineAsked
from tests.router.harness import in_loop


def line(name: str, turns: int, start_s: float = 0.0, wait_s: float = 0.0) -> Conversation:
    """A conversation without forks."""
    made: list[Turn] = []
    history: tuple[MadeUp | Answer, ...] = ()
    for number in range(turns):
        history = (*history, MadeUp("user", ((f"{name}{number}", 2),)))
        made.append(Turn(history, 5, number - 1 if number else None, wait_s))
        history = (*history, Answer(number))
    return Conversation(name, tuple(made), start_s)


def render(name: str, tokens: int) -> str:
    """A stretch that can be read."""
    return f" {name}*{tokens}"


async def played(
    conversations: list[Conversation],
    pace: Pace,
    plan: Callable[[EngineAsked], EngineAnswer],
    url: str | None = None,
) -> tuple[list[Asked], list[list[str]]]:
    """What was heard, and the contents of the messages of each request in order of coming."""
    heard: list[Asked] = []
    async with engines(plan) as (engine,):
        endpoint = Endpoint(url or engine.url)
        target = Target(endpoint, "m", Style(), 5.0)
        await Player(target, render, pace, heard.append).play(conversations)
        endpoint.close()
        asked = [
            [said["content"] for said in json.loads(one.raw)["messages"]] for one in engine.generations()
        ]
    return heard, asked


def echo(asked: EngineAsked) -> EngineAnswer:
    """Answers with how many messages it was sent."""
    return stream_answer(chunk(f"a{len(asked.body['messages'])}"), DONE)


@in_loop
async def test_a_history_has_what_the_endpoint_answered() -> None:
    """Every turn resends all before it, with the answers that came."""
    heard, asked = await played([line("x", 3)], Pace(1), echo)
    assert asked == [
        [" x0*2"],
        [" x0*2", "a1", " x1*2"],
        [" x0*2", "a1", " x1*2", "a3", " x2*2"],
    ]
    assert [one.turn for one in heard] == [0, 1, 2]
    assert all(one.heard.is_good for one in heard)


@in_loop
async def test_a_closed_loop_has_so_many_conversations_under_way() -> None:
    """Never more, and all of them in the end."""
    under_way = most = 0

    def count(asked: EngineAsked) -> EngineAnswer:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        return echo(asked)

    heard: list[Asked] = []

    def hear(one: Asked) -> None:
        nonlocal under_way
        under_way -= 1
        heard.append(one)

    async with engines(count) as (engine,):
        endpoint = Endpoint(engine.url)
        player = Player(Target(endpoint, "m", Style(), 5.0), render, Pace(3), hear)
        await player.play([line(str(number), 4) for number in range(10)])
        endpoint.close()
    assert most == 3
    assert len(heard) == 40


@in_loop
async def test_an_open_loop_keeps_its_own_time() -> None:
    """A conversation begins at its start, whatever others do; pauses are counted from answers."""
    first, second = line("a", 1, 100.0), line("b", 2, 100.1, wait_s=0.1)
    heard, _ = await played([first, second], Pace(None), echo)
    by = {(one.conversation.name, one.turn): one for one in heard}
    assert by["b", 0].sent_s - by["a", 0].sent_s >= 0.09
    assert by["b", 1].due_s - by["b", 0].sent_s >= 0.1
    assert all(one.sent_s >= one.due_s - 0.001 for one in heard)


@in_loop
async def test_time_can_be_scaled_away() -> None:
    """With a scale of 0 nothing waits."""
    heard, _ = await played([line("a", 3, 50.0, wait_s=1000.0)], Pace(None, 0.0), echo)
    assert len(heard) == 3


@in_loop
async def test_a_fork_goes_on_from_the_same_answer() -> None:
    """Two turns after one see the same history, and may be under way at once."""
    root = Turn((Said("user", "q"),), 5)
    forks = [Turn((Said("user", "q"), Answer(0), Said("user", str(n))), 5, 0) for n in range(3)]
    heard, asked = await played([Conversation("f", (root, *forks))], Pace(1), echo)
    assert sorted(map(tuple, asked[1:])) == [("q", "a1", str(n)) for n in range(3)]
    assert sorted(one.turn for one in heard) == [0, 1, 2, 3]


@in_loop
async def test_what_needs_a_failed_answer_is_recorded_as_not_asked() -> None:
    """Nothing is sent for it, and nothing is lost: each turn is heard of once."""

    def second_fails(asked: EngineAsked) -> EngineAnswer:
        if len(asked.body["messages"]) == 3:
            return json_answer({"error": {"message": "out of order"}}, 500)
        return echo(asked)

    heard, asked = await played([line("x", 5)], Pace(1), second_fails)
    assert len(asked) == 2
    assert [one.turn for one in heard] == [0, 1, 2, 3, 4]
    errors = [one.heard.error for one in heard]
    assert errors[0] is None
    assert "out of order" in str(errors[1])
    assert all("not asked: turn 1" in str(error) for error in errors[2:])


@in_loop
async def test_a_conversation_may_be_long() -> None:
    """A thousand turns are no thousand nested calls. Each resends one message, so that it stays cheap."""
    turns = [Turn((Said("user", str(n)),), 5, n - 1 if n else None) for n in range(1000)]
    heard, _ = await played([Conversation("long", tuple(turns))], Pace(1), echo)
    assert [one.turn for one in heard] == list(range(1000))


@in_loop
async def test_an_endpoint_that_is_not_there_ends_every_conversation() -> None:
    """Quickly, with an error for each turn."""
    async with asyncio.timeout(10):
        heard, _ = await played([line("x", 3), line("y", 2)], Pace(1), echo, url="http://127.0.0.1:9")
    assert len(heard) == 5
    assert not any(one.heard.is_good for one in heard)


def test_how_long_pauses_take_is_known_beforehand() -> None:
    """Of a closed loop, by its lanes; there are never more of these than conversations."""
    two = [line("x", 3, wait_s=10.0), line("y", 3, wait_s=10.0)]
    total_s = sum(turn.wait_s for one in two for turn in one.turns)
    assert pauses_s(Pace(1), two) == total_s
    assert pauses_s(Pace(8, 0.5), two) == total_s / 4
    assert pauses_s(Pace(None), two) == 0
