"""What a router costs as the fleet behind it grows from ten engines to ten thousand.

One simulated run for each size, without faults and without checkers: half the engines prefill, half decode,
one router, twenty conversations for each engine up to a bound. Times are CPU time of this machine around the
router's own two decisions, which are `core`'s: which turn a request goes on from, and which engine takes it.
State is what the tables that grow with traffic really take in memory; frames are counted in virtual time.
"""

import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from kvloop.bench.plot import Series, log_plot
from kvloop.local.fleet_turns import RouterTurn
from kvloop.sim.fleet.plan import AS_DELIVERED, Plan, S
from kvloop.sim.fleet.router import RouterNode
from kvloop.sim.fleet.world import World

SIZES = (10, 30, 100, 300, 1000, 3000, 10_000)
CONVERSATIONS_PER_ENGINE = 20
MAX_CONVERSATIONS = 1500
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Size:
    """What was seen of one fleet. Times in microseconds of CPU: median and 99th percentile."""

    engines: int
    conversations: int
    turns: int
    find_us: tuple[float, float]
    choose_us: tuple[float, float]
    frames_per_turn: float
    frames_per_s: float
    state_bytes: int
    leases: int


def plan_of(engines: int, conversations: int) -> Plan:
    """A fleet of this size with nothing that goes wrong."""
    return replace(
        AS_DELIVERED,
        seed=engines,
        policy="kv",
        append_tokens=1024,
        prefill=engines // 2,
        decode=engines - engines // 2,
        block_tokens=64,
        prefill_blocks=256,
        decode_blocks=1024,
        batch_tokens=2048,
        running=64,
        token_us=5,
        step_us=500,
        setup_us=500,
        block_us=20,
        conversations=conversations,
        tenants=100,
        turns=8,
        think_ms=8000,
        arrive_ms=max(1, 20_000 // conversations),
        odd_histories=100,
        leaves=0,
        hostile=0,
        model_tokens=2048,
    )


def run_through(world: World) -> None:
    """Let every conversation come to its end."""
    people, step = world.people, world.loop.step
    people.open_the_doors()
    while step() and not people.are_through:
        pass


def measure(engines: int) -> Size:
    """One run."""
    wanted = min(MAX_CONVERSATIONS, CONVERSATIONS_PER_ENGINE * engines)
    world = World(plan_of(engines, wanted), RouterTurn, checkers=(), traced=False)
    router, people = world.routers[0], world.people
    finds, chooses = Stopwatch(), Stopwatch()
    router.filing.look_up = finds.around(router.filing.look_up)  # type: ignore[method-assign]
    router.known.choose = chooses.around(router.known.choose)  # type: ignore[method-assign]
    run_through(world)
    frames = world.around.network.frames
    return Size(
        engines=engines,
        conversations=people.begun,
        turns=people.turns,
        find_us=finds.summary_us(),
        choose_us=chooses.summary_us(),
        frames_per_turn=frames / people.turns,
        frames_per_s=frames / (world.loop.now_ns / S),
        state_bytes=state_bytes(router),
        leases=len(router.filing.keeper),
    )


def state_bytes(router: RouterNode) -> int:
    """What a router's lineage and keeper take, with everything that they alone lead to."""
    seen: set[int] = set()
    total, ahead = 0, [router.filing.lineage, router.filing.keeper]
    while ahead:
        one: object = ahead.pop()
        if id(one) in seen or isinstance(one, type) or callable(one):
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        ahead += gc.get_referents(one)
    return total


class Stopwatch:
    """How much CPU time calls take."""

    def __init__(self) -> None:
        self._taken_ns: list[int] = []

    def around(self, call: Callable[..., T]) -> Callable[..., T]:
        """The same call, timed."""

        def timed(*args: object, **more: object) -> T:
            began_ns = time.thread_time_ns()
            answer = call(*args, **more)
            self._taken_ns.append(time.thread_time_ns() - began_ns)
            return answer

        return timed

    def summary_us(self) -> tuple[float, float]:
        """Median and 99th percentile."""
        taken = sorted(self._taken_ns)
        return taken[len(taken) // 2] / 1000, taken[len(taken) * 99 // 100] / 1000


HEADER = (
    "| engines | conversations | turns | find a turn, µs (p99) | choose an engine, µs (p99) "
    "| control frames a turn | a second | router's state, KiB | a turn, bytes | leases kept |\n"
    "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n"
)


def table_line(size: Size) -> str:
    """A size as a line of the table, in Markdown."""
    find, find_99 = size.find_us
    chosen, chosen_99 = size.choose_us
    return (
        f"| {size.engines:,} | {size.conversations:,} | {size.turns:,} | {find:.0f} ({find_99:.0f}) "
        f"| {chosen:.0f} ({chosen_99:.0f}) | {size.frames_per_turn:.1f} | {size.frames_per_s:,.0f} "
        f"| {size.state_bytes / 1024:,.0f} | {size.state_bytes / size.turns:,.0f} | {size.leases:,} |\n"
    )


def as_plot(sizes: Sequence[Size]) -> str:
    """The growing columns over the number of engines, both axes logarithmic, as SVG."""
    engines = [float(size.engines) for size in sizes]
    return log_plot(
        "What a router costs, over the number of engines",
        "engines",
        [
            Series("find a turn, µs", engines, [size.find_us[0] for size in sizes]),
            Series("choose an engine, µs", engines, [size.choose_us[0] for size in sizes]),
            Series("control frames a turn", engines, [size.frames_per_turn for size in sizes]),
            Series("router's state, KiB", engines, [size.state_bytes / 1024 for size in sizes]),
        ],
    )
