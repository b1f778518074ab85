"""How fast the client of `kvloop bench` is: `python -m kvloop.bench.client`.

The client has one core, an engine that answers at once has another (the C program that routers are measured
with, see `router_load`). Sixteen conversations of one turn each are under way at a time, with a prompt of two
kilobytes: answered whole, then as streams. What is measured is everything that a run does for a request, from
making its body to hearing of its end, but for the record on disk. A machine with one core divides it.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import uvloop

from kvloop.bench.load.api import Style
from kvloop.bench.load.exchange import Endpoint
from kvloop.bench.load.play import Asked, Pace, Player, Target
from kvloop.bench.report import Bound, Row
from kvloop.bench.report import Target as Aim
from kvloop.bench.router_load import LoadError, compiled, cores, engine
from kvloop.bench.run import conclude, say
from kvloop.bench.workload.texts import Texts
from kvloop.bench.workload.turns import Conversation, MadeUp, Turn

CONCURRENCY = 16
PROMPT_TOKENS = 500  # words of four bytes
REQUESTS, STREAMS, STREAM_TOKENS = 5_000, 500, 512
ROUNDS = 3
LEAST_REQUESTS_S, LEAST_EVENTS_S = 5_000.0, 100_000.0


@dataclass(frozen=True, slots=True)
class Measured:
    """One round: what was answered in a second, and the client's CPU time for each, in microseconds."""

    per_s: float
    cpu_us: float


async def measured(port: int, turns: int, tokens: int, *, stream: bool) -> Measured:
    """So many conversations of one turn. LoadError where one is not answered with all its tokens."""
    texts = Texts("client")
    heard: list[Asked] = []
    target = Target(Endpoint(f"http://127.0.0.1:{port}"), "m", Style(stream=stream), 30.0)
    player = Player(target, texts.stretch, Pace(CONCURRENCY), heard.append)
    conversations = [
        Conversation(str(number), (Turn((MadeUp("user", ((str(number), PROMPT_TOKENS),)),), tokens),))
        for number in range(turns)
    ]
    began_s, used_s = time.perf_counter(), time.process_time()
    await player.play(conversations)
    took_s, used_s = time.perf_counter() - began_s, time.process_time() - used_s
    target.endpoint.close()
    wrong = next((one.heard for one in heard if not _is_whole(one, tokens if stream else 0)), None)
    if wrong is not None or len(heard) != turns:
        raise LoadError(f"an answer was not whole: {wrong}")
    units = turns * (tokens if stream else 1)
    return Measured(units / took_s, used_s / units * 1e6)


def _is_whole(one: Asked, events: int) -> bool:
    return one.heard.is_good and (not events or len(one.heard.between_s) + 1 == events)


def measure(*, is_quick: bool) -> list[Row]:
    """The rows. Raises `LoadError` where there is no compiler, or an answer was not whole."""
    part = 10 if is_quick else 1
    own_core, other_core = cores()
    os.sched_setaffinity(0, {own_core})
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        compiled(folder)
        with engine(folder, "decode", other_core) as port:
            for what, unit, turns, tokens, least in (
                ("requests answered whole", "request", REQUESTS, 1, LEAST_REQUESTS_S),
                (f"events of streams of {STREAM_TOKENS}", "event", STREAMS, STREAM_TOKENS, LEAST_EVENTS_S),
            ):
                rounds = []
                for _ in range(ROUNDS):
                    stream = unit == "event"
                    rounds.append(uvloop.run(measured(port, turns // part, tokens, stream=stream)))
                    say(f"{what}: {rounds[-1].per_s:,.0f} a second, {rounds[-1].cpu_us:.1f} us each")
                rows += rows_of(what, unit, rounds, least)
    return rows


def rows_of(what: str, unit: str, rounds: list[Measured], least: float) -> list[Row]:
    """The median of the rounds, judged, and what one costs the client."""
    per_s, cpu_us = [one.per_s for one in rounds], [one.cpu_us for one in rounds]
    spread = f"{min(per_s):,.0f} to {max(per_s):,.0f} in {len(rounds)} rounds, {CONCURRENCY} at a time"
    return [
        Row(what, statistics.median(per_s), f"{unit}s/s", Aim(Bound.AT_LEAST, least), spread),
        Row(f"client's CPU for each {unit}", statistics.median(cpu_us), "us", detail="its own overhead"),
    ]


def main(words: list[str] | None = None) -> int:
    """Measure, print the table, and return 1 if a target was missed or nothing could be measured."""
    parser = argparse.ArgumentParser(
        prog="python -m kvloop.bench.client", description="How fast the client of `kvloop bench` is."
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of everything: to see that it runs")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows there too")
    args = parser.parse_args(words)
    rows: list[Row] = []
    failures: list[str] = []
    try:
        rows = measure(is_quick=args.quick)
    except LoadError as error:
        failures.append(str(error))
    heading = "The client of `kvloop bench` on one core, the engine on another."
    return conclude(heading, rows, failures, {}, args.json)


if __name__ == "__main__":
    sys.exit(main())
