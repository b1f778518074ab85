"""What ten thousand live leases cost: CPU of renewing them, at the router and at decode, and a claim's time.

The leases are real: turns through a router that renews them all. The CPU of the router's process and of
decode's is read over several renewal intervals, and then, while the leases still last, over a time after the
router was killed: the difference is what renewing takes at decode. The router does nothing else meanwhile.
Then a real claim is timed on the full table, as in the return path's benchmark.
"""

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvloop.bench import claim
from kvloop.bench.control import ControlClient
from kvloop.bench.engine import cpu_s, process_tree
from kvloop.bench.report import Bound, Row, Target, spread
from kvloop.errors import UserError
from kvloop.local.chat import served_model, stream_turn
from kvloop.local.stack import Stack
from kvloop.wire.control import Stat, StatReply

MOST_RENEWAL_PERCENT = 1.0
MOST_CLAIM_MS = 1.0
CONCURRENCY = 16
GRANTED = 'kvloop_leases{state="granted"}'
RENEWALS = 'kvloop_renewals_total{outcome="renewed"}'
ROUTER_FLAGS = ("--lease-policy", "fixed", "--policy", "sticky")
"""Otherwise the router would let most of them go: nobody comes back."""
QUESTION = "Say what a person should know about this subject before the first lesson, and why it matters: "
QUESTION_TIMES = 5
"""So that the prompt is longer than `kv_recompute_threshold`: shorter ones are not retained."""


@dataclass(frozen=True, slots=True)
class Effort:
    """Leases to hold, seconds over which CPU is read, and claims to time."""

    leases: int = 10_000
    renewed_s: float = 60.0
    silent_s: float = 30.0
    claims: int = 500


def measure(stack: Stack, seed: str, effort: Effort, say: Callable[[str], None]) -> list[Row]:
    """The rows. Raises `UserError` where an engine does not do its part."""
    deployment = claim.Deployment(stack, seed)
    overheard, _ = deployment.overhear(570)
    _fill(stack, seed, effort.leases, say)
    engine, router = stack.decode[0], stack.router
    key = (stack.folder / "secret").read_bytes().strip()
    with ControlClient(key, "127.0.0.1", engine.control_port) as client:
        before = _counters(client, effort.leases)
        engine_percent, router_percent = _percents([engine.pid, router.pid], effort.renewed_s)
        after = _counters(client, effort.leases)
        renewals = after[RENEWALS] - before[RENEWALS]
        if renewals < effort.leases:
            raise UserError(f"the router renewed {renewals} leases in {effort.renewed_s:g} s")
        full = claim.round_trips(client, overheard, effort.claims)
        router.kill()
        time.sleep(1)
        (silent_percent,) = _percents([engine.pid], effort.silent_s)
        left = _counters(client, 1)[GRANTED]
    say(f"decode {engine_percent:.2f} % of a core with renewals, {silent_percent:.2f} % without")
    how = f"{renewals:,} renewals of {after[GRANTED]:,} leases in {effort.renewed_s:g} s"
    target = Target(Bound.UNDER, MOST_RENEWAL_PERCENT)
    return [
        Row("renewing, decode's CPU", engine_percent - silent_percent, "% of a core", target, how),
        Row("renewing, the router's CPU", router_percent, "% of a core", target, how),
        Row(
            f"claim round trip, {after[GRANTED]:,} live leases, median",
            statistics.median(full),
            "ms",
            Target(Bound.UNDER, MOST_CLAIM_MS),
            spread(full, "ms"),
        ),
        Row("leases left after the router was killed", left, "", None, "within a term; then they end"),
    ]


def _fill(stack: Stack, seed: str, leases: int, say: Callable[[str], None]) -> None:
    model = served_model(stack.url)

    def turn(number: int) -> None:
        content = f"{seed}, conversation {number}. {QUESTION * QUESTION_TIMES}number {number}."
        body = {"model": model, "messages": [{"role": "user", "content": content}], "temperature": 0}
        stream_turn(stack.url, body | {"max_tokens": 2, "min_tokens": 2})
        if number % 1000 == 999:
            say(f"{number + 1:,} of {leases:,} leases")

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        for _ in pool.map(turn, range(leases)):
            pass


def _counters(client: ControlClient, least: int) -> dict[str, int]:
    answer = client.ask(Stat())
    counters = answer.counters if isinstance(answer, StatReply) else {}
    if counters.get(GRANTED, 0) < least:
        raise UserError(f"decode should hold {least} leases, and says {answer}")
    return {name: counters.get(name, 0) for name in (GRANTED, RENEWALS)}


def _percents(pids: list[int], window_s: float) -> list[float]:
    trees = [process_tree(pid) for pid in pids]
    began_s, used_s = time.monotonic(), [cpu_s(tree) for tree in trees]
    time.sleep(window_s)
    took_s = time.monotonic() - began_s
    return [100 * (cpu_s(tree) - used) / took_s for tree, used in zip(trees, used_s, strict=True)]
