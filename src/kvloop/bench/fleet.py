"""How fast and how large the fleet simulation is, and how a router grows: `python -m kvloop.bench.fleet`.

    speed      turns of a small fleet for each minute of one core
    million    a million conversations, nearly all of them alive at the same time: the memory that they take
    growth     a router in front of ten to ten thousand engines: its state, its control traffic, its decisions

One process on one core; no engine is started. The exit status is 0 if every target was met.
"""

import argparse
import gc
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kvloop.bench import fleet_growth
from kvloop.bench.fleet_growth import Size, plan_of, run_through
from kvloop.bench.report import Bound, Row, Target, spread
from kvloop.bench.run import conclude, say
from kvloop.local.fleet_turns import RouterTurn
from kvloop.sim.fleet.world import World

PARTS = ("speed", "million", "growth")
LEAST_TURNS_PER_MINUTE = 100_000
MOST_MIB = 4096
MOST_GROWTH = 2  # of what a turn takes of the control channel and of memory: not with the number of engines
SPEED_ENGINES = 8
SPEED_CONVERSATIONS = 2000
SPEED_ROUNDS = 5
MILLION_ENGINES = 16
MILLION = 1_000_000


def main(words: list[str] | None = None) -> int:
    """Measure, print the tables, and return 1 if a target was missed."""
    args = _options(words)
    began_s = time.monotonic()
    rows: list[Row] = []
    sizes: list[Size] = []
    failures: list[str] = []
    gc.disable()  # a run leaves no cycles behind, and looking for them takes a tenth of the time
    try:
        if "speed" in args.parts:
            rows += speed_rows(SPEED_CONVERSATIONS // (10 if args.quick else 1))
        if "million" in args.parts:
            rows += million_rows(MILLION // (100 if args.quick else 1))
        if "growth" in args.parts:
            sys.stdout.write(fleet_growth.HEADER)
            for engines in fleet_growth.SIZES[:3] if args.quick else fleet_growth.SIZES:
                sizes.append(fleet_growth.measure(engines))
                sys.stdout.write(fleet_growth.table_line(sizes[-1]))
                sys.stdout.flush()
            rows += growth_rows(sizes)
    except KeyboardInterrupt:
        failures.append("the rest: interrupted")
    finally:
        gc.enable()
    if sizes and args.plot is not None:
        args.plot.write_text(fleet_growth.as_plot(sizes))
    minutes = (time.monotonic() - began_s) / 60
    heading = f"The fleet simulation, and a router as its fleet grows. Measured in {minutes:.0f} minutes."
    return conclude(heading, rows, failures, {"minutes": minutes}, args.json)


def speed_rows(conversations: int) -> list[Row]:
    """Turns for each minute of CPU. The fastest round counts: what else the machine does only slows it."""
    say(f"{SPEED_ROUNDS} rounds of {conversations:,} conversations on {SPEED_ENGINES} engines")
    per_minute: list[float] = []
    for seed in range(SPEED_ROUNDS):
        plan = replace(plan_of(SPEED_ENGINES, conversations), seed=seed, arrive_ms=40, tenants=10)
        world = World(plan, RouterTurn, checkers=(), traced=False)
        took_s = _cpu_s(lambda world=world: run_through(world))  # type: ignore[misc]
        per_minute.append(60 * world.people.turns / took_s)
    detail = "the fastest of: " + spread(per_minute, "")
    target = Target(Bound.AT_LEAST, LEAST_TURNS_PER_MINUTE)
    return [Row("turns simulated a minute, on one core", max(per_minute), "", target, detail)]


def million_rows(conversations: int) -> list[Row]:
    """The memory of a process while so many are alive: they think ten times as long as they take to come."""
    say(f"{conversations:,} conversations on {MILLION_ENGINES} engines")
    plan = replace(
        plan_of(MILLION_ENGINES, conversations),
        arrive_ms=1,
        think_ms=10 * conversations,
        turns=2,
        tenants=1000,
    )
    world = World(plan, RouterTurn, checkers=(), traced=False)
    people = world.people
    began_s = time.process_time()
    people.open_the_doors()
    for percent in range(10, 101, 10):
        while people.begun < conversations * percent // 100:
            world.loop.step()
        say(f"{people.begun:,} have come, at most {_peak_mib():,.0f} MiB")
    took_s = time.process_time() - began_s
    detail = f"{people.begun:,} conversations, {people.alive:,} of them alive, {people.turns:,} turns"
    target = Target(Bound.UNDER, MOST_MIB)
    return [
        Row("memory of a million conversations", _peak_mib(), "MiB", target, detail),
        Row(
            "turns simulated a minute, with them",
            60 * people.turns / took_s,
            "",
            None,
            f"{took_s:.0f} s of CPU",
        ),
    ]


def growth_rows(sizes: list[Size]) -> list[Row]:
    """What a turn costs in front of the largest fleet, against the smallest."""
    small, large = sizes[0], sizes[-1]
    bounded = Target(Bound.AT_MOST, MOST_GROWTH)

    def row(what: str, less: float, more: float, unit: str, target: Target | None) -> Row:
        between = f"{what}, from {small.engines:,} to {large.engines:,} engines"
        return Row(between, more / less, "x", target, f"{less:.1f} and {more:.1f} {unit}".rstrip())

    return [
        row("find a turn", small.find_us[0], large.find_us[0], "µs", None),
        row("choose an engine", small.choose_us[0], large.choose_us[0], "µs", None),
        row("control frames a turn", small.frames_per_turn, large.frames_per_turn, "", bounded),
        row(
            "router's state a turn",
            small.state_bytes / small.turns,
            large.state_bytes / large.turns,
            "bytes",
            bounded,
        ),
    ]


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _cpu_s(action: Callable[[], object]) -> float:
    began_s = time.process_time()
    action()
    return time.process_time() - began_s


def _options(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kvloop.bench.fleet",
        description="Figures of the fleet simulation, and of a router as its fleet grows.",
    )
    parser.add_argument(
        "--only", metavar="PARTS", help=f"comma-separated parts of {','.join(PARTS)} (default: all)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the growth as a plot there (SVG)")
    parser.add_argument("--quick", action="store_true", help="little of everything: to see that it runs")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows there too")
    args = parser.parse_args(words)
    args.parts = tuple(args.only.split(",")) if args.only else PARTS
    if not set(args.parts) <= set(PARTS):
        parser.error(f"--only takes parts of {','.join(PARTS)}, not {args.only}")
    return args


if __name__ == "__main__":
    sys.exit(main())
