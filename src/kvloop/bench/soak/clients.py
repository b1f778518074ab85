"""Everybody who asks, on one event loop: a turn begins at a fixed pace, whatever became of those before.

Which conversation goes on, who leaves, who reads slowly and who sends garbage is drawn from the seed. Each
answer is judged when it has come: against the oracle, or as the error that it is.
"""

import asyncio
import random
import time
from collections import deque
from dataclasses import dataclass

import msgspec

from kvloop.bench.soak.conversation import MAX_TURNS, Conversation, begun
from kvloop.bench.soak.exchange import Answer, Line, Manner
from kvloop.bench.soak.hearing import CHAT, COMPLETIONS, hear
from kvloop.bench.soak.hostile import BODIES, GARBAGE
from kvloop.bench.soak.oracle import expected
from kvloop.bench.soak.tally import Outcome, Report, Tally

STREAMED = 0.7
LEAVES, SLOW, FORKS, EDITS, UNKEPT = 0.05, 0.04, 0.05, 0.05, 0.03  # shares of turns
HOSTILE_EVERY = 10  # turns
MAX_UNDER_WAY = 256  # beyond it a turn waits: a fleet that stands still is not asked for more and more
MAX_TOKENS = (16, 96)
LONG, LONG_TOKENS = (
    0.08,
    (500, 1000),
)  # of chats and completions: answers in whose middle something can happen


@dataclass(frozen=True, slots=True)
class Traffic:
    """How many turns, how far apart, how long a client thinks (mean) and waits for an answer."""

    turns: int
    every_s: float
    think_s: float
    limit_s: float


class Clients:
    """All clients of one run. `tally` has what they report."""

    def __init__(self, port: int, seed: int, traffic: Traffic) -> None:
        self.tally = Tally()
        self.begun = 0
        self._port = port
        self._chance = random.Random(f"clients {seed}")
        self._traffic = traffic
        self._thinking: deque[tuple[float, Conversation, Line]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Begin every turn, and wait for the last to end."""
        next_s = time.monotonic()
        for number in range(self._traffic.turns):
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
            next_s = max(next_s + self._traffic.every_s, time.monotonic() - 1.0)
            while len(self._tasks) >= MAX_UNDER_WAY:
                await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            self._spawn(*self._next())
            if number % HOSTILE_EVERY == 0:
                self._start(asyncio.create_task(self._attack()))
        while self._tasks:
            await asyncio.wait(self._tasks)
        for _, _, line in self._thinking:
            line.close()

    def _start(self, task: "asyncio.Task[None]") -> None:
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error

    def _next(self) -> tuple[Conversation, Line]:
        """Who has thought long enough goes on; else somebody new comes."""
        chance = self._chance
        if self._thinking and self._thinking[0][0] <= time.monotonic():
            _, conversation, line = self._thinking.popleft()
            if conversation.turns < MAX_TURNS:
                if chance.random() < FORKS:
                    self.tally.forks += 1
                    self._think(conversation.copy(), Line(self._port))
                return conversation, line
            line.close()
        return begun(chance), Line(self._port)

    def _think(self, conversation: Conversation, line: Line) -> None:
        ready_s = time.monotonic() + self._chance.expovariate(1 / self._traffic.think_s)
        place = len(self._thinking)
        while place and self._thinking[place - 1][0] > ready_s:
            place -= 1
        self._thinking.insert(place, (ready_s, conversation, line))

    def _spawn(self, conversation: Conversation, line: Line) -> None:
        """Draw everything about a turn, in the order in which turns begin, and begin it."""
        chance = self._chance
        self.begun += 1
        if chance.random() < EDITS:
            self.tally.edits += 1
            conversation.edited(chance)
        before = conversation.copy()
        conversation.ask(chance)
        streamed = chance.random() < STREAMED
        leaves = chance.randrange(12) if chance.random() < LEAVES else None
        manner = Manner(slow=streamed and chance.random() < SLOW, leaves_after=leaves)
        self.tally.slow += manner.slow
        headers = {"authorization": f"Bearer tenant-{conversation.tenant}"}
        if conversation.session is not None:
            headers["x-session-id"] = conversation.session
        if chance.random() < UNKEPT:
            headers["x-kvloop-retain"] = "off"
        body = conversation.body(chance.randint(*MAX_TOKENS)) | ({"stream": True} if streamed else {})
        if conversation.path in (CHAT, COMPLETIONS) and not conversation.tools and chance.random() < LONG:
            body |= {"max_tokens": chance.randint(*LONG_TOKENS), "ignore_eos": True, "stream": True}
        turn = self._turn(conversation, before, line, body, headers, manner)
        self._start(asyncio.create_task(turn))

    async def _turn(
        self,
        conversation: Conversation,
        before: Conversation,
        line: Line,
        body: dict[str, object],
        headers: dict[str, str],
        manner: Manner,
    ) -> None:
        raw = msgspec.json.encode(conversation.wire_body(body))
        began_s, answer = time.monotonic(), Answer()
        asking = line.ask(conversation.path, headers, raw, manner)
        try:
            async with asyncio.timeout(self._traffic.limit_s):
                answer = await asking
            outcome, words = self._judged(conversation, body, answer)
        except TimeoutError:
            line.close()
            outcome, words = Outcome.STUCK, f"nothing, or no end, in {self._traffic.limit_s:g} s"
        if outcome is not Outcome.RIGHT:
            conversation.unask(before)
        route = answer.headers.get("x-kvloop-route", "")
        asked = conversation.path, bool(body.get("stream"))
        self.tally.reports.append(Report(began_s, time.monotonic(), *asked, outcome, route, words))
        self._think(conversation, line)

    def _judged(
        self, conversation: Conversation, body: dict[str, object], answer: Answer
    ) -> tuple[Outcome, str]:
        if answer.left:
            return Outcome.LEFT, ""
        if not answer.status:
            return Outcome.LOST, "the connection ended without an answer"
        if b"kvloop_handle" in answer.body:
            return Outcome.LEAKED, answer.body[-300:].decode(errors="replace")
        heard = hear(conversation.path, answer)
        if heard.error is not None:
            return (Outcome.REFUSED if answer.status != 200 else Outcome.ENDED), heard.error
        if heard.said is None or not answer.whole:
            end = answer.body[-200:].decode(errors="replace")
            return Outcome.SILENT, f"status {answer.status}, whole {answer.whole}: {end}"
        right = expected(conversation.path, body)
        if heard.said != right:
            return Outcome.WRONG, f"{heard.said} for {right}"[:600]
        conversation.answered(heard)
        return Outcome.RIGHT, ""

    async def _attack(self) -> None:
        """One hostile request on a connection of its own."""
        chance, line = self._chance, Line(self._port)
        try:
            async with asyncio.timeout(self._traffic.limit_s):
                if chance.random() < 0.3:
                    await line.raw(chance.choice(GARBAGE))
                    self.tally.hostile["garbage"] += 1
                    return
                path, body = chance.choice(BODIES)
                raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
                answer = await line.ask(path, {}, raw, Manner())
        except TimeoutError:
            line.close()
            self.tally.hostile["not answered in time"] += 1
            return
        line.close()
        refused = 400 <= answer.status < 500 and hear(path, answer).error is not None
        self.tally.hostile["refused" if refused else f"{path} answered {answer.status}: {raw[:80]!r}"] += 1
