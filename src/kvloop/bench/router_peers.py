"""kvloop's router beside others, in front of the same engines in one run.

`python -m kvloop.bench.router_peers` measures:

    load     requests in a closed loop, plain and streamed, with bodies of 2 and 64 KB
    paced    streams with an event every 50 ms: what an event costs
    many     1,500 of them: whether events come in time
    idle     10,000 open streams on which nothing happens: what one takes of memory

All routers stand there at the same time, on one core; one of them is measured at a time, in rounds, so that
whatever else the machine does meets all of them. Figures are medians of the rounds. The exit status is 0 if
every target was met.
"""

import argparse
import contextlib
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from kvloop.bench.peers import NAMES, Command, Places, cache_folder, commands
from kvloop.bench.report import Row
from kvloop.bench.router_cases import CASES, IDLE, QUICK, Case, Samples, figures, rows_of
from kvloop.bench.router_load import (
    Bench,
    LoadError,
    Program,
    compiled,
    cores,
    engine,
    free_port,
    measure,
    wait_ready,
)
from kvloop.bench.run import conclude, say
from kvloop.local.api_key import add_api_key

DEFAULT_ROUNDS = 5
WANTED_FILES = 65_536
SPARE_FILES = 500  # of a router's: listening, logs, idle connections to engines
FILES_PER_STREAM = 2
MAX_CLIENTS = 20_000
PARTS = ("load", "paced", "many", "idle")


@dataclass(slots=True)
class Standing:
    """A router that is up. `why_not`: set when it has failed, and is measured no more."""

    name: str
    program: Program
    port: int
    empty_kib: int = 0
    why_not: str = ""


def main(words: list[str] | None = None) -> int:
    """Measure, print the tables, and return 1 if a target was missed or something could not be measured."""
    args = _options(words)
    began_s = time.monotonic()
    found, failures = commands(args.peers or cache_folder(os.environ), args.routers)
    most_streams = raise_files()
    samples: Samples = {}
    router_core, other_core = cores()
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            compiled(folder)
            with (
                engine(folder, "prefill", other_core) as prefill_port,
                engine(folder, "decode", other_core) as decode_port,
            ):
                key = add_api_key(str(folder / "keys.yaml"), "bench")
                bench = Bench(folder, prefill_port, decode_port, other_core, key)
                with standing(bench, found, router_core, failures) as routers:
                    _measure(bench, routers, args, samples, most_streams)
                    failures += [f"{router.name}: {router.why_not}" for router in routers if router.why_not]
    except LoadError as error:
        failures.append(str(error))
    except KeyboardInterrupt:
        failures.append("the rest: interrupted")
    cases = [case for case in _cases(args.quick, most_streams) if case.part in args.parts]
    rows = rows_of(cases, samples, most_streams)
    return _conclude(args, rows, failures, samples, began_s, router_core != other_core)


def raise_files() -> int:
    """Let this process and its children have as many files as they may; how many streams a router then can
    have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(hard, WANTED_FILES), max(hard, WANTED_FILES)))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return max(1, (hard - SPARE_FILES) // FILES_PER_STREAM)


@contextlib.contextmanager
def standing(
    bench: Bench, found: dict[str, Command], core: int, failures: list[str]
) -> Iterator[list[Standing]]:
    """Every router that comes up, as long as the block lasts."""
    with contextlib.ExitStack() as stack:
        routers: list[Standing] = []
        for name, command in found.items():
            say(f"starting {name}")
            places = Places(
                f"http://127.0.0.1:{bench.prefill_port}",
                f"http://127.0.0.1:{bench.decode_port}",
                free_port(),
                free_port(),
                MAX_CLIENTS,
                bench.folder / "keys.yaml",
            )
            log = bench.folder / f"{name}.log"
            program = stack.enter_context(Program(command(places), core, log, speaks=False))
            try:
                wait_ready(program, places.port, bench.key)
            except LoadError as error:
                failures.append(f"{name}: {error}; {log.read_text(errors='replace')[-300:].strip()}")
                continue
            routers.append(Standing(name, program, places.port, program.used()[1]))
        yield routers


def _cases(quick: bool, most_streams: int) -> list[Case]:
    return [case.fitting(most_streams) for case in (QUICK if quick else CASES)]


def _measure(
    bench: Bench, routers: list[Standing], args: argparse.Namespace, samples: Samples, most_streams: int
) -> None:
    for case in _cases(args.quick, most_streams):
        if case.part not in args.parts:
            continue
        for turn in range(min(args.rounds, case.most_rounds)):
            order = routers[turn % len(routers) :] + routers[: turn % len(routers)] if routers else []
            for router in order:
                if router.why_not:
                    continue
                empty_kib = router.program.used()[1]
                try:
                    sample = measure(bench, router.program, router.port, case.load, case.seconds, case.warm_s)
                except LoadError as error:
                    router.why_not = f"{case.name}: {error}"
                    say(f"{router.name}: {router.why_not}")
                    continue
                if case.part == IDLE:
                    sample = sample.beyond(empty_kib)
                samples.setdefault(case.name, {}).setdefault(router.name, []).append(sample)
                say(f"{case.name}: {router.name}: {case.said(sample)}")


def _conclude(
    args: argparse.Namespace,
    rows: list[Row],
    failures: list[str],
    samples: Samples,
    began_s: float,
    apart: bool,
) -> int:
    minutes = (time.monotonic() - began_s) / 60
    waiting, there = os.getloadavg()[0], len(os.sched_getaffinity(0))
    heading = (
        f"kvloop's router beside others. Measured in {minutes:.0f} minutes, {args.rounds} rounds at most."
    )
    if not apart:
        heading += "\nThere is one core only: the router shares it with engines and clients."
    if waiting > there + 1:
        heading += f"\nLoad average {waiting:.1f} on {there} cores: others were at work, and it shows."
    facts: dict[str, object] = {"minutes": minutes, "load_average": waiting, "cores": there}
    facts["samples"] = {
        case: {router: [asdict(sample) for sample in several] for router, several in by_router.items()}
        for case, by_router in samples.items()
    }
    sys.stdout.write(f"\n{figures(samples)}")
    return conclude(heading, rows, failures, facts, args.json)


def _options(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kvloop.bench.router_peers", description="kvloop's router beside others."
    )
    parser.add_argument(
        "--only", metavar="PARTS", help=f"comma-separated parts of {','.join(PARTS)} (default: all)"
    )
    parser.add_argument(
        "--routers", metavar="NAMES", help=f"comma-separated routers of {','.join(NAMES)} (default: all)"
    )
    parser.add_argument(
        "--peers",
        type=Path,
        metavar="DIR",
        help="a virtual environment that has the others, or is to get them (default: in the user's cache)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=DEFAULT_ROUNDS,
        metavar="COUNT",
        help="measurements of each figure (default: %(default)s)",
    )
    parser.add_argument("--quick", action="store_true", help="little of everything: to see that it runs")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows and the samples there too")
    args = parser.parse_args(words)
    args.parts = tuple(args.only.split(",")) if args.only else PARTS
    args.routers = tuple(args.routers.split(",")) if args.routers else NAMES
    if not set(args.parts) <= set(PARTS):
        parser.error(f"--only takes parts of {','.join(PARTS)}, not {args.only}")
    if not set(args.routers) <= set(NAMES):
        parser.error(f"--routers takes names of {','.join(NAMES)}")
    if args.rounds < 1:
        parser.error("--rounds must be positive")
    return args


if __name__ == "__main__":
    sys.exit(main())
