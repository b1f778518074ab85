"""What retention costs live work: decode's throughput and time per output token, with it and without.

One decode engine with so few blocks that leases fill it within a window, so that every further request
reclaims some. A window is a number of requests, so many at a time, straight to that engine; in every other
window the requests ask not to be retained. The two alternate, in alternating order, so that what the machine
does besides meets both alike. Each is preceded by some requests of its kind that are not measured: they fill
the blocks with leases, or use up those that the window before has left.
"""

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvloop.bench.control import ControlClient
from kvloop.bench.conversation import counter, first_turn
from kvloop.bench.engine import ALONE
from kvloop.bench.report import Bound, Row, Target
from kvloop.core.lease import LeaseState
from kvloop.errors import UserError
from kvloop.local.chat import Message, TurnResult, served_model, stream_turn
from kvloop.local.stack import Stack
from kvloop.wire.control import Stat, StatReply

MOST_COST_PERCENT = 2.0
PROMPT_TOKENS = 100
ANSWER_TOKENS = 32
CONCURRENCY = 8
BLOCKS = 64
ENGINE_FLAGS = (*("--num-gpu-blocks-override", str(BLOCKS)), *("--max-model-len", "2048"))
"""Requests under way take a quarter of the blocks, leases what `kvloop_max_retained` leaves them."""
GRANTS = "kvloop_leases_granted_total"
RECLAIMS = f'kvloop_leases_ended_total{{state="{LeaseState.RECLAIMED.value}"}}'


@dataclass(frozen=True, slots=True)
class Effort:
    """Pairs of windows, requests in each, and requests before each."""

    pairs: int = 12
    requests: int = 48
    settling: int = 2 * CONCURRENCY


@dataclass(frozen=True, slots=True)
class Window:
    """Output tokens a second over the whole window, and the median request's seconds per output token."""

    tokens_per_s: float
    per_token_s: float

    def __str__(self) -> str:
        return f"{self.tokens_per_s:.1f} tokens/s, {1e3 * self.per_token_s:.1f} ms a token"


def measure(stack: Stack, seed: str, effort: Effort, say: Callable[[str], None]) -> list[Row]:
    """The rows. Raises `UserError` where an engine does not do its part."""
    load = Load(stack, seed)
    load.window(effort, retain=True)
    pairs: list[dict[bool, Window]] = []
    before = load.counters()
    for number in range(effort.pairs):
        order = (True, False) if number % 2 == 0 else (False, True)
        pairs.append({retain: load.window(effort, retain) for retain in order})
        say(f"retained {pairs[-1][True]}; not retained {pairs[-1][False]}")
    after = load.counters()
    granted, reclaimed = (after[name] - before[name] for name in (GRANTS, RECLAIMS))
    if granted < effort.pairs * effort.requests or not reclaimed:
        raise UserError(f"{granted} leases were granted and {reclaimed} reclaimed: that is no pressure")
    detail = f"{granted} leases granted, {reclaimed} reclaimed for live work"
    slower = [100 * (1 - pair[True].tokens_per_s / pair[False].tokens_per_s) for pair in pairs]
    longer = [100 * (pair[True].per_token_s / pair[False].per_token_s - 1) for pair in pairs]
    return [
        _row("decode's throughput lost to retention", slower, detail),
        _row("decode's time per output token added by it", longer, detail),
    ]


def _row(what: str, percents: list[float], detail: str) -> Row:
    middle = statistics.median(percents)
    low, high = min(percents), max(percents)
    detail = f"median of {len(percents)} pairs of windows, {low:.1f} to {high:.1f} %; {detail}"
    return Row(what, middle, "%", Target(Bound.AT_MOST, MOST_COST_PERCENT), detail)


class Load:
    """Requests to the stack's first decode engine."""

    def __init__(self, stack: Stack, seed: str) -> None:
        engine = stack.decode[0]
        self._url = engine.url
        self._control_port = engine.control_port
        self._key = (stack.folder / "secret").read_bytes().strip()
        self._model = served_model(engine.url)
        self._count = counter(engine.url, self._model)
        self._seed = seed
        self._windows = 0

    def window(self, effort: Effort, retain: bool) -> Window:
        """One window, behind requests that settle the blocks."""
        self._windows += 1
        count = effort.settling + effort.requests
        seeds = [f"{self._seed} {self._windows} {number}" for number in range(count)]
        prompts = [first_turn(seed, PROMPT_TOKENS, self._count) for seed in seeds]
        settle, measured = prompts[: effort.settling], prompts[effort.settling :]
        self._run(settle, retain)
        began_s = time.monotonic()
        answers = self._run(measured, retain)
        took_s = time.monotonic() - began_s
        tokens = sum(answer.answer_tokens or 0 for answer in answers)
        per_token = [answer.per_token_s for answer in answers if answer.per_token_s is not None]
        return Window(tokens / took_s, statistics.median(per_token))

    def counters(self) -> dict[str, int]:
        """The engine's own counters of its leases."""
        with ControlClient(self._key, "127.0.0.1", self._control_port) as client:
            answer = client.ask(Stat())
        if not isinstance(answer, StatReply):
            raise UserError(f"decode answered stat with {answer}")
        return {name: answer.counters.get(name, 0) for name in (GRANTS, RECLAIMS)}

    def _run(self, prompts: list[list[Message]], retain: bool) -> list[TurnResult]:
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            return list(pool.map(lambda prompt: self._turn(prompt, retain), prompts))

    def _turn(self, messages: list[Message], retain: bool) -> TurnResult:
        body = {"model": self._model, "messages": messages, "temperature": 0, "ignore_eos": True}
        body |= {"max_tokens": ANSWER_TOKENS, "min_tokens": ANSWER_TOKENS}
        params = ALONE | ({} if retain else {"kvloop_retain": False})
        return stream_turn(self._url, body | {"kv_transfer_params": params})
