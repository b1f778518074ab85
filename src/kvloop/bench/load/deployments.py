"""The deployments that `kvloop bench --compare` starts, side by side on one machine.

    one-way      the engines of the kvloop leg, behind a router that returns nothing
    upstream     vLLM's own bidirectional connector, on engines of its own
    kvloop       as delivered
    return       the same engines, behind a router that reads back whatever there is (`--policy sticky`)
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

ONE_WAY, UPSTREAM, KVLOOP, RETURN, AGGREGATED = "one-way", "upstream", "kvloop", "return", "aggregated"
LEGS = (ONE_WAY, UPSTREAM, KVLOOP, RETURN, AGGREGATED)
PATIENT = ("--prefill-timeout-s", "600")
"""A router's flags: a long prompt on a slow core is to be measured, not given up."""
_BESIDE = MappingProxyType({ONE_WAY: ("--return", "off"), RETURN: ("--policy", "sticky")})
"""Routers in front of the kvloop leg's engines, with their flags."""
_CACHE_OFF = "--no-enable-prefix-caching"
_DESCRIPTIONS = MappingProxyType(
    {
        ONE_WAY: "prefill and decode, KV from prefill to decode only",
        UPSTREAM: "prefill and decode with vLLM's own bidirectional NixlConnector",
        KVLOOP: "prefill and decode with kvloop",
        RETURN: "the same, every later turn read back by prefill",
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


def _side(
    name: str, stack: Stack, router: Router | None, *, rests: bool = False, is_sampled: bool = True
) -> Side:
    """`is_sampled`: what these engines hold is this leg's, and no other's."""
    engines = [*stack.prefill, *stack.decode]
    url = stack.url if router is None else router.url
    watch = Watch(
        engines=[engine.url for engine in engines],
        holders=[engine.url for engine in stack.decode] if is_sampled else [],
        pids=[one.pid for one in (*engines, *([] if router is None else [router]))],
    )

    def each(signal: Callable[[Stack], None]) -> Callable[[], None]:
        return lambda: signal(stack)

    return Side(
        Leg(name, _DESCRIPTIONS[name], url),
        watch,
        admin_url=router.admin_url if router is not None and name in (KVLOOP, RETURN, ONE_WAY) else None,
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
        if shared := [leg for leg in (KVLOOP, RETURN, ONE_WAY) if leg in legs]:
            say("starting the engines of " + " and ".join(shared))
            config = _config(machine, Connector.KVLOOP, machine.router_flags)
            pair = stacks.enter_context(_stack(machine, config, say))
            keeps_alone = not {KVLOOP, RETURN} <= set(legs)
            sides[KVLOOP] = _side(KVLOOP, pair, pair.router, is_sampled=keeps_alone)
            for name, flags in _BESIDE.items():
                if name in legs:
                    router = pair.add_router(name, (*flags, *PATIENT))
                    is_sampled = keeps_alone and name == RETURN
                    sides[name] = _side(name, pair, router, is_sampled=is_sampled)
        if UPSTREAM in legs:
            say("starting the engines of upstream")
            config = _config(machine, Connector.UPSTREAM, _BESIDE[RETURN])
            theirs = stacks.enter_context(_stack(machine, config, say))
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
