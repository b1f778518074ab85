"""One way to serve the traffic, and the simulated fleet that it makes.

All ways have the same engines behind the same router, which sends a turn where it expects the first token
soonest and knows where the conversation was before. They differ in what decode keeps:

    one-way     nothing, and nothing is read back; prefill's own prefix cache still helps
    upstream    every turn's blocks for a fixed time, whether a later turn has taken its place or not
    kvloop      the last turn's, for as long as a return is worth the memory, or for a fixed time; and turns
                with little new go to the decode engine alone
"""

from dataclasses import dataclass, replace
from enum import StrEnum

import msgspec

from kvloop.bench.planning.traffic import S_PER_HOUR, Traffic
from kvloop.core.decision import AppendLimits
from kvloop.errors import UserError
from kvloop.sim.fleet.filing import MODEL
from kvloop.sim.fleet.plan import AS_DELIVERED, Plan
from kvloop.sim.profile import Profile

MS_PER_S = 1000
DEFAULT_THRESHOLD_TOKENS = AS_DELIVERED.threshold_tokens
UPSTREAM_TTL_S = 480
"""vLLM's own `decoder_kv_blocks_ttl`."""
UNLIMITED_PERMILLE = 1_000_000  # of a pool: upstream has no bound on what it keeps
LATENCY_US = 100  # from machine to machine, at least
MAX_ENGINES = 64


class Way(StrEnum):
    """What becomes of KV when a turn has ended."""

    ONE_WAY = "one-way"
    UPSTREAM = "upstream"
    KVLOOP = "kvloop"


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A way with its settings. `ttl_s` None: adaptive leases."""

    way: Way
    prefill: int
    decode: int
    threshold_tokens: int = DEFAULT_THRESHOLD_TOKENS
    ttl_s: int | None = None

    @property
    def ratio(self) -> str:
        """Prefill and decode engines, in a word."""
        return f"{self.prefill}:{self.decode}"

    def __str__(self) -> str:
        """For a line of progress."""
        if self.way is Way.ONE_WAY:
            return f"{self.way}, {self.ratio}"
        return f"{self.way}, {self.ratio}, leases {self.leases}, threshold {self.threshold_tokens}"

    @property
    def leases(self) -> str:
        """How long decode keeps a turn, in words."""
        if self.way is Way.ONE_WAY:
            return "none"
        return "adaptive" if self.ttl_s is None else f"{self.ttl_s} s"


def one_way(prefill: int, decode: int) -> Arrangement:
    """Nothing comes back."""
    return Arrangement(Way.ONE_WAY, prefill, decode)


def upstream(prefill: int, decode: int) -> Arrangement:
    """vLLM's bidirectional transfer as it is delivered."""
    return Arrangement(Way.UPSTREAM, prefill, decode, ttl_s=UPSTREAM_TTL_S)


def kvloop(prefill: int, decode: int) -> Arrangement:
    """kvloop as it is delivered."""
    return Arrangement(Way.KVLOOP, prefill, decode)


def engine_of(profile: Profile) -> Profile:
    """The engine under the name that the fleet's routers and clients know."""
    return msgspec.structs.replace(profile, model=MODEL)


def require_room(traffic: Traffic, profile: Profile, name: str) -> None:
    """UserError where an engine takes no request as long as the longest."""
    most, longest = profile.limits.model_tokens, traffic.longest_tokens
    if longest > most:
        scale = traffic.asked.scale * longest / most
        raise UserError(
            f"the longest prompt and its answer are {longest:,} tokens, and an engine of {name} takes "
            f"{most:,}: divide all lengths by --scale {scale + 0.05:.1f}, or end conversations by "
            "--max-prompt-tokens"
        )


def plan_of(
    arrangement: Arrangement, traffic: Traffic, profile: Profile, *, prefill_cache: bool, seed: int
) -> Plan:
    """The fleet. Its engines' times and sizes are the profile's; what stands here of them is as there."""
    limits = profile.limits
    plan = replace(
        AS_DELIVERED,
        seed=seed,
        prefill=arrangement.prefill,
        decode=arrangement.decode,
        block_tokens=limits.block_tokens,
        prefill_blocks=limits.blocks,
        decode_blocks=limits.blocks,
        model_tokens=limits.model_tokens,
        prefix_cache=prefill_cache,
        threshold_tokens=arrangement.threshold_tokens,
        latency_us=LATENCY_US,
        max_leases=100_000,
        policy="kv",
        conversations=len(traffic.sessions),
        tenants=1,
        arrive_ms=max(1, round(S_PER_HOUR * MS_PER_S / traffic.per_hour)),
        leaves=0,
        hostile=0,
        wishes=0,
    )
    match arrangement.way:
        case Way.ONE_WAY:
            return replace(plan, returns=False)
        case Way.UPSTREAM:
            ttl_ms = (arrangement.ttl_s or UPSTREAM_TTL_S) * MS_PER_S
            return replace(
                plan,
                fixed_leases=True,
                pinned_leases=True,
                max_retained=UNLIMITED_PERMILLE,
                lease_term_ms=ttl_ms,
                lease_ttl_ms=ttl_ms,
            )
    plan = replace(plan, append_tokens=AppendLimits().turn_tokens)
    if arrangement.ttl_s is None:
        return plan
    ttl_ms = arrangement.ttl_s * MS_PER_S
    return replace(
        plan, fixed_leases=True, lease_ttl_ms=ttl_ms, lease_term_ms=min(plan.lease_term_ms, ttl_ms)
    )
