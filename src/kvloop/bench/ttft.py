"""Time to first token of a returned turn, of the same turn computed anew, and of upstream's return.

One sample is one fresh conversation: a first turn that fills decode, then the measured turn, which has about
115 tokens that decode does not hold. Return and one-way measure the same conversation through the same
engines and two routers, as two forks of equal length, in alternating order, so that neither finds in decode's
own prefix cache what the other left there. Upstream's connector needs engines of its own.

A sample counts only if it was what it claims to be: the route that the router names, the prompt's tokens, and
the tokens that prefill loaded by its own count.
"""

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvloop.bench.conversation import (
    ANSWER_TOKENS,
    NEW_TOKENS,
    Count,
    counter,
    first_turn,
    next_turn,
    plan,
)
from kvloop.bench.engine import READ_BACK, counted
from kvloop.bench.report import Bound, Row, Target, spread
from kvloop.core.chain import SEGMENT_TOKENS
from kvloop.errors import UserError
from kvloop.local.chat import Message, TurnResult, served_model, stream_turn
from kvloop.local.stack import Stack

Say = Callable[[str], None]

LEAST_SPEED_UP = {570: 3.5, 1_900: 8.0, 5_600: 20.0}
"""Prompt tokens, and by how much a returned turn must be faster than one-way."""
MOST_OF_UPSTREAM = 0.6
PATIENT = ("--prefill-timeout-s", "600", "--policy", "sticky")
"""A router's flags: a long prompt on a slow core is to be measured, not given up."""
MEASURED_TURN = f"turn 2, streamed, about {NEW_TOKENS} tokens new to decode, to the client's first text"
MAX_DISCARDED = 2
"""Samples per size that may fail, or not be what they claim: a loaded machine can let a claim time out."""


class WrongSampleError(UserError):
    """A sample that was not of the thing to be measured."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way for a measured turn to go: through which router, and whether prefill must have read back."""

    name: str
    url: str
    returns: bool
    names_reuse: bool = True


@dataclass(slots=True)
class Samples:
    """Seconds to the first token, by way and prompt size."""

    first_token_s: dict[tuple[str, int], list[float]] = field(default_factory=dict)

    def of(self, way: str, tokens: int) -> list[float]:
        """The samples of one cell, in the order taken."""
        return self.first_token_s.setdefault((way, tokens), [])


def check(way: Way, tokens: int, first_tokens: int, result: TurnResult, loaded_tokens: int) -> None:
    """Raise `WrongSampleError` unless the turn was the planned one, `loaded_tokens` being prefill's count.

    What must come back is the first prompt, down to a whole segment: the answer may tokenize differently in
    the history.
    """
    wanted = first_tokens // SEGMENT_TOKENS * SEGMENT_TOKENS if way.returns else 0
    route = "return" if way.returns else "recompute"
    facts = f"route {result.route}, {result.prompt_tokens} tokens, {loaded_tokens} loaded by prefill"
    facts += f", {result.reused_tokens} reused by the router's account"
    if result.first_token_s <= 0 or result.route != route or result.prompt_tokens is None:
        raise WrongSampleError(f"{way.name}: {facts}")
    if abs(result.prompt_tokens - tokens) > SEGMENT_TOKENS or result.prompt_tokens <= loaded_tokens:
        raise WrongSampleError(f"{way.name}: {facts}; {tokens} tokens were planned")
    if loaded_tokens < wanted or (not way.returns and loaded_tokens):
        raise WrongSampleError(f"{way.name}: {facts}; at least {wanted} should have been")
    if way.names_reuse and result.reused_tokens != loaded_tokens:
        raise WrongSampleError(f"{way.name}: {facts}; the two should be equal")


class Bench:
    """Takes samples on one running stack. `seed` keeps conversations of different runs apart."""

    def __init__(self, stack: Stack, ways: Sequence[Way], seed: str, say: Say) -> None:
        self._stack = stack
        self._ways = tuple(ways)
        self._seed = seed
        self._say = say
        self._model = served_model(stack.url)
        self._count: Count = counter(stack.prefill[0].url, self._model)
        self._taken = 0
        self._discarded: Counter[int] = Counter()

    def run(
        self,
        sizes: Sequence[int],
        repetitions: Callable[[int], int],
        samples: Samples,
        *,
        budget_s: float = math.inf,
    ) -> None:
        """Take `repetitions(tokens)` samples per size of every way, the order turning round each time.

        Sizes take turns. No round begins after `budget_s`, but for the first, so that each size has a sample.
        The first conversation pays for handshakes and is thrown away. Raises `UserError` after too many
        samples that were not what they claim.
        """
        self._conversation(min(sizes), self._ways, Samples())
        began_s = time.monotonic()
        for done in range(max(map(repetitions, sizes))):
            if done and time.monotonic() - began_s > budget_s:
                self._say(f"{budget_s:.0f} s are over: no more than {done} samples of each size")
                return
            for tokens in sizes:
                if done < repetitions(tokens):
                    self._sample(tokens, self._ways if done % 2 == 0 else self._ways[::-1], samples)

    def _sample(self, tokens: int, ways: Sequence[Way], samples: Samples) -> None:
        while True:
            try:
                return self._conversation(tokens, ways, samples)
            except UserError as error:
                self._discarded[tokens] += 1
                self._say(f"a sample is thrown away: {error}")
                if self._discarded[tokens] > MAX_DISCARDED:
                    raise

    def _turn(self, url: str, messages: list[Message]) -> TurnResult:
        body = {"model": self._model, "messages": messages, "temperature": 0}
        return stream_turn(url, body | {"max_tokens": ANSWER_TOKENS, "min_tokens": ANSWER_TOKENS})

    def _conversation(self, tokens: int, ways: Sequence[Way], samples: Samples) -> None:
        self._taken += 1
        seed = f"{self._seed} {self._taken}"
        first = plan(tokens).first_tokens
        history = first_turn(seed, first, self._count)
        answer = self._turn(self._stack.url, history).text
        taken: list[tuple[str, float]] = []
        for way in ways:
            messages = next_turn(history, answer, f"{seed} {way.name}", tokens, self._count)
            before = counted(self._stack.prefill[0].url, READ_BACK)
            result = self._turn(way.url, messages)
            loaded = int(counted(self._stack.prefill[0].url, READ_BACK) - before)
            check(way, tokens, first, result, loaded)
            taken.append((way.name, result.first_token_s))
            self._say(f"{way.name}, {tokens} tokens: {result.first_token_s:.2f} s, {loaded} tokens read back")
        for name, first_token_s in taken:
            samples.of(name, tokens).append(first_token_s)


RETURN, ONE_WAY = "return", "one-way"
UPSTREAM, UPSTREAM_PACED = "upstream", "upstream, paced"


def kvloop_ways(stack: Stack) -> tuple[Way, ...]:
    """Return and one-way in front of the same engines; starts the second router."""
    one_way = stack.add_router("one-way", ("--return", "off", *PATIENT))
    return Way(RETURN, stack.url, returns=True), Way(ONE_WAY, one_way.url, returns=False)


def rows(samples: Samples, sizes: Sequence[int]) -> list[Row]:
    """The ratios of medians, with targets where the size has one."""
    made: list[Row] = []
    for tokens in sizes:
        ours = samples.of(RETURN, tokens)
        made.append(Row(f"TTFT return, {tokens} tokens", _median(ours), "s", detail=spread(ours, "s")))
        made.append(_ratio(samples, tokens, ONE_WAY, inverse=True))
        made.append(_ratio(samples, tokens, UPSTREAM, inverse=False))
        if samples.of(UPSTREAM_PACED, tokens):
            made.append(_ratio(samples, tokens, UPSTREAM_PACED, inverse=False))
    return made


def _ratio(samples: Samples, tokens: int, other: str, *, inverse: bool) -> Row:
    ours, theirs = _median(samples.of(RETURN, tokens)), _median(samples.of(other, tokens))
    detail = f"{other} {spread(samples.of(other, tokens), 's')}"
    if inverse:
        least = LEAST_SPEED_UP.get(tokens)
        target = None if least is None else Target(Bound.AT_LEAST, least)
        return Row(f"TTFT {other} / return, {tokens} tokens", theirs / ours, "x", target, detail)
    judged = Target(Bound.AT_MOST, MOST_OF_UPSTREAM) if other == UPSTREAM else None
    return Row(f"TTFT return / {other}, {tokens} tokens", ours / theirs, "", judged, detail)


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else float("nan")


def run_seed() -> str:
    """Words that no conversation of another run begins with."""
    return f"Run {time.time_ns():x}"
