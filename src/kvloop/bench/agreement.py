"""How far the simulation is from what was measured: `python -m kvloop.bench.agreement`.

    published   two deployments on H200, beside the figures in a published article
    engines     this machine's engines, turn by turn (see `agreement_engines`)

Published: two deployments of vLLM's article on bi-directional transfer (see their profiles), one engine for
prefill and one for decode, in virtual time: conversations of five requests, 150 new tokens and 300 of answer
each, behind a prefix, two at a time, with the return path on and off. The mean time to the first token over
all requests stands beside the published one. How the two clients were shifted against each other is not
published, and a simulation keeps a shift for ever: the mean is over several. Only the curves' ends are in the
article's text, and the profiles were fitted to them; what is between is printed without a verdict. The exit
status is 0 if every target was met.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from kvloop.bench.agreement_engines import measure
from kvloop.bench.report import Bound, Row, Target
from kvloop.bench.run import conclude, say
from kvloop.bench.ttft import run_seed
from kvloop.core.life_table import Ending
from kvloop.errors import UserError
from kvloop.local.fleet_turns import RouterTurn
from kvloop.sim.answer import answer_tokens
from kvloop.sim.fleet.filing import MODEL, Ask
from kvloop.sim.fleet.history import ASSISTANT, SYSTEM, USER, History, Message, prompt_of
from kvloop.sim.fleet.plan import AS_DELIVERED, MS, Plan
from kvloop.sim.fleet.router import Reply
from kvloop.sim.fleet.world import World
from kvloop.sim.memory import cell_size
from kvloop.sim.profile import Profile, load_profile
from kvloop.sim.text import Text, origin

PARTS = ("published", "engines")
PUBLISHED_MS = {
    "qwen3-32b-h200": {2000: (158, 122), 24_000: (778, 460)},
    "glm-5-fp8-h200": {2000: (500, 358), 20_000: (2334, 702)},
}
"""Of each profile, for each prefix: milliseconds to the first token without and with the return path."""
PREFIXES = (2000, 4000, 8000, 12_000, 16_000, 20_000, 24_000)
MOST_PERCENT = 15
SHARED_TOKENS = 500  # of a system prompt, before the prefix
NEW_TOKENS = 150
ANSWER_TOKENS = 300
REQUESTS = 5
CONVERSATIONS = 10
SHIFTS_MS = (0, 300, 600, 900, 1200, 1500)
"""How much later the second client begins than the first."""


class Workload:
    """The article's conversations, one after the other on each of two lanes."""

    def __init__(self, profile: Profile, prefix_tokens: int, shift_ms: int, *, is_on: bool) -> None:
        self.first_token_ms: list[float] = []
        self.returned_tokens = 0
        self._prefix_tokens = prefix_tokens
        self._shift_ms = shift_ms
        self._is_on = is_on
        self._begun = 0
        self._cell_tokens = cell_size(profile.limits.block_tokens)
        self._world = World(
            plan_of(profile), RouterTurn, checkers=(), traced=False, profile=profile_as_run(profile)
        )

    def run(self) -> None:
        """Until all of them have ended."""
        self._begin()
        self._world.loop.after(self._shift_ms * MS, self._begin)
        wanted = CONVERSATIONS * REQUESTS
        while len(self.first_token_ms) < wanted and self._world.loop.step():
            pass

    def _begin(self) -> None:
        if self._begun < CONVERSATIONS:
            self._begun += 1
            self._ask(self._begun, (Message(SYSTEM, self._begun, SHARED_TOKENS + self._prefix_tokens),), 1)

    def _ask(self, number: int, past: History, request: int) -> None:
        history = (*past, Message(USER, number * REQUESTS + request, NEW_TOKENS))
        text = Text(prompt_of(history), origin(MODEL, ""), self._cell_tokens)
        asked_ns = self._world.loop.now_ns
        ask = Ask(
            tenant="",
            salt="",
            units=tuple(message.unit() for message in history),
            names=(),
            text=text,
            max_tokens=ANSWER_TOKENS,
            ends_at=ANSWER_TOKENS + 1,
            ending=Ending.LENGTH,
            stream=True,
            keep_ms=None if self._is_on else 0,
        )

        def hear(reply: Reply) -> None:
            assert reply.data == answer_tokens(text.seed(), 0, ANSWER_TOKENS), reply.why
            self.first_token_ms.append((reply.first_ns - asked_ns) / 1e6)
            self.returned_tokens += 0 if reply.turn is None else int(str(reply.turn["returned_tokens"]))
            if request == REQUESTS:
                self._begin()
            else:
                self._ask(number, (*history, Message(ASSISTANT, text.seed(), ANSWER_TOKENS)), request + 1)

        self._world.routers[0].ask(f"{number}.{request}", ask, hear)


def plan_of(profile: Profile) -> Plan:
    """One engine of each kind with the connector's own terms. Prefill has no cache: off, it computes all."""
    return replace(
        AS_DELIVERED,
        block_tokens=profile.limits.block_tokens,
        prefix_cache=False,
        latency_us=100,
    )


def profile_as_run(profile: Profile) -> Profile:
    """Under the name that the fleet's routers and clients know."""
    return msgspec.structs.replace(profile, model=MODEL)


def simulated_ms(profile: Profile, prefix_tokens: int, *, is_on: bool) -> float:
    """Mean time to the first token over all requests and shifts."""
    taken_ms: list[float] = []
    for shift_ms in SHIFTS_MS:
        workload = Workload(profile, prefix_tokens, shift_ms, is_on=is_on)
        workload.run()
        taken_ms += workload.first_token_ms
    return statistics.mean(taken_ms)


def rows_of(name: str, prefixes: Sequence[int] = PREFIXES) -> list[Row]:
    """Each prefix of a deployment, off and on."""
    profile, rows = load_profile(name), []
    for prefix in prefixes:
        published = PUBLISHED_MS[name].get(prefix)
        for is_on in (False, True):
            mean_ms = simulated_ms(profile, prefix, is_on=is_on)
            what = f"{name}, {prefix:,} tokens, {'on' if is_on else 'off'}"
            detail = f"{mean_ms:.0f} ms simulated"
            if published is None:
                rows.append(Row(what, mean_ms, "ms", None, "nothing published in figures"))
                continue
            error = 100 * (mean_ms / published[is_on] - 1)
            detail += f", {published[is_on]} ms published: {error:+.1f} %"
            rows.append(Row(what + ": error", abs(error), "%", Target(Bound.AT_MOST, MOST_PERCENT), detail))
    return rows


def published_rows() -> list[Row]:
    """Every deployment's."""
    rows: list[Row] = []
    for name in PUBLISHED_MS:
        say(f"{name}: {len(PREFIXES)} prefixes, off and on")
        rows += rows_of(name)
    return rows


def main(words: list[str] | None = None) -> int:
    """Print each point with its error, and return 1 if one is too far off or was not measured."""
    args = _arguments(words)
    began_s = time.monotonic()
    rows: list[Row] = []
    failures: list[str] = []
    for part in args.only:
        try:
            rows += published_rows() if part == "published" else measure(run_seed(), args.quick, say)
        except (UserError, OSError) as error:
            failures.append(f"{part}: {error}")
    minutes = (time.monotonic() - began_s) / 60
    heading = f"The simulation beside what was measured. Taken in {minutes:.0f} minutes."
    return conclude(heading, rows, failures, {"minutes": minutes}, args.json)


def _arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kvloop.bench.agreement",
        description="The simulation beside times to the first token, and tokens reused, that were measured.",
    )
    parser.add_argument(
        "--only",
        type=lambda text: tuple(text.split(",")),
        default=PARTS,
        metavar="PARTS",
        help=f"comma-separated parts of {','.join(PARTS)} (default: all)",
    )
    parser.add_argument("--quick", action="store_true", help="engines: the smallest size, once")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows there too")
    args = parser.parse_args(words)
    if not set(args.only) <= set(PARTS):
        parser.error(f"--only takes parts of {','.join(PARTS)}, not {','.join(args.only)}")
    return args


if __name__ == "__main__":
    sys.exit(main())
