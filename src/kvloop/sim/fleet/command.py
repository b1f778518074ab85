"""`kvloop sim fleet` and `kvloop sim replay`: runs out of seeds, and the end of one to read.

Exit status 0 only where every checker held in every run. A run that did not hold says which seed it was, what
was found, and how to see it again.
"""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from kvloop.errors import UserError
from kvloop.sim.fleet.plan import Plan, draw
from kvloop.sim.fleet.players import fitted
from kvloop.sim.fleet.recorded import RecordedSession, read_recorded
from kvloop.sim.fleet.turns import MakeTurn
from kvloop.sim.fleet.world import Outcome, World

MAX_SEED = 2**32
DEFAULT_LINES = 60
_TYPES = {field.name: field.type for field in fields(Plan)}
_MOST = {"prefill": 10_000, "decode": 10_000, "routers": 100, "conversations": 10_000_000}
"""What a run is made for: more would only take memory and time."""


def add_fleet_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `kvloop sim fleet`."""
    parser.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="the first seed (default: one that nobody has had, and is printed)",
    )
    parser.add_argument("--count", type=int, default=1, metavar="K", help="so many seeds from there on (1)")
    parser.add_argument("--census", action="store_true", help="say what the runs have reached")
    _add_settings(parser)


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `kvloop sim replay`."""
    parser.add_argument("seed", type=int, metavar="SEED", help="the seed to run again")
    parser.add_argument(
        "--lines", type=int, default=DEFAULT_LINES, metavar="N", help="events to show (default: %(default)s)"
    )
    _add_settings(parser)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the plan that is not to be drawn; repeat for more",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="clients play the recorded sessions of this file, in their full size",
    )


def plan_of(seed: int, settings: list[str], sessions: Sequence[RecordedSession] = ()) -> Plan:
    """A seed's plan, with these options instead of the drawn ones. UserError for what is none.

    `sessions`: what is to be played; engines and times are made to suit it.
    """
    if not 0 <= seed < MAX_SEED:
        raise UserError(f"a seed is a number from 0 to {MAX_SEED - 1}")
    changes: dict[str, Any] = {}
    for setting in settings:
        name, _, text = setting.partition("=")
        if name not in _TYPES or name == "seed":
            raise UserError(f"--set {setting}: there is no option {name!r}; `kvloop sim replay 0` lists them")
        try:
            changes[name] = text == "True" if _TYPES[name] is bool else int(text)
        except ValueError:
            raise UserError(f"--set {setting}: {text!r} is no whole number") from None
        if changes[name] < 0:
            raise UserError(f"--set {setting}: a negative number")
        if name in _MOST and changes[name] > _MOST[name]:
            raise UserError(f"--set {setting}: at most {_MOST[name]:,}")
    drawn = draw(seed)
    return replace(fitted(drawn, sessions) if sessions else drawn, **changes)


def run_fleet(args: argparse.Namespace, make_turn: MakeTurn) -> int:
    """Run the seeds; the exit status."""
    if args.count < 1:
        raise UserError(f"--count {args.count}: at least one seed has to be run")
    first = int.from_bytes(os.urandom(4)) if args.seed is None else args.seed
    sessions = read_recorded(args.trace) if args.trace else []
    again = "".join(f" --set {one}" for one in args.settings) + (f" --trace {args.trace}" if sessions else "")
    failed, census, turns = 0, Counter[str](), 0
    for seed in range(first, first + args.count):
        plan = plan_of(seed, args.settings, sessions)
        if args.count == 1:
            _say_plan(plan)
        outcome = World(plan, make_turn, sessions=sessions).run()
        _say(_line(outcome))
        turns += outcome.turns
        census += outcome.census
        if not outcome.held:
            failed += 1
            if args.count > 1:
                _say_plan(plan)
            _say(f"  to see it: kvloop sim replay {seed}{again}")
    if args.census:
        for name, count in sorted(census.items()):
            _say(f"{count:10,}  {name}")
    if args.count > 1:
        _say(f"{args.count - failed} of {args.count} seeds held, {turns:,} turns")
    return 1 if failed else 0


def run_replay(args: argparse.Namespace, make_turn: MakeTurn) -> int:
    """Run one seed and show its plan and its end; the exit status."""
    sessions = read_recorded(args.trace) if args.trace else []
    plan = plan_of(args.seed, args.settings, sessions)
    world = World(plan, make_turn, kept_lines=max(1, args.lines), sessions=sessions)
    _say_plan(world.plan)
    outcome = world.run()
    for line in outcome.trace.lines:
        _say(line)
    _say(_line(outcome))
    if outcome.finding is not None and outcome.finding.__traceback__ is not None:
        _say(_place(outcome.finding))
    return 0 if outcome.held else 1


def _line(outcome: Outcome) -> str:
    found = "every checker held"
    if outcome.finding is not None:
        where = f" (raised by {outcome.where})" if outcome.where else ""
        found = f"{outcome.name}{where}: {outcome.finding}"
    return (
        f"seed {outcome.plan.seed}: {outcome.turns:,} turns of {outcome.conversations:,} conversations, "
        f"{outcome.returned_tokens:,} tokens read back, faults: {outcome.faults}, "
        f"{outcome.virtual_ns / 1e9:.0f} s, {outcome.events:,} events, "
        f"trace {outcome.trace.digest()}: {found}"
    )


def _say_plan(plan: Plan) -> None:
    for line in plan.lines():
        _say(line)


def _place(error: BaseException) -> str:
    """The innermost frame of an exception."""
    trace = error.__traceback__
    assert trace is not None
    while trace.tb_next is not None:
        trace = trace.tb_next
    return f"in {trace.tb_frame.f_code.co_qualname}, {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
