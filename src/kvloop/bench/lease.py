"""What leases cost and bring, measured: `python -m kvloop.bench.lease`.

    replay    recorded agent sessions in virtual time: memory held per reused token, and turns that reuse
    fleet     the same sessions at full size in a whole simulated fleet
    engines   some of these sessions, scaled down, on real engines in real time: the same figures
    load      a real decode engine under load: throughput and time per output token, retention on and off
    control   a real router and a real decode engine with ten thousand live leases: renewals and claims

The exit status is 0 if every target was met.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from kvloop.bench import lease_control, lease_engines, lease_fleet, lease_load
from kvloop.bench.held import JUDGED_TOKENS, held_row, reuse_row
from kvloop.bench.lease_replay import Outcome, Policy, Replay
from kvloop.bench.report import Row
from kvloop.bench.run import conclude, say
from kvloop.bench.trace import DEFAULT_TRACE, read_sessions
from kvloop.bench.ttft import run_seed
from kvloop.errors import UserError
from kvloop.local.stack import Stack
from kvloop.local.stack_config import StackConfig
from kvloop.sim.fleet.recorded import read_recorded

PARTS = ("replay", "fleet", "engines", "load", "control")
POOLS_TOKENS = (JUDGED_TOKENS, 4_000_000, 2_000_000)
CONTROL_KV_GIB = 6
QUICK_LOAD = lease_load.Effort(pairs=2, requests=16)
QUICK_ENGINES = lease_engines.Effort(sessions=6, begin_within_s=5.0, window_s=30.0)
QUICK_CONTROL = lease_control.Effort(leases=200, renewed_s=25.0, silent_s=5.0, claims=100)


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure, and how thoroughly."""

    model: str
    parts: tuple[str, ...]
    trace: Path
    is_quick: bool
    json_path: Path | None


def main(words: list[str] | None = None) -> int:
    """Measure, print the table, and return 1 if a target was missed or a part could not be measured."""
    options = _options(words)
    began_s = time.monotonic()
    rows: list[Row] = []
    failures: list[str] = []
    seed = run_seed()
    try:
        for part in options.parts:
            try:
                rows += _part(part, options, seed)
            except (UserError, OSError) as error:
                failures.append(f"{part}: {error}")
    except KeyboardInterrupt:
        failures.append("the rest: interrupted")
    minutes = (time.monotonic() - began_s) / 60
    heading = f"Leases: what they cost and bring. Measured in {minutes:.0f} minutes."
    facts: dict[str, object] = {"model": options.model, "minutes": minutes}
    return conclude(heading, rows, failures, facts, options.json_path)


def _part(part: str, options: Options, seed: str) -> list[Row]:
    if part == "replay":
        return replay_rows(options.trace, POOLS_TOKENS[:1] if options.is_quick else POOLS_TOKENS)
    if part == "fleet":
        return lease_fleet.measure(read_recorded(options.trace), is_quick=options.is_quick)
    if part == "engines":
        sessions = read_sessions(options.trace)
        effort = QUICK_ENGINES if options.is_quick else lease_engines.Effort()
        with Stack(lease_engines.config(), say=say) as stack:
            return lease_engines.measure(stack, sessions, seed, effort, say)
    if part == "load":
        with Stack(StackConfig(options.model, decode_flags=lease_load.ENGINE_FLAGS), say=say) as stack:
            return lease_load.measure(
                stack, seed, QUICK_LOAD if options.is_quick else lease_load.Effort(), say
            )
    config = StackConfig(router_flags=lease_control.ROUTER_FLAGS, kv_cache_gib=CONTROL_KV_GIB)
    with Stack(config, say=say) as stack:
        return lease_control.measure(
            stack, seed, QUICK_CONTROL if options.is_quick else lease_control.Effort(), say
        )


def replay_rows(trace: Path, pools_tokens: tuple[int, ...]) -> list[Row]:
    """Each pool's rows: adaptive leases against both kinds of fixed ones. UserError for a file that is no
    trace."""
    sessions = read_sessions(trace)
    rows: list[Row] = []
    for tokens in pools_tokens:
        outcomes: dict[Policy, Outcome] = {}
        for policy in Policy:
            say(f"replaying {len(sessions)} sessions, {tokens:,} tokens of memory, {policy}")
            outcomes[policy] = Replay(sessions, policy, tokens).run()
        judged = tokens == JUDGED_TOKENS
        for policy in (Policy.FIXED, Policy.UPSTREAM):
            rows += _compared(outcomes[Policy.ADAPTIVE], outcomes[policy], policy, tokens, judged)
    return rows


def _compared(ours: Outcome, theirs: Outcome, policy: Policy, tokens: int, judged: bool) -> list[Row]:
    against = f"adaptive / {policy}, {tokens // 1_000_000}M tokens of memory"
    return [
        held_row(
            against,
            ours.held_per_reused,
            theirs.held_per_reused,
            f"{ours.held_per_reused:.1f} against {theirs.held_per_reused:.1f} token-seconds",
            judged=judged,
        ),
        reuse_row(
            f"tokens reused, {against}",
            ours.reused_tokens,
            theirs.reused_tokens,
            f"{ours.turns_reusing} of {ours.turns} turns against {theirs.turns_reusing}; reclaimed "
            f"{ours.reclaimed} and {theirs.reclaimed} leases",
            judged=judged,
        ),
    ]


def _options(words: list[str] | None) -> Options:
    parser = argparse.ArgumentParser(
        prog="python -m kvloop.bench.lease",
        description="Figures of leases, each with its target and verdict.",
    )
    parser.add_argument("--model", default="smollm2", help="for the load part (default: %(default)s)")
    parser.add_argument(
        "--only", metavar="PARTS", help=f"comma-separated parts of {','.join(PARTS)} (default: all)"
    )
    parser.add_argument(
        "--trace", type=Path, default=DEFAULT_TRACE, metavar="PATH", help="recorded sessions to replay"
    )
    parser.add_argument("--quick", action="store_true", help="little of everything: to see that it runs")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows there too")
    args = parser.parse_args(words)
    parts = tuple(args.only.split(",")) if args.only else PARTS
    if not set(parts) <= set(PARTS):
        parser.error(f"--only takes parts of {','.join(PARTS)}, not {args.only}")
    return Options(
        model=args.model,
        parts=tuple(part for part in PARTS if part in parts),
        trace=args.trace,
        is_quick=args.quick,
        json_path=args.json,
    )


if __name__ == "__main__":
    sys.exit(main())
