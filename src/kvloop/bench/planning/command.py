"""`kvloop plan`: what one-way, upstream's fixed TTL and kvloop would each give for some recorded traffic.

    kvloop plan --trace turns.jsonl --profile machine.toml --engines 4
    kvloop plan --workload agent-sessions --profile qwen3-32b-h200 --scale 8 --max-prompt-tokens 30000

The traffic is played in virtual time against simulated engines with that profile, behind the router's own
rules. Everything on stdout is the plan; progress is on stderr. Exit status 2 for a mistake in the command.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from kvloop.bench.planning.arrangement import (
    MAX_ENGINES,
    Arrangement,
    kvloop,
    one_way,
    require_room,
    upstream,
)
from kvloop.bench.planning.choose import most_runs, search
from kvloop.bench.planning.extrapolation import extrapolated
from kvloop.bench.planning.planned import Planned
from kvloop.bench.planning.run import Came, Runs
from kvloop.bench.planning.traffic import Asked, read_traffic
from kvloop.bench.run import say
from kvloop.bench.trace import DEFAULT_TRACE
from kvloop.bench.workload.read import AGENT, AUTO, FORMATS
from kvloop.errors import UserError
from kvloop.sim.profile import built_in, load_profile

INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `kvloop plan`."""
    what = parser.add_argument_group("the traffic")
    what.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="a recording, or a router's --turn-log (agent-sessions: default is the one shipped)",
    )
    what.add_argument(
        "--workload",
        choices=[name for name in FORMATS if name != AGENT],
        default=AUTO,
        help="the recording's format (default: %(default)s)",
    )
    what.add_argument(
        "--conversations",
        type=int,
        metavar="N",
        help="play so many (default: as many as take a minute or two)",
    )
    what.add_argument(
        "--conversations-per-hour",
        type=float,
        metavar="F",
        help="let so many begin (default: as recorded, or where that is not known all within an hour)",
    )
    what.add_argument(
        "--scale", type=float, default=1.0, metavar="F", help="divide all lengths by this (default: 1)"
    )
    what.add_argument(
        "--max-prompt-tokens", type=int, metavar="N", help="end a conversation before a longer prompt"
    )
    where = parser.add_argument_group("the machines")
    where.add_argument(
        "--profile", required=True, metavar="NAME", help=f"of {', '.join(built_in())}, or a file"
    )
    where.add_argument(
        "--engines", type=int, metavar="N", help="in all, in a ratio that is chosen, too (default: 2)"
    )
    where.add_argument("--prefill", type=int, metavar="N", help="so many for prefill, and no other ratio")
    where.add_argument("--decode", type=int, metavar="N", help="so many for decode")
    where.add_argument(
        "--prefill-cache",
        choices=("on", "off"),
        default="on",
        help="prefill's own prefix cache (default: on)",
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of all that is drawn (default: 1)")
    parser.add_argument("--quick", action="store_true", help="little of the traffic, and few settings")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the plan there, too")


def run(args: argparse.Namespace) -> int:
    """The command. Raises `UserError`."""
    began_s = time.monotonic()
    start, may_change_ratio = _start(args)
    profile = load_profile(args.profile)
    path = args.trace or (DEFAULT_TRACE if args.workload == "agent-sessions" else None)
    if path is None:
        raise UserError("--trace FILE says which traffic to plan for")
    traffic = read_traffic(
        Asked(
            path=path,
            workload=args.workload,
            scale=args.scale,
            max_prompt_tokens=args.max_prompt_tokens,
            conversations=args.conversations,
            per_hour=args.conversations_per_hour,
            seed=args.seed,
            is_quick=args.quick,
        )
    )
    require_room(traffic, profile, args.profile)
    runs = Runs(traffic, profile, args.prefill_cache == "on", args.seed)
    try:
        planned = _plan(args, runs, start, may_change_ratio=may_change_ratio)
    except KeyboardInterrupt:
        say(f"interrupted after {len(runs.played)} runs: there is no plan yet")
        return INTERRUPTED
    sys.stdout.write(planned.text((time.monotonic() - began_s) / 60))
    if args.json is not None:
        try:
            args.json.write_text(json.dumps(planned.as_json(), indent=2, allow_nan=False) + "\n")
        except OSError as error:
            raise UserError(f"--json {args.json}: {error.strerror}") from None
    return 0


def _plan(args: argparse.Namespace, runs: Runs, start: Arrangement, *, may_change_ratio: bool) -> Planned:
    traffic = runs.traffic
    wanted = 2 + most_runs(start, may_change_ratio=may_change_ratio, is_quick=args.quick)
    say(f"{len(traffic.sessions)} conversations, {traffic.turns:,} turns; about {wanted} runs of them")
    progress = _Progress(runs, wanted)
    ratio = start.prefill, start.decode
    first = [progress.play(one) for one in (one_way(*ratio), upstream(*ratio), kvloop(*ratio))]
    chosen = search(start, progress.play, may_change_ratio=may_change_ratio, is_quick=args.quick)
    columns = [(one.arrangement.way.value, one) for one in first]
    best = chosen[-1].came
    if best is not first[-1]:
        ratio = best.arrangement.prefill, best.arrangement.decode
        if best.arrangement.ratio != start.ratio:
            others = [progress.play(one) for one in (one_way(*ratio), upstream(*ratio))]
            columns += [(f"{one.arrangement.way}, {one.arrangement.ratio}", one) for one in others]
        columns.append(("kvloop, chosen", best))
    said = extrapolated(traffic, runs.profile, args.profile, list(runs.played.values()))
    return Planned(args.profile, runs, columns, chosen, said)


def _start(args: argparse.Namespace) -> tuple[Arrangement, bool]:
    """The arrangement to begin with, and whether its ratio may be changed."""
    given = [name for name in ("engines", "prefill", "decode") if getattr(args, name) is not None]
    for name in given:
        least = 2 if name == "engines" else 1
        if not least <= getattr(args, name) <= MAX_ENGINES:
            raise UserError(f"--{name} must be from {least} to {MAX_ENGINES}, not {getattr(args, name)}")
    if "engines" in given and len(given) > 1:
        raise UserError(f"--engines leaves the ratio open, --{given[1]} does not: say one of them")
    if given == ["prefill"] or given == ["decode"]:
        raise UserError("--prefill and --decode go together; --engines leaves the ratio open")
    if args.prefill is not None:
        return kvloop(args.prefill, args.decode), False
    engines = args.engines or 2
    return kvloop(engines // 2, engines - engines // 2), True


class _Progress:
    """Plays arrangements, and says how far it is."""

    def __init__(self, runs: Runs, wanted: int) -> None:
        self._runs = runs
        self._wanted = wanted
        self._began_s = time.monotonic()

    def play(self, arrangement: Arrangement) -> Came:
        """What it comes to."""
        played = self._runs.played
        if arrangement not in played:
            left = ""
            if played:
                each_s = (time.monotonic() - self._began_s) / len(played)
                left = f"; about {each_s * max(1, self._wanted - len(played)):.0f} s left"
            say(f"{len(played) + 1} of about {self._wanted}: {arrangement}{left}")
        return self._runs.play(arrangement)
