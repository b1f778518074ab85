"""A whole run: legs take turns with the same conversations, and every request is written down.

Conversations are dealt out into rounds. In a round each leg is asked for the round's conversations before the
next leg is, in an order that turns round, so that a machine that drifts favours none. The records of a round
are written when all legs have had it, for only then can their answers be compared.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from kvloop.bench.load import record
from kvloop.bench.load.agree import compared, digest
from kvloop.bench.load.api import Usage
from kvloop.bench.load.deployments import Side
from kvloop.bench.load.explained import Split, splits
from kvloop.bench.load.play import Asked, Pace, Player, Render, Target
from kvloop.bench.load.watch import Totals
from kvloop.bench.workload.turns import Conversation, planned_tokens

SAY_EVERY_S = 15.0
_MS = 1000.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Course:
    """How a run goes. `warm_up`: conversations that come before all others and count for nothing."""

    rounds: int
    pace: Pace
    warm_up: tuple[Conversation, ...]
    sample_every_s: float = 2.0


@dataclass(slots=True)
class _Played:
    """One leg's window of a round."""

    side: Side
    began_s: float
    asked: list[Asked]
    samples: list[record.Sample]
    window: record.Window
    splits: dict[str, Split]


class Bench:
    """Asks `targets`, one for each of `sides`, and writes to `raw`."""

    def __init__(
        self,
        sides: Sequence[Side],
        targets: Sequence[Target],
        render: Render,
        course: Course,
        raw: BinaryIO,
        say: Say,
    ) -> None:
        self._legs = tuple(zip(sides, targets, strict=True))
        self._render = render
        self._course = course
        self._raw = raw
        self._say = say
        self._turns = self._turns_done = 0
        self._began_s = self._said_s = 0.0

    async def run(self, conversations: Sequence[Conversation]) -> None:
        """Warm up, then all rounds. What is written so far stays, whatever ends it."""
        course = self._course
        dealt = [tuple(conversations[number :: course.rounds]) for number in range(course.rounds)]
        everything = [course.warm_up, *dealt]
        self._turns = len(self._legs) * sum(len(one.turns) for part in everything for one in part)
        self._began_s = self._said_s = time.monotonic()
        if course.warm_up:
            await self._round(-1, course.warm_up, self._legs)
        for number, part in enumerate(dealt):
            shift = number % len(self._legs)
            await self._round(number, part, self._legs[shift:] + self._legs[:shift])
        self._write(record.End("done"))

    async def _round(
        self, number: int, part: Sequence[Conversation], legs: Sequence[tuple[Side, Target]]
    ) -> None:
        played: list[_Played] = []
        try:
            for side, target in legs:
                await self._window(number, part, side, target, played)
        finally:
            self._write_round(number, part, played)

    async def _window(
        self,
        number: int,
        part: Sequence[Conversation],
        side: Side,
        target: Target,
        played: list[_Played],
    ) -> None:
        """Adds to `played` what was asked, also where it is cut off."""
        side.wake()
        samples: list[record.Sample] = []
        asked: list[Asked] = []
        before = await side.watch.totals()
        began_s, client_s = time.monotonic(), time.process_time()

        def hear(one: Asked) -> None:
            asked.append(one)
            self._progress(number, side.leg.name)

        sampling = asyncio.ensure_future(self._sample(number, side, began_s, samples))
        try:
            await Player(target, self._render, self._course.pace, hear).play(part)
        finally:
            sampling.cancel()
            took_s, client_s = time.monotonic() - began_s, time.process_time() - client_s
            after = await side.watch.totals()
            found = await splits(side.admin_url, [one.heard.request_id for one in asked])
            side.rest()
            window = _window_of(side.leg.name, number, took_s, client_s, before, after)
            played.append(_Played(side, began_s, asked, samples, window, found))

    async def _sample(self, number: int, side: Side, began_s: float, samples: list[record.Sample]) -> None:
        while True:
            sample = await side.watch.sample(side.leg.name, number, time.monotonic() - began_s)
            if sample is None:
                return
            samples.append(sample)
            await asyncio.sleep(self._course.sample_every_s)

    def _write_round(self, number: int, part: Sequence[Conversation], played: Sequence[_Played]) -> None:
        legs = [one.side.leg.name for one in played]
        said: dict[str, dict[tuple[str, int], str]] = {}
        for one in played:
            for asked in one.asked:
                if asked.heard.is_good:
                    texts = said.setdefault(asked.conversation.name, {})
                    texts[one.side.leg.name, asked.turn] = asked.heard.text
        verdicts = {
            conversation.name: compared(conversation, said.get(conversation.name, {}), legs)
            for conversation in part
        }
        for one in played:
            for asked in one.asked:
                self._write(_request(one, asked, number, verdicts[asked.conversation.name]))
            for sample in one.samples:
                self._write(sample)
            self._write(one.window)
        self._raw.flush()

    def _write(self, made: record.Record) -> None:
        self._raw.write(record.line_of(made))

    def _progress(self, number: int, leg: str) -> None:
        self._turns_done += 1
        now_s = time.monotonic()
        if now_s - self._said_s < SAY_EVERY_S:
            return
        self._said_s = now_s
        left_s = (now_s - self._began_s) / self._turns_done * (self._turns - self._turns_done)
        what = "warm-up" if number < 0 else f"round {number + 1} of {self._course.rounds}"
        self._say(f"{what}, {leg}: {self._turns_done} of {self._turns} turns, about {_in_words(left_s)} left")


def _request(
    played: _Played, asked: Asked, number: int, verdicts: Mapping[tuple[str, int], bool]
) -> record.Request:
    heard, turn = asked.heard, asked.conversation.turns[asked.turn]
    leg = played.side.leg.name
    split = played.splits.get(heard.request_id)
    differs = any(agrees is False for (_, other), agrees in verdicts.items() if other == asked.turn)
    usage = heard.usage or Usage()
    return record.Request(
        leg=leg,
        round=number,
        conversation=asked.conversation.name,
        turn=asked.turn,
        what=turn.kind,
        warm_up=number < 0,
        at_s=asked.sent_s - played.began_s,
        late_ms=max(0.0, asked.sent_s - asked.due_s) * _MS,
        status=heard.status,
        took_ms=heard.took_s * _MS,
        first_ms=None if heard.first_s is None else heard.first_s * _MS,
        between_ms=[round(gap_s * _MS, 3) for gap_s in heard.between_s],
        planned_tokens=planned_tokens(asked.conversation, asked.turn),
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        answer_tokens=usage.completion_tokens,
        route=heard.route,
        reused_tokens=heard.reused_tokens,
        transfer_ms=None if split is None else split.transfer_ms,
        compute_ms=None if split is None else split.compute_ms,
        answer=digest(heard.text) if heard.is_good else None,
        text=heard.text if differs and heard.is_good else None,
        agrees=verdicts.get((leg, asked.turn)),
        error=heard.error,
    )


def _window_of(
    leg: str, number: int, took_s: float, client_cpu_s: float, before: Totals, after: Totals
) -> record.Window:
    return record.Window(
        leg=leg,
        round=number,
        took_s=took_s,
        cpu_s=_rise(before.cpu_s, after.cpu_s),
        client_cpu_s=client_cpu_s,
        transferred_bytes=_rise(before.transferred_bytes, after.transferred_bytes),
        transfer_s=_rise(before.transfer_s, after.transfer_s),
    )


def _rise(before: float | None, after: float | None) -> float | None:
    """None where one of the two is not known."""
    return None if before is None or after is None else max(0.0, after - before)


def _in_words(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
