"""The deployments that `kvloop bench --compare` starts, side by side on one machine.

    one-way      the engines of the kvloop leg, behind a router that returns nothing
    upstream     vLLM's own bidirectional connector, on engines of its own
    kvloop       as delivered
    aggregated   one vLLM engine with its prefix cache on, on as many cores as one of the two: the floor

One leg at a time is asked, and legs take turns. Upstream's engines do not rest while they hold anything, so
they stand still (SIGSTOP) while it is not their turn, and cost the others nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

from kvloop.bench.load.record import Leg
from kvloop.bench.load.watch import Watch
from kvloop.errors import UserError
from kvloop.local.simulated import build_simulated, simulated_model
from kvloop.local.stack import Router, Stack
from kvloop.local.stack_config import StackConfig
from kvloop.local.transfer_config import Connector
from kvloop.local.up import CLAIM_TIMEOUT_MS

ONE_WAY, UPSTREAM, KVLOOP, AGGREGATED = "one-way", "upstream", "kvloop", "aggregated"
LEGS = (ONE_WAY, UPSTREAM, KVLOOP, AGGREGATED)
PATIENT = ("--prefill-timeout-s", "600")
"""A router's flags: a long prompt on a slow core is to be measured, not given up."""
_CACHE_OFF = "--no-enable-prefix-caching"
_DESCRIPTIONS = MappingProxyType(
    {
        ONE_WAY: "prefill and decode, KV from prefill to decode only",
        UPSTREAM: "prefill and decode with vLLM's own bidirectional NixlConnector",
        KVLOOP: "prefill and decode with kvloop",
        AGGREGATED: "one vLLM engine with a warm prefix cache, on as many cores as one of the two",
    }
)


def _nothing() -> None:
    """For a leg that may go on while others are asked."""


@dataclass(frozen=True, slots=True)
class Side:
    """A leg that can be asked. `admin_url` is its router's, where it has one that explains."""

    leg: Leg
    watch: Watch
    admin_url: str | None = None
    wake: Callable[[], None] = _nothing
    rest: Callable[[], None] = _nothing


@dataclass(frozen=True, slots=True)
class Machine:
    """What the deployments are made of. `sim`: simulated engines with this profile. `engine_flags` go to all
    engines, `router_flags` to kvloop's router."""

    model: str = "smollm2"
    prefill: int = 1
    decode: int = 1
    prefill_cache: bool = False
    sim: str | None = None
    kv_cache_gib: int = 2
    engine_flags: tuple[str, ...] = ()
    router_flags: tuple[str, ...] = field(default=())

    @property
    def engines(self) -> int:
        """Of a pair."""
        return self.prefill + self.decode


def _config(machine: Machine, connector: Connector, router_flags: tuple[str, ...] = ()) -> StackConfig:
    is_ours = connector is Connector.KVLOOP
    return StackConfig(
        model=machine.model,
        prefill=machine.prefill,
        decode=machine.decode,
        connector=connector,
        engine_flags=machine.engine_flags,
        prefill_flags=() if machine.prefill_cache else (_CACHE_OFF,),
        prefill_extra={"kvloop_claim_timeout_ms": CLAIM_TIMEOUT_MS} if is_ours else {},
        router_flags=(*PATIENT, *router_flags),
        kv_cache_gib=machine.kv_cache_gib,
    )


def _aggregated(machine: Machine) -> StackConfig:
    return StackConfig(
        model=machine.model,
        prefill=0,
        decode=1,
        connector=Connector.NONE,
        router=False,
        engine_flags=machine.engine_flags,
        kv_cache_gib=machine.kv_cache_gib,
        shares=machine.engines,
    )


def _stack(machine: Machine, config: StackConfig, say: Callable[[str], None]) -> Stack:
    if machine.sim is None:
        return Stack(config, say=say)
    build, model = build_simulated(machine.sim), simulated_model(machine.sim)
    return Stack(config, build=build, model=model, say=say)


def _side(name: str, stack: Stack, router: Router | None, *, rests: bool = False) -> Side:
    engines = [*stack.prefill, *stack.decode]
    url = stack.url if router is None else router.url
    watch = Watch(
        decode=[engine.url for engine in stack.decode],
        prefill=[engine.url for engine in stack.prefill],
        pids=[one.pid for one in (*engines, *([] if router is None else [router]))],
    )

    def each(signal: Callable[[Stack], None]) -> Callable[[], None]:
        return lambda: signal(stack)

    return Side(
        Leg(name, _DESCRIPTIONS[name], url),
        watch,
        admin_url=router.admin_url if router is not None and name == KVLOOP else None,
        wake=each(_go_on) if rests else _nothing,
        rest=each(_stand_still) if rests else _nothing,
    )


def _stand_still(stack: Stack) -> None:
    for engine in (*stack.prefill, *stack.decode):
        engine.stop()


def _go_on(stack: Stack) -> None:
    for engine in (*stack.prefill, *stack.decode):
        engine.cont()


@contextmanager
def deployed(machine: Machine, legs: Sequence[str], say: Callable[[str], None]) -> Iterator[list[Side]]:
    """The legs, each ready, in the order asked for. Raises `UserError` where something does not start."""
    if machine.sim is not None and UPSTREAM in legs:
        raise UserError("--sim has no engines with vLLM's own connector: leave out upstream")
    sides: dict[str, Side] = {}
    with ExitStack() as stacks:
        if {ONE_WAY, KVLOOP} & set(legs):
            say("starting the engines of " + " and ".join(leg for leg in (ONE_WAY, KVLOOP) if leg in legs))
            config = _config(machine, Connector.KVLOOP, machine.router_flags)
            pair = stacks.enter_context(_stack(machine, config, say))
            sides[KVLOOP] = _side(KVLOOP, pair, pair.router)
            if ONE_WAY in legs:
                one_way = pair.add_router(ONE_WAY, ("--return", "off", *PATIENT))
                sides[ONE_WAY] = _side(ONE_WAY, pair, one_way)
        if UPSTREAM in legs:
            say("starting the engines of upstream")
            theirs = stacks.enter_context(_stack(machine, _config(machine, Connector.UPSTREAM), say))
            sides[UPSTREAM] = _side(UPSTREAM, theirs, theirs.router, rests=True)
            sides[UPSTREAM].rest()
        if AGGREGATED in legs:
            say("starting the aggregated engine")
            alone = stacks.enter_context(_stack(machine, _aggregated(machine), say))
            sides[AGGREGATED] = _side(AGGREGATED, alone, None)
        try:
            yield [sides[name] for name in legs]
        finally:
            for side in sides.values():
                side.wake()  # what stands still cannot end in good order
