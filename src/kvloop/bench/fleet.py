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
            for engines in fleet_growth.SIZES[:3] if args.quick else fleet_growth.SIZES:
                say(f"a router in front of {engines:,} engines")
                sizes.append(fleet_growth.measure(engines))
            rows += growth_rows(sizes)
    except KeyboardInterrupt:
        failures.append("the rest: interrupted")
    finally:
        gc.enable()
    if sizes:
        sys.stdout.write("\n" + fleet_growth.as_table(sizes))
        if args.plot is not None:
            args.plot.write_text(fleet_growth.as_plot(sizes))
    minutes = (time.monotonic() - began_s) / 60
    heading = f"The fleet simulation, and a router as its fleet grows. Measured in {minutes:.0f} minutes."
    return conclude(heading, rows, failures, {"minutes": minutes}, args.json)


def speed_rows(conversations: int) -> list[Row]:
    """Turns for each minute of CPU. The fastest round counts: what else the machine does only slows it."""
    say(f"{SPEED_ROUNDS} rounds of {conversations:,} conversations on {SPEED_ENGINES} engines")
    per_minute: list[float] = []
    for seed in range(SPEED_ROUNDS):
        plan = replace(plan_of(SPEED_ENGINES, conversations), seed=seed, arrive_ms=40)
        world = World(plan, RouterTurn, checkers=(), traced=False)
        took_s = _cpu_s(lambda world=world: run_through(world))  # type: ignore[misc]
        per_minute.append(60 * world.people.turns / took_s)
    detail = "the fastest of: " + spread(per_minute, "")
    target = Target(Bound.AT_LEAST, LEAST_TURNS_PER_MINUTE)
    return [Row("turns simulated a minute, on one core", max(per_minute), "", target, detail)]


def million_rows(conversations: int) -> list[Row]:
    """The memory of a process that runs so many; they think for longer than it takes them all to come."""
    say(f"{conversations:,} conversations on {MILLION_ENGINES} engines")
    plan = replace(
        plan_of(MILLION_ENGINES, conversations),
        arrive_ms=1,
        think_ms=max(1000, conversations),
        turns=2,
        tenants=1000,
    )
    world = World(plan, RouterTurn, checkers=(), traced=False)
    alive = 0

    def run() -> None:
        nonlocal alive
        alive = run_through(world)

    took_s = _cpu_s(run)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    turns = world.people.turns
    detail = f"{world.people.begun:,} conversations, {alive:,} of them alive at a time, {turns:,} turns"
    return [
        Row("memory of a million conversations", peak_mib, "MiB", Target(Bound.UNDER, MOST_MIB), detail),
        Row("turns simulated a minute, with them", 60 * turns / took_s, "", None, f"{took_s:.0f} s of CPU"),
    ]


def growth_rows(sizes: list[Size]) -> list[Row]:
    """What the largest fleet costs, against the smallest: information, the issue sets no bound."""
    small, large = sizes[0], sizes[-1]
    between = f"from {small.engines:,} to {large.engines:,} engines"
    return [
        Row(
            f"find a turn, {between}",
            large.find_us[0] / small.find_us[0],
            "x",
            None,
            f"{small.find_us[0]:.0f} and {large.find_us[0]:.0f} µs",
        ),
        Row(
            f"choose an engine, {between}",
            large.choose_us[0] / small.choose_us[0],
            "x",
            None,
            f"{small.choose_us[0]:.0f} and {large.choose_us[0]:.0f} µs",
        ),
        Row(
            f"control frames a turn, {between}",
            large.frames_per_turn / small.frames_per_turn,
            "x",
            None,
            f"{small.frames_per_turn:.1f} and {large.frames_per_turn:.1f}",
        ),
        Row(
            f"router's state a turn, {between}",
            (large.state_bytes / large.turns) / (small.state_bytes / small.turns),
            "x",
            None,
            f"{small.state_bytes / small.turns:.0f} and {large.state_bytes / large.turns:.0f} bytes",
        ),
    ]


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
