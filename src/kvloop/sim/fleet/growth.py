"""`kvloop sim growth`: what a router costs as the fleet behind it grows, as a table and a plot.

One run for each size, without faults and without checkers: half the engines prefill, half decode, one router,
so many conversations for each engine up to a bound. What is measured is CPU time of this machine, around
`core`'s own calls: finding the turn that a request goes on from, and choosing an engine. The rest is counted.
"""

import argparse
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvloop.errors import UserError
from kvloop.sim.fleet.plan import Plan, S
from kvloop.sim.fleet.plot import Series, log_plot
from kvloop.sim.fleet.turns import MakeTurn
from kvloop.sim.fleet.world import World

SIZES = (10, 30, 100, 300, 1000, 3000, 10_000)
CONVERSATIONS_PER_ENGINE = 20
MAX_CONVERSATIONS = 4000
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row:
    """One size. Times are microseconds of CPU, median and 99th percentile; rates are in virtual time."""

    engines: int
    conversations: int
    turns: int
    find_us: tuple[float, float]
    choose_us: tuple[float, float]
    frames_per_turn: float
    frames_per_s: float
    lineage_bytes: int
    keeper_leases: int
    turns_per_minute: float
    peak_mib: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `kvloop sim growth`."""
    parser.add_argument(
        "--engines",
        default=",".join(map(str, SIZES)),
        metavar="N,N,...",
        help="fleet sizes (default: %(default)s)",
    )
    parser.add_argument(
        "--conversations",
        type=int,
        metavar="N",
        help="in each run (default: twenty an engine, at most 4,000)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the plot here, as SVG")


def run(args: argparse.Namespace, make_turn: MakeTurn) -> int:
    """Measure, and print. Raises `UserError`."""
    try:
        sizes = [int(size) for size in args.engines.split(",")]
    except ValueError:
        raise UserError(f"--engines takes numbers, not {args.engines!r}") from None
    if not sizes or min(sizes) < 2:
        raise UserError("a fleet has two engines at least")
    _say(_HEADER)
    rows = []
    for size in sizes:
        wanted = args.conversations or min(MAX_CONVERSATIONS, CONVERSATIONS_PER_ENGINE * size)
        rows.append(measure(plan_of(size, wanted), make_turn))
        _say(_shown(rows[-1]))
    if args.plot is not None:
        args.plot.write_text(plot(rows))
    return 0


def plan_of(engines: int, conversations: int) -> Plan:
    """A fleet of this size with nothing that goes wrong."""
    return Plan(
        seed=engines,
        prefill=engines // 2,
        decode=engines - engines // 2,
        block_tokens=32,
        prefill_blocks=256,
        decode_blocks=1024,
        batch_tokens=2048,
        running=64,
        token_us=5,
        step_us=500,
        setup_us=500,
        block_us=20,
        lease_term_ms=60_000,
        lease_ttl_ms=480_000,
        renew_ms=20_000,
        claim_timeout_ms=1000,
        claim_term_ms=5000,
        break_even_parts=24,
        conversations=conversations,
        tenants=100,
        turns=8,
        think_ms=8000,
        arrive_ms=max(1, 20_000 // conversations),
        odd_histories=100,
        leaves=0,
        hostile=0,
        model_tokens=2048,
        sealed=False,
    )


def measure(plan: Plan, make_turn: MakeTurn) -> Row:
    """Run a fleet until every conversation has ended."""
    world = World(plan, make_turn, checkers=(), traced=False)
    router, people = world.routers[0], world.people
    finds, chooses = Stopwatch(), Stopwatch()
    router.filing.look_up = finds.around(router.filing.look_up)  # type: ignore[method-assign]
    for engines in (router.prefill, router.decode):
        engines.choose = chooses.around(engines.choose)  # type: ignore[method-assign]
    began = time.process_time()
    world.people.open_the_doors()
    while not people.are_through and world.loop.step():
        pass
    spent_s = time.process_time() - began
    return Row(
        engines=plan.prefill + plan.decode,
        conversations=people.begun,
        turns=people.turns,
        find_us=finds.summary_us(),
        choose_us=chooses.summary_us(),
        frames_per_turn=world.around.network.frames / people.turns,
        frames_per_s=world.around.network.frames / (world.loop.now_ns / S),
        lineage_bytes=router.filing.lineage.used_bytes,
        keeper_leases=len(router.filing.keeper),
        turns_per_minute=60 * people.turns / spent_s,
        peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )


class Stopwatch:
    """How much CPU time calls take."""

    def __init__(self) -> None:
        self._taken_ns: list[int] = []

    def around(self, call: Callable[..., T]) -> Callable[..., T]:
        """The same call, timed."""

        def timed(*args: object, **more: object) -> T:
            began_ns = time.thread_time_ns()
            answer = call(*args, **more)
            self._taken_ns.append(time.thread_time_ns() - began_ns)
            return answer

        return timed

    def summary_us(self) -> tuple[float, float]:
        """Median and 99th percentile."""
        taken = sorted(self._taken_ns)
        return taken[len(taken) // 2] / 1000, taken[len(taken) * 99 // 100] / 1000


_HEADER = (
    "| engines | conversations | turns | find a turn, µs (p99) | choose an engine, µs (p99) "
    "| control frames a turn | a second | lineage, KiB | leases kept | turns a minute of CPU | peak, MiB |\n"
    "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
)


def _shown(row: Row) -> str:
    find, find_99 = row.find_us
    chosen, chosen_99 = row.choose_us
    return (
        f"| {row.engines:,} | {row.conversations:,} | {row.turns:,} | {find:.0f} ({find_99:.0f}) "
        f"| {chosen:.0f} ({chosen_99:.0f}) | {row.frames_per_turn:.1f} | {row.frames_per_s:,.0f} "
        f"| {row.lineage_bytes / 1024:,.0f} | {row.keeper_leases:,} | {row.turns_per_minute:,.0f} "
        f"| {row.peak_mib:,.0f} |"
    )


def plot(rows: Sequence[Row]) -> str:
    """The table's growing columns over the number of engines, both axes logarithmic, as SVG."""
    engines = [float(row.engines) for row in rows]
    return log_plot(
        "What a router costs, over the number of engines",
        "engines",
        [
            Series("find a turn, µs", engines, [row.find_us[0] for row in rows]),
            Series("choose an engine, µs", engines, [row.choose_us[0] for row in rows]),
            Series("control frames a turn", engines, [row.frames_per_turn for row in rows]),
            Series("lineage, KiB", engines, [row.lineage_bytes / 1024 for row in rows]),
            Series("leases kept", engines, [float(row.keeper_leases) for row in rows]),
        ],
    )


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
