"""What one seed stands for: the size of a fleet, its limits, its traffic, and how much goes wrong.

Most seeds are small and nasty: a few engines with little memory, terms of seconds, transfers that take longer
than a claim lasts. That is where rules meet their edges; large fleets are for growth, not for bugs.
"""

from dataclasses import dataclass, fields
from typing import Any

from kvloop.sim.fleet.chance import Chance

MS = 1_000_000
S = 1_000 * MS


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that was drawn. Durations in ms are virtual; chances are permille."""

    seed: int
    prefill: int = 1
    decode: int = 1
    routers: int = 1
    # engines
    block_tokens: int = 16
    prefill_blocks: int = 96
    decode_blocks: int = 96
    batch_tokens: int = 256
    running: int = 8
    prefix_cache: bool = True
    bulk_steps: int = 64
    token_us: int = 50
    step_us: int = 2000
    setup_us: int = 2000
    block_us: int = 100
    threshold_tokens: int = 64
    max_retained: int = 900
    max_leases: int = 10_000
    max_claims: int = 1000
    # terms
    lease_term_ms: int = 3000
    lease_ttl_ms: int = 12_000
    renew_ms: int = 1000
    claim_timeout_ms: int = 200
    claim_term_ms: int = 800
    claim_margin_ms: int = 100
    policy: str = "sticky"
    append_tokens: int = 0  # of a turn, that decode may compute by itself
    fixed_leases: bool = False
    pinned_leases: bool = False  # as upstream: nobody renews, supersedes or revives a lease
    returns: bool = True  # False: nothing is kept for a next turn, and nothing read back
    break_even_parts: int = 4  # the TTL is so many break-even times
    # traffic
    conversations: int = 12
    tenants: int = 2
    turns: int = 5
    prompt_tokens: int = 200
    message_tokens: int = 60
    answer_tokens: int = 40
    think_ms: int = 1500
    arrive_ms: int = 1500
    odd_histories: int = 250
    leaves: int = 30
    hostile: int = 50
    wishes: int = 60  # turns for which the client says how long they are to be kept
    confused: int = 0  # turns for which a router offers somebody else's handle
    model_tokens: int = 1024
    # network
    latency_us: int = 500
    loss: int = 0
    duplicate: int = 0
    reorder: int = 0
    sealed: bool = True
    slow_reads: int = 0
    # faults, mean ms between two of a kind; 0: never
    crash_ms: int = 0
    stop_ms: int = 0
    cut_ms: int = 0
    router_crash_ms: int = 0
    wall_step_ms: int = 0
    reset_ms: int = 0
    clock_ppm: int = 0
    # how long it goes wrong, how long it takes to calm down, and how long it then has to be well
    safety_ms: int = 20_000
    settle_ms: int = 12_000
    calm_ms: int = 5000

    def lines(self) -> list[str]:
        """Every option, one a line."""
        return [f"{field.name} = {getattr(self, field.name)}" for field in fields(self)]


AS_DELIVERED = Plan(
    seed=0,
    lease_term_ms=60_000,
    lease_ttl_ms=480_000,
    renew_ms=20_000,
    claim_timeout_ms=1000,
    claim_term_ms=5000,
    break_even_parts=24,
    sealed=False,
)
"""The terms that the connector and the router have by default; frames go unsealed, which saves time only."""


_POLICIES = ("sticky", "sticky", "sticky", "least-loaded", "round-robin", "kv", "kv")
"""Those that read back whatever there is come up more often: most promises are about reading back."""


def draw(seed: int) -> Plan:
    """The plan of a seed."""
    chance = Chance(seed, "plan")
    choice = Chance(seed, "choice")
    return Plan(
        seed=seed,
        policy=choice.pick(_POLICIES),
        append_tokens=choice.pick((0, 64, 256)),
        **_sizes(chance),
        **_terms(chance),
        **_traffic(chance),
        **_faults(chance),
    )


def _sizes(chance: Chance) -> dict[str, Any]:
    """How many engines, how large, how fast; and how long what they are asked is."""
    prompt, turns = chance.pick((70, 130, 200, 320)), chance.within(2, 6)
    message, answer = chance.pick((10, 40, 70)), chance.pick((5, 20, 40))
    longest = prompt + (turns + 1) * (message + answer) + 64
    block_tokens = chance.pick((16, 16, 32, 128))
    blocks = -(-longest // block_tokens)  # an engine holds one request at least, and few at most
    return {
        "prefill": chance.within(1, 3),
        "decode": chance.within(1, 3),
        "routers": chance.pick((1, 1, 2)),
        "block_tokens": block_tokens,
        "prefill_blocks": blocks * chance.within(1, 4),
        "decode_blocks": blocks * chance.within(1, 4),
        "batch_tokens": chance.pick((64, 256, 2048)),
        "running": chance.pick((2, 8, 64)),
        "prefix_cache": chance.permille(500),
        "bulk_steps": chance.pick((1, 64)),
        "token_us": chance.spread(5, 500),
        "step_us": chance.spread(100, 10_000),
        "setup_us": chance.spread(100, 100_000),
        "block_us": chance.spread(10, 10_000),
        "threshold_tokens": chance.pick((0, 64, 64, 128)),
        "max_retained": chance.pick((900, 900, 1000, 400)),
        "max_leases": chance.pick((10_000, 10_000, 3)),
        "max_claims": chance.pick((1000, 1000, 1)),
        "turns": turns,
        "prompt_tokens": prompt,
        "message_tokens": message,
        "answer_tokens": answer,
        "model_tokens": longest,
    }


def _terms(chance: Chance) -> dict[str, Any]:
    """How long leases and claims last."""
    ttl_ms = chance.spread(4000, 30_000)
    term_ms = min(ttl_ms, chance.spread(1500, 8000))
    claim_ms = chance.spread(300, 1500)
    return {
        "lease_term_ms": term_ms,
        "lease_ttl_ms": ttl_ms,
        "renew_ms": max(200, term_ms // 3),
        "claim_timeout_ms": chance.spread(20, claim_ms),
        "claim_term_ms": claim_ms,
        "claim_margin_ms": max(10, claim_ms // 10),
        "fixed_leases": chance.permille(200),
    }


def _traffic(chance: Chance) -> dict[str, Any]:
    """Who comes, how often, and how odd they are."""
    return {
        "conversations": chance.within(6, 24),
        "tenants": chance.within(1, 3),
        "think_ms": chance.spread(100, 6000),
        "arrive_ms": chance.spread(50, 1500),
        "odd_histories": chance.pick((100, 300, 600)),
        "leaves": chance.pick((0, 30, 100)),
        "hostile": chance.pick((0, 50, 200)),
        "confused": chance.pick((0, 0, 100)),
    }


def _faults(chance: Chance) -> dict[str, Any]:
    """What goes wrong. Each kind in some seeds only, so that every seed has another mix."""

    def sometimes(permille: int, low: int, high: int) -> int:
        return chance.spread(low, high) if chance.permille(permille) else 0

    return {
        "latency_us": chance.spread(50, 5000),
        "loss": sometimes(400, 5, 300),
        "duplicate": sometimes(300, 5, 200),
        "reorder": sometimes(300, 50, 400),
        "slow_reads": sometimes(500, 100, 600),
        "crash_ms": sometimes(400, 3000, 30_000),
        "stop_ms": sometimes(400, 2000, 20_000),
        "cut_ms": sometimes(400, 2000, 20_000),
        "router_crash_ms": sometimes(250, 4000, 30_000),
        "wall_step_ms": sometimes(150, 4000, 20_000),
        "reset_ms": sometimes(150, 4000, 20_000),
        "clock_ppm": sometimes(600, 10_000, 80_000),
        "safety_ms": chance.spread(8000, 30_000),
    }
