"""After a soak: whether everything that a router and its engines hold for turns has come home."""

import asyncio
import time
from dataclasses import dataclass

from kvloop.bench.soak.exchange import Line, Manner
from kvloop.bench.soak.stack import POLL_S, Stack, total

OWN = 2  # connections with an engine for the router's own business: a probe, a reading of models
SETTLE_S = 15.0  # beyond the longest term: engines keep an idle connection for 5 s


@dataclass(frozen=True, slots=True)
class Held:
    """What is held: by the router (turns and leases, responses, hops under way, connections), and by engines.

    `idle`: connections with engines beyond those that probes and readings of models may have open.
    """

    in_flight: float
    conversations: float
    keys: float
    responses: float
    leases: float
    clients: int
    idle: int
    blocks: float
    unbalanced: float
    engine_leases: float
    running: float

    @property
    def is_nothing(self) -> bool:
        """Whether all of it is 0."""
        return not any(getattr(self, name) for name in self.__dataclass_fields__)


def held(stack: Stack) -> Held:
    """As it is now. `unbalanced`, blocks and leases are of all engines together."""
    conversations = stack.conversations()
    clients, with_engines = stack.connections()
    router = stack.samples()
    engines = [engine.samples() for engine in stack.engines]

    def over(name: str, **labels: str) -> float:
        return sum(total(samples, name, **labels) for samples in engines)

    return Held(
        in_flight=total(router, "kvloop_router_in_flight"),
        conversations=conversations,
        keys=total(router, "kvloop_router_turn_keys"),
        responses=total(router, "kvloop_router_responses"),
        leases=total(router, "kvloop_router_leases"),
        clients=clients,
        idle=max(0, with_engines - OWN * len(stack.engines)),
        blocks=over("vllm:kv_cache_usage_perc"),
        unbalanced=sum(abs(total(samples, "kvloop_unbalanced_blocks")) for samples in engines),
        engine_leases=over("kvloop_leases", state="granted") + over("kvloop_leases", state="claimed"),
        running=over("vllm:num_requests_running") + over("vllm:num_requests_waiting"),
    )


async def settled(stack: Stack, ttl_s: float) -> Held:
    """Wait until nothing is held, or it takes too long."""
    deadline_s = time.monotonic() + ttl_s + SETTLE_S
    while True:
        # What is kept of responses is looked through when somebody asks for one.
        line = Line(stack.port)
        await line.ask("/v1/responses", {}, _NOBODYS, Manner())
        line.close()
        await asyncio.sleep(POLL_S)
        now = held(stack)
        if now.is_nothing or time.monotonic() > deadline_s:
            return now


_NOBODYS = b'{"model":"soak","input":"x","previous_response_id":"nobody\'s"}'
