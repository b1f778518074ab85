"""An hour of traffic with faults, in minutes: `python -m kvloop.bench.soak`.

A real router, as it is delivered, in front of two prefill and three decode engines, simulated, whose machine
is modelled so many times as fast that the wall minutes asked for stand for an hour of it. An hour of this
traffic has 7,200 turns, two a second; all of them are asked, at the faster pace. What a router does for a
turn takes its real time, and so do faults, timeouts and probes: they are not sped up.

While it runs, engines are killed, stopped, ended and drained, one at a time; in the end everything has to
come home. The exit status is 0 if every target was met.
"""

import argparse
import asyncio
import sys
import tempfile
import threading
import time
from pathlib import Path

from kvloop.bench.run import conclude, say
from kvloop.bench.soak.clients import Clients, Traffic
from kvloop.bench.soak.faults import Pace, Trouble
from kvloop.bench.soak.home import settled
from kvloop.bench.soak.rows import PARTS, Ran, Sizes, facts_of, rows_of, told
from kvloop.bench.soak.stack import TTL_S, Stack, running
from kvloop.errors import UserError

TURNS_PER_S = 2  # of the modelled hour
HOUR_S = 3600
THINK_S = 8.0  # of a client, mean: a tool's time more than a person's
LIMIT_S = 30.0
SAMPLE_S = 0.5
FILES_SAMPLES = 4
QUICK_TURNS, QUICK_S, QUICK_TTL_S = 200, 7.0, 4.0
QUICK_PACE = Pace(calm_s=(0.2, 0.5), trouble_s=(0.3, 0.6))


def main(words: list[str] | None = None) -> int:
    """Run it, print the counts and the table, and return 1 if a target was missed."""
    args = _options(words)
    began_s = time.monotonic()
    ran: Ran | None = None
    failures: list[str] = []
    try:
        with tempfile.TemporaryDirectory(prefix="kvloop-soak-") as folder:
            ran = _soaked(args, Path(folder))
    except KeyboardInterrupt:
        failures.append("the rest: interrupted")
    except UserError as error:
        failures.append(str(error))
    minutes = (time.monotonic() - began_s) / 60
    if ran is not None:
        sys.stdout.write(told(ran))
    heading = f"Soak, seed {args.seed}. Measured in {minutes:.1f} minutes."
    facts: dict[str, object] = {"minutes": minutes, "seed": args.seed}
    rows = [] if ran is None else rows_of(ran)
    if ran is not None and ran.trouble.failure is not None:
        failures.append(f"faults after {len(ran.trouble.windows)} of them: {ran.trouble.failure}")
    return conclude(heading, rows, failures, facts | ({} if ran is None else facts_of(ran)), args.json)


def _soaked(args: argparse.Namespace, folder: Path) -> Ran:
    turns = QUICK_TURNS if args.quick else TURNS_PER_S * HOUR_S
    wall_s = QUICK_S if args.quick else args.minutes * 60
    speed = turns / TURNS_PER_S / wall_s
    ttl_s = QUICK_TTL_S if args.quick else TTL_S / speed
    traffic = Traffic(turns, wall_s / turns, THINK_S / speed, LIMIT_S)
    say(f"{turns:,} turns, {turns / TURNS_PER_S / 60:.3g} minutes of traffic, {speed:.3g} times as fast")
    with running(folder, speed, ttl_s) as stack:
        say("the router and its engines are up")
        sizes = Sizes(files_begin=max(_files(stack)))
        trouble = Trouble(stack, args.seed, QUICK_PACE if args.quick else Pace())
        clients = Clients(stack.port, args.seed, traffic)
        return asyncio.run(_run(stack, clients, trouble, sizes, traffic, ttl_s))


async def _run(
    stack: Stack, clients: Clients, trouble: Trouble, sizes: Sizes, traffic: Traffic, ttl_s: float
) -> Ran:
    over = threading.Event()
    sampler = threading.Thread(target=_sample, args=(stack, clients, traffic, sizes, over), daemon=True)
    began_s = time.monotonic()
    sampler.start()
    trouble.begin()
    try:
        await clients.run()
        asked_s = time.monotonic()
        await asyncio.to_thread(trouble.end)
    finally:
        over.set()
    sampler.join()
    sizes.memory_mib.append(stack.memory_mib())
    say(f"{clients.begun:,} turns asked, {len(trouble.windows)} faults; everything has to come home")
    held = await settled(stack, ttl_s)
    sizes.files_end = min(await asyncio.to_thread(_files, stack))
    log = stack.router.log_path.read_text(errors="replace")
    wrong = sum(engine.wrong_answers() for engine in stack.engines)
    return Ran(
        speed=stack.speed,
        turns=traffic.turns,
        began_s=began_s,
        asked_s=asked_s,
        tally=clients.tally,
        trouble=trouble,
        sizes=sizes,
        held=held,
        router=stack.samples(),
        tracebacks=log.count("Traceback"),
        wrong_answers=wrong,
        log_tail=stack.router.log_tail(30),
    )


def _sample(stack: Stack, clients: Clients, traffic: Traffic, sizes: Sizes, over: threading.Event) -> None:
    """Look at the router's process now and then, until it is over."""
    woken_s = time.monotonic()
    while not over.wait(SAMPLE_S):
        late_s = time.monotonic() - woken_s - SAMPLE_S
        asked_s = time.monotonic()
        stack.in_service()
        woken_s = time.monotonic()
        if woken_s - asked_s > sizes.slowest_s:
            sizes.slowest_s, sizes.slowest_at_s, sizes.slowest_late_s = woken_s - asked_s, asked_s, late_s
        sizes.files_peak = max(sizes.files_peak, stack.files())
        while clients.begun * PARTS >= traffic.turns * (len(sizes.memory_mib) + 1):
            sizes.memory_mib.append(stack.memory_mib())


def _files(stack: Stack) -> list[int]:
    """Open files while there is no client, some times: probes and readings of models come and go."""
    files = []
    for _ in range(FILES_SAMPLES):
        files.append(stack.files())
        time.sleep(SAMPLE_S)
    return files


def _options(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kvloop.bench.soak",
        description="An hour of traffic with faults, in minutes: a real router between simulated engines.",
    )
    parser.add_argument(
        "--minutes", type=float, default=10.0, metavar="N", help="wall minutes that stand for the hour (10)"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="draws clients and faults (1)")
    parser.add_argument("--quick", action="store_true", help="100 s of traffic: to see that it runs")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows and counts there too")
    args = parser.parse_args(words)
    if not args.minutes > 0:
        parser.error("--minutes must be positive")
    return args


if __name__ == "__main__":
    sys.exit(main())
