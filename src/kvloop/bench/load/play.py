"""Conversations played against one endpoint: every turn when it is due, its history as the endpoint answered.

A turn is due a pause after the answer to the turn before it, however long that took. In a closed loop so many
conversations are under way at once, and another begins when one has ended; in an open loop each begins at its
own time, whatever the endpoint does. A turn whose history lacks an answer, because that failed, cannot be
asked: it is recorded as not asked, and nothing is lost.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvloop.bench.load.api import Style, body_of
from kvloop.bench.load.exchange import Endpoint, Heard
from kvloop.bench.workload.turns import Answer, Conversation, Message, Said

Render = Callable[[str, int], str]
"""The text made up for a stretch, by its name and tokens."""

MAX_UNDER_WAY = 10_000
"""Requests of an open loop at once: beyond, an endpoint is not slow but down."""


@dataclass(frozen=True, slots=True)
class Pace:
    """`concurrency` conversations at once, or None for an open loop. Recorded times are multiplied by
    `time_scale`; 0 leaves no pauses."""

    concurrency: int | None = 1
    time_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Target:
    """Whom to ask, how, and for how long to wait for the next byte. `session_header`: one that tells the
    conversation's name."""

    endpoint: Endpoint
    model: str
    style: Style
    timeout_s: float
    session_header: str | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A turn that was asked or could not be; seconds of the monotonic clock."""

    conversation: Conversation
    turn: int
    due_s: float
    sent_s: float
    heard: Heard


Hear = Callable[[Asked], None]


def text_of(message: Message, answers: Mapping[int, str], render: Render) -> tuple[str, str]:
    """A message's role and text. KeyError for an answer that there is not."""
    if isinstance(message, Said):
        return message.role, message.text
    if isinstance(message, Answer):
        return "assistant", answers[message.turn]
    return message.role, "".join(render(name, tokens) for name, tokens in message.stretches)


class Player:
    """Plays conversations on one target. `hear` is told of each turn when it is over."""

    def __init__(self, target: Target, render: Render, pace: Pace, hear: Hear) -> None:
        self._target = target
        self._render = render
        self._pace = pace
        self._hear = hear
        self._room = asyncio.Semaphore(MAX_UNDER_WAY)

    async def play(self, conversations: Sequence[Conversation]) -> None:
        """All of them, to their ends."""
        if self._pace.concurrency is None:
            began_s = time.monotonic()
            first_s = min((one.start_s for one in conversations), default=0.0)
            async with asyncio.TaskGroup() as open_loop:
                for one in conversations:
                    starts_s = began_s + (one.start_s - first_s) * self._pace.time_scale
                    open_loop.create_task(self._conversation(one, starts_s))
            return
        waiting = iter(conversations)

        async def lane() -> None:
            for conversation in waiting:
                await self._conversation(conversation, time.monotonic())

        async with asyncio.TaskGroup() as closed_loop:
            for _ in range(min(self._pace.concurrency, len(conversations))):
                closed_loop.create_task(lane())

    async def _conversation(self, conversation: Conversation, starts_s: float) -> None:
        after: dict[int | None, list[int]] = {}
        for number, turn in enumerate(conversation.turns):
            after.setdefault(turn.after, []).append(number)
        answers: dict[int, str] = {}

        async def branch(number: int, ended_s: float) -> None:
            while True:
                due_s = ended_s + conversation.turns[number].wait_s * self._pace.time_scale
                heard = await self._turn(conversation, number, due_s, answers)
                if heard.is_good:
                    answers[number] = heard.text
                ended_s = time.monotonic()
                if number not in after:
                    return
                number, *forks = after[number]
                for fork in forks:
                    branches.create_task(branch(fork, ended_s))

        async with asyncio.TaskGroup() as branches:
            for number in after.get(None, ()):
                branches.create_task(branch(number, starts_s))

    async def _turn(
        self, conversation: Conversation, number: int, due_s: float, answers: Mapping[int, str]
    ) -> Heard:
        wait_s = due_s - time.monotonic()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        turn, target = conversation.turns[number], self._target
        try:
            prompt = [text_of(message, answers, self._render) for message in turn.messages]
        except KeyError as missing:
            heard = Heard(error=f"not asked: turn {missing} of its history was not answered")
            self._hear(Asked(conversation, number, due_s, time.monotonic(), heard))
            return heard
        body = body_of(target.style, target.model, prompt, turn.answer_tokens)
        async with self._room:
            sent_s = time.monotonic()
            heard = await target.endpoint.ask(
                target.style.api.path,
                body,
                target.timeout_s,
                stream=target.style.stream,
                name=f"{conversation.name}-{number}",
                headers={} if target.session_header is None else {target.session_header: conversation.name},
                max_tokens=turn.answer_tokens,
            )
        self._hear(Asked(conversation, number, due_s, sent_s, heard))
        return heard
