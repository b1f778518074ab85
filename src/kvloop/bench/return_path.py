"""The return path, measured: `python -m kvloop.bench.return_path`.

Everything runs side by side in one run on one machine: a prefill engine and a decode engine, a core each,
with two routers in front of them, one that returns and one that does not; then the same with upstream's
connector. Four engines do not fit on two cores, so upstream's are a second phase. Prefill's own prefix cache
is off throughout, as if other work had evicted the conversation: what is compared is computing a history
with reading it back.

The exit status is 0 if every target was met.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from kvloop.bench import claim, idle, ttft
from kvloop.bench import router as router_bench
from kvloop.bench.report import Bound, Row, Target
from kvloop.bench.run import conclude, say
from kvloop.errors import UserError
from kvloop.local.stack import Stack
from kvloop.local.stack_config import StackConfig
from kvloop.local.transfer_config import Connector

PARTS = ("claim", "idle", "ttft", "router")
REPETITIONS = {570: 9, 1_900: 5}
"""Samples per size: a short turn's ratio is the noisiest, and its sample the cheapest."""
OTHER_REPETITIONS = 3
UPSTREAM_MOST_REPETITIONS = 3
UPSTREAM_BUDGET_S = 600.0
"""As shipped, on shared cores, it takes minutes for a prompt that takes seconds otherwise. One sample of each
size is taken in any case, and no round of samples begins after this time."""
QUICK_REPETITIONS = 1
QUICK_PAIRS = 60
KV_CACHE_GIB = 2
"""Upstream keeps every conversation in decode's memory for 480 s: three of each size, in float32."""

KEEPS_ALL = ("--lease-policy", "fixed")
"""Otherwise the router lets go of conversations that do not come back, and an idle engine holds none."""
AS_SHIPPED = {"num_threads": 4}
UNPACED = {"KVLOOP_PROGRESS_DELAY_US": ""}
"""Upstream's own transfer threads: four, which spin. kvloop's launcher would pace them."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure, and how thoroughly."""

    model: str
    parts: tuple[str, ...]
    sizes: tuple[int, ...]
    repetitions: int | None
    is_quick: bool
    json_path: Path | None

    def samples_of(self, tokens: int) -> int:
        """How many samples a figure at a prompt size is made of."""
        if self.repetitions is not None:
            return self.repetitions
        return QUICK_REPETITIONS if self.is_quick else REPETITIONS.get(tokens, OTHER_REPETITIONS)


def main(words: list[str] | None = None) -> int:
    """Measure, print the table, and return 1 if a target was missed or a part could not be measured."""
    options = _options(words)
    began_s = time.monotonic()
    rows, failures = measure(options)
    minutes = (time.monotonic() - began_s) / 60
    facts: dict[str, object] = {"model": options.model, "minutes": minutes}
    return conclude(heading(options, minutes), rows, failures, facts, options.json_path)


def heading(options: Options, minutes: float) -> str:
    """Under which conditions the figures were taken."""
    lines = [f"Model {options.model}, one core per engine, prefill's prefix cache off."]
    if "ttft" in options.parts:
        lines += [
            f"TTFT is of {ttft.MEASURED_TURN}.",
            "Return and one-way alternate on the same engines. Upstream's engines ran afterwards, in a",
            "second phase of this run: four engines do not fit on two cores. `upstream` is bidirectional",
            "mode with the transfer threads that vLLM gives it, `upstream, paced` has kvloop's instead.",
        ]
    return "\n".join([*lines, f"Measured in {minutes:.0f} minutes."])


def measure(options: Options) -> tuple[list[Row], list[str]]:
    """The rows of every part, and what went wrong.

    A part that fails costs its own rows only, and so does an interrupt: what was measured before it is shown.
    """
    seed = ttft.run_seed()
    rows: list[Row] = []
    failures: list[str] = []
    samples = ttft.Samples()
    try:
        if {"ttft", "claim", "idle"} & set(options.parts):
            _measure_kvloop(options, seed, samples, rows, failures)
        if "router" in options.parts:
            rows += _router_rows(options)
        if "ttft" in options.parts:
            _measure_upstream(options, seed, samples, failures)
    except KeyboardInterrupt:
        failures.append("the rest: interrupted")
    if "ttft" in options.parts:
        rows = ttft.rows(samples, options.sizes) + rows
    return rows, failures


def _measure_kvloop(
    options: Options, seed: str, samples: ttft.Samples, rows: list[Row], failures: list[str]
) -> None:
    try:
        with Stack(_config(options), say=say) as stack:
            for part in options.parts:
                _measure_on(stack, part, options, seed, samples, rows, failures)
    except (UserError, OSError) as error:
        failures.append(f"kvloop's engines: {error}")


def _measure_on(
    stack: Stack,
    part: str,
    options: Options,
    seed: str,
    samples: ttft.Samples,
    rows: list[Row],
    failures: list[str],
) -> None:
    quick = options.is_quick
    try:
        if part == "ttft":
            bench = ttft.Bench(stack, ttft.kvloop_ways(stack), seed, say)
            bench.run(options.sizes, options.samples_of, samples)
        elif part == "claim":
            effort = claim.Effort(100, 20, 570) if quick else claim.Effort()
            rows += claim.measure(stack, seed, effort, say)
        elif part == "idle":
            rows += idle.measure(stack, seed, idle.Effort(settle_s=10.0) if quick else idle.Effort(), say)
    except (UserError, OSError) as error:
        failures.append(f"{part}: {error}")


def _measure_upstream(options: Options, seed: str, samples: ttft.Samples, failures: list[str]) -> None:
    for name, extra, env in ((ttft.UPSTREAM, AS_SHIPPED, UNPACED), (ttft.UPSTREAM_PACED, {}, {})):
        say(f"now {name}")
        config = _config(options, Connector.UPSTREAM, extra, env)
        try:
            with Stack(config, say=say) as stack:
                way = ttft.Way(name, stack.url, returns=True, names_reuse=False)
                ttft.Bench(stack, (way,), f"{seed} {name}", say).run(
                    options.sizes,
                    lambda tokens: min(options.samples_of(tokens), UPSTREAM_MOST_REPETITIONS),
                    samples,
                    budget_s=UPSTREAM_BUDGET_S,
                )
        except (UserError, OSError) as error:
            failures.append(f"{name}: {error}")


def _config(
    options: Options,
    connector: Connector = Connector.KVLOOP,
    extra: dict[str, int] | None = None,
    env: dict[str, str] | None = None,
) -> StackConfig:
    return StackConfig(
        model=options.model,
        connector=connector,
        prefill_flags=("--no-enable-prefix-caching",),
        engine_extra=extra or {},
        env=env or {},
        kv_cache_gib=KV_CACHE_GIB,
        router_flags=(*ttft.PATIENT, *KEEPS_ALL),
    )


def _router_rows(options: Options) -> list[Row]:
    """The router's own benchmark, on fake engines, as rows of this report."""
    return [
        Row(
            f"router adds, {case.name}, median",
            case.added_ms,
            "ms",
            Target(Bound.UNDER, case.target_ms),
            f"two hops directly {case.direct_ms:.2f} ms, routed {case.routed_ms:.2f} ms, "
            f"added at p95 {case.added_p95_ms:.2f} ms",
        )
        for case in router_bench.measure(QUICK_PAIRS if options.is_quick else router_bench.DEFAULT_PAIRS)
    ]


def _options(words: list[str] | None) -> Options:
    parser = argparse.ArgumentParser(
        prog="python -m kvloop.bench.return_path",
        description="Figures of the return path, each with its target and verdict.",
    )
    parser.add_argument("--model", default="smollm2", help="what to serve (default: %(default)s)")
    parser.add_argument(
        "--only", metavar="PARTS", help=f"comma-separated parts of {','.join(PARTS)} (default: all)"
    )
    parser.add_argument(
        "--sizes", metavar="TOKENS", help="comma-separated prompt sizes (default: 570,1900,5600)"
    )
    parser.add_argument(
        "--repetitions", type=int, metavar="COUNT", help="samples per figure (default: 3 to 9)"
    )
    parser.add_argument("--quick", action="store_true", help="the smallest size, once: to see that it runs")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows there too")
    args = parser.parse_args(words)
    parts = tuple(args.only.split(",")) if args.only else PARTS
    if not set(parts) <= set(PARTS):
        parser.error(f"--only takes parts of {','.join(PARTS)}, not {args.only}")
    all_sizes = tuple(ttft.LEAST_SPEED_UP)
    try:
        sizes = tuple(int(size) for size in args.sizes.split(",")) if args.sizes else all_sizes
    except ValueError:
        parser.error(f"--sizes takes numbers of tokens, separated by commas, not {args.sizes}")
    return Options(
        model=args.model,
        parts=tuple(part for part in PARTS if part in parts),
        sizes=sizes[:1] if args.quick and not args.sizes else sizes,
        repetitions=args.repetitions,
        is_quick=args.quick,
        json_path=args.json,
    )


if __name__ == "__main__":
    sys.exit(main())
