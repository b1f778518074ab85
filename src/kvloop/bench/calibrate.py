"""A profile of this machine, from measurement: `python -m kvloop.bench.calibrate --write PROFILE.toml`.

Conversations of planned length go through real engines (see `token_turn`): at each size the time to the first
token of a turn whose history is computed anew, of one whose history is read back, and the time per token of
their answers. Of each, the fastest of several counts, for what else a machine does only ever adds time. It is
a sum of the profile's numbers, each taken so many times (`parts`): tokens computed, pairs attended to, tokens
read. So the numbers are the least squares of the relative errors, none of them negative (Lawson and Hanson's
problem; with six unknowns every set of positive ones is tried). The sizes are others than those at which
`agreement` judges the profile. What an API server takes per request cannot be told apart from a prompt's own
constant, and is kept as it is.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import msgspec

from kvloop.bench.agreement_engines import MOST_PERCENT, Times, error_percent, real_side, sample
from kvloop.bench.report import Bound, Row, Target
from kvloop.bench.run import conclude, say
from kvloop.bench.token_turn import ANSWER_TOKENS, NEW_TOKENS
from kvloop.bench.ttft import run_seed
from kvloop.errors import UserError
from kvloop.local.simulated import DEFAULT_PROFILE
from kvloop.sim.profile import Profile, Step, Transfer, load_profile

REPETITIONS: Mapping[int, int] = {300: 5, 800: 3, 1_500: 3, 3_500: 2}
QUICK_REPETITIONS: Mapping[int, int] = {300: 1, 800: 1, 1_500: 1}
NUMBERS = ("base", "prompt", "token", "pair", "setup", "read token")
ONE_WAY, RETURNED, PER_TOKEN = "one-way", "returned", "per token"
NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Point:
    """The fastest of one size's times, in seconds: which of the three, at which prompt size."""

    what: str
    tokens: int
    seconds: float


def points_of(times: Times) -> list[Point]:
    """The fastest of what was sampled."""
    kinds = ((ONE_WAY, times.one_way), (RETURNED, times.returned), (PER_TOKEN, times.per_token))
    return [Point(what, tokens, min(taken)) for what, found in kinds for tokens, taken in found.items()]


def parts(profile: Profile, what: str, tokens: int) -> list[int]:
    """How many times each of `NUMBERS` is in a time, by the simulation's rules.

    A turn's prompt is computed in chunks behind what was read back; decode reads the blocks that it does not
    hold, and computes the prompt's last token itself. An answer's tokens are taken at its middle.
    """
    if what == PER_TOKEN:
        return [1, 0, 0, tokens + ANSWER_TOKENS // 2, 0, 0]
    limits = profile.limits
    held = tokens - NEW_TOKENS - 1
    returned = held if what == RETURNED else 0
    computed = tokens - returned
    pairs = computed * returned + computed * (computed + 1) // 2
    pulled = -(-tokens // limits.block_tokens) - held // limits.block_tokens
    read = pulled + -(-returned // limits.block_tokens)
    chunks = -(-computed // limits.batch_tokens)
    transfers = 2 if returned else 1
    return [1, chunks, computed, pairs + tokens, transfers, read * limits.block_tokens]


def expected_s(profile: Profile, what: str, tokens: int) -> float:
    """What the profile's numbers add up to."""
    step, transfer = profile.step, profile.transfer
    engine = (step.base_ns, step.prompt_ns, step.token_ns, step.pair_ps / 1000)
    link = (transfer.setup_ns, transfer.token_ns)
    counted = zip(parts(profile, what, tokens), (*engine, *link), strict=True)
    return (_frontend_ns(profile, what) + sum(count * number for count, number in counted)) / NS_PER_S


def _frontend_ns(profile: Profile, what: str) -> int:
    """Of both hops."""
    return 0 if what == PER_TOKEN else 2 * profile.frontend.request_ns


def fit(profile: Profile, points: Sequence[Point]) -> Profile:
    """The same, with the numbers that fit best. UserError where there are fewer points than numbers."""
    if len(points) < len(NUMBERS):
        raise UserError(f"{len(points)} points do not determine {len(NUMBERS)} numbers")
    rows, wanted = [], []
    for point in points:
        ns = point.seconds * NS_PER_S
        rows.append([count / ns for count in parts(profile, point.what, point.tokens)])
        wanted.append((ns - _frontend_ns(profile, point.what)) / ns)
    base, prompt, token, pair, setup, read = least_squares(rows, wanted)
    step = Step(round(base), round(prompt), round(token), round(1000 * pair))
    transfer = Transfer(setup_ns=round(setup), block_ns=0, token_ns=round(read))
    fitted = max(point.tokens for point in points)
    return msgspec.structs.replace(profile, step=step, transfer=transfer, fitted_tokens=fitted, caveat="")


def least_squares(rows: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float]:
    """What is not negative and comes nearest to `wanted`: the best of all sets of unknowns that may be
    positive, each solved exactly."""
    width = len(rows[0])
    best, least = [0.0] * width, sum(value * value for value in wanted)
    for size in range(1, width + 1):
        for chosen in combinations(range(width), size):
            found = _solved([[row[at] for at in chosen] for row in rows], wanted)
            if found is None or min(found) < 0:
                continue
            full = [0.0] * width
            for at, value in zip(chosen, found, strict=True):
                full[at] = value
            off = [sum(map(_product, row, full)) - value for row, value in zip(rows, wanted, strict=True)]
            if (squares := sum(value * value for value in off)) < least:
                best, least = full, squares
    return best


def _product(left: float, right: float) -> float:
    return left * right


def _solved(rows: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float] | None:
    """The normal equations by elimination, columns brought to equal length; None where they are singular."""
    width = len(rows[0])
    scale = [sum(row[at] ** 2 for row in rows) ** 0.5 or 1.0 for at in range(width)]
    scaled = [[value / by for value, by in zip(row, scale, strict=True)] for row in rows]
    table = [
        [sum(row[at] * row[other] for row in scaled) for other in range(width)]
        + [sum(row[at] * value for row, value in zip(scaled, wanted, strict=True))]
        for at in range(width)
    ]
    for at in range(width):
        pivot = max(range(at, width), key=lambda line: abs(table[line][at]))
        table[at], table[pivot] = table[pivot], table[at]
        if abs(table[at][at]) < 1e-12:
            return None
        for line in range(width):
            if line != at:
                factor = table[line][at] / table[at][at]
                table[line] = [mine - factor * its for mine, its in zip(table[line], table[at], strict=True)]
    return [table[at][width] / table[at][at] / scale[at] for at in range(width)]


def rows_of(profile: Profile, points: Sequence[Point]) -> list[Row]:
    """Each point: how far the fitted numbers are from it."""
    rows = []
    for point in points:
        fitted_s = expected_s(profile, point.what, point.tokens)
        error = error_percent(point.seconds, fitted_s)
        detail = f"{1e3 * point.seconds:.0f} ms measured, {1e3 * fitted_s:.0f} ms fitted: {error:+.1f} %"
        what = f"{point.what}, {point.tokens} tokens: error of the fit"
        rows.append(Row(what, abs(error), "%", Target(Bound.AT_MOST, MOST_PERCENT), detail))
    return rows


def rendered(profile: Profile, points: Sequence[Point]) -> str:
    """The profile as a file that says what it was fitted to."""
    lines = [
        f"# {profile.title}.",
        "#",
        "# Fitted by `python -m kvloop.bench.calibrate` to the times below, each the fastest of several:",
        f"# turn 2 by token ids, streamed, {NEW_TOKENS} tokens new to decode, prefill's prefix cache off,",
        "# vLLM with kvloop's connector. Least squares of relative errors, none negative. The numbers are",
        "# what makes these come out, not measurements of their parts. At other sizes they are judged by",
        "# `python -m kvloop.bench.agreement --only engines`.",
        "#",
        "#   prompt tokens   what        measured    fitted",
    ]
    lines += [
        f"#   {point.tokens:>13,}   {point.what:<9} {1e3 * point.seconds:>8.0f} ms "
        f"{1e3 * expected_s(profile, point.what, point.tokens):>6.0f} ms"
        for point in points
    ]
    fields = msgspec.structs.asdict(profile).items()
    for name, value in sorted(fields, key=lambda field: isinstance(field[1], msgspec.Struct)):
        if isinstance(value, msgspec.Struct):
            lines += ["", f"[{name}]"]
            lines += [f"{key} = {number:_}" for key, number in msgspec.structs.asdict(value).items()]
        elif isinstance(value, str):
            lines.append(f'{name} = "{value}"')
        else:
            lines.append(f"{name} = {value:_}")
    return "\n".join(lines) + "\n"


def main(words: list[str] | None = None) -> int:
    """Measure, fit, print how well, and write the profile. Returns 1 where a point is too far off."""
    parser = argparse.ArgumentParser(
        prog="python -m kvloop.bench.calibrate",
        description="A profile for simulated engines, fitted to this machine's real ones.",
    )
    parser.add_argument("--write", type=Path, metavar="PATH", help="where to write the profile")
    parser.add_argument("--quick", action="store_true", help="few sizes, once: to see that it runs")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows there too")
    args = parser.parse_args(words)
    began_s = time.monotonic()
    rows: list[Row] = []
    failures: list[str] = []
    try:
        with real_side(say) as real:
            repetitions = QUICK_REPETITIONS if args.quick else REPETITIONS
            (times,) = sample([real], run_seed(), repetitions, say)
        points = points_of(times)
        profile = fit(load_profile(DEFAULT_PROFILE), points)
        rows = rows_of(profile, points)
        if args.write is not None:
            args.write.write_text(rendered(profile, points))
    except (UserError, OSError) as error:
        failures.append(str(error))
    minutes = (time.monotonic() - began_s) / 60
    heading = f"The profile's numbers beside what they were fitted to. Measured in {minutes:.0f} minutes."
    return conclude(heading, rows, failures, {"minutes": minutes}, args.json)


if __name__ == "__main__":
    sys.exit(main())
