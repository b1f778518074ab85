"""Recorded sessions at full size in a whole simulated fleet, under three ways to keep leases.

What `lease_replay` does over `core` alone, this does with everything around it: engines with queues, steps
and block pools, transfers that take their time, claims over a control channel, and the router's own turn
machine. Nothing goes wrong. Prefill's own prefix cache is off, as if other work had evicted it, so that what
is reused is what came back from decode. Times are about those of Qwen3-32B on eight H200 (`sim/profiles`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvloop.bench.held import JUDGED_TOKENS, held_row, ratio, reuse_row
from kvloop.bench.lease_replay import Policy
from kvloop.bench.report import Row
from kvloop.bench.run import say
from kvloop.core.lease import LeaseState
from kvloop.local.fleet_turns import RouterTurn
from kvloop.sim.fleet.plan import AS_DELIVERED, MS, Plan, S
from kvloop.sim.fleet.players import SPARE_TOKENS
from kvloop.sim.fleet.recorded import RecordedSession, longest_tokens
from kvloop.sim.fleet.world import World

BLOCK_TOKENS = 512
PREFILL_TOKENS = 4_000_000
START_WITHIN_MS = 3_600_000
SEED = 1
QUICK_SESSIONS = 10
DECODE_ENGINES = 4
MEMORIES_TOKENS = (JUDGED_TOKENS, 16_000_000)
"""Of all decode engines together."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a run came to. `held_token_s` counts a block once for every lease that holds it."""

    turns: int
    turns_returning: int
    returned_tokens: int
    held_token_s: float
    reclaimed: int
    revived: int
    preempted: int

    @property
    def held_per_reused(self) -> float:
        """Token-seconds held for each token read back."""
        return ratio(self.held_token_s, self.returned_tokens)

    @property
    def share_returning(self) -> float:
        """Turns that read something back, of all."""
        return ratio(self.turns_returning, self.turns)


def measure(sessions: Sequence[RecordedSession], *, is_quick: bool) -> list[Row]:
    """Each memory's rows: adaptive leases against both kinds of fixed ones."""
    rows: list[Row] = []
    sessions = sessions[:QUICK_SESSIONS] if is_quick else sessions
    for tokens in MEMORIES_TOKENS[:1] if is_quick else MEMORIES_TOKENS:
        came_to: dict[Policy, Held] = {}
        for policy in Policy:
            say(f"{len(sessions)} sessions, {DECODE_ENGINES} engines, {tokens:,} tokens of memory, {policy}")
            came_to[policy] = run(sessions, plan_of(sessions, policy, DECODE_ENGINES, tokens))
        for policy in (Policy.FIXED, Policy.UPSTREAM):
            rows += compared(came_to[Policy.ADAPTIVE], came_to[policy], policy, tokens)
    return rows


def compared(ours: Held, theirs: Held, policy: Policy, tokens: int) -> list[Row]:
    """Two ways on the same traffic. Only one memory is judged."""
    against = f"adaptive / {policy}, fleet, {tokens // 1_000_000}M tokens of memory"
    judged = tokens == JUDGED_TOKENS
    return [
        held_row(
            against,
            ours.held_per_reused,
            theirs.held_per_reused,
            f"{ours.held_per_reused:.1f} against {theirs.held_per_reused:.1f} token-seconds",
            judged=judged,
        ),
        reuse_row(
            f"turns that reuse, {against}",
            ours.share_returning,
            theirs.share_returning,
            f"{ours.turns_returning} of {ours.turns} turns against {theirs.turns_returning} of "
            f"{theirs.turns}; reclaimed {ours.reclaimed} and {theirs.reclaimed} leases",
            judged=judged,
        ),
        reuse_row(
            f"tokens reused, {against}",
            ours.returned_tokens,
            theirs.returned_tokens,
            f"{ours.returned_tokens:,} against {theirs.returned_tokens:,}",
            judged=False,
        ),
    ]


def plan_of(sessions: Sequence[RecordedSession], policy: Policy, decode: int, decode_tokens: int) -> Plan:
    """Two prefill engines, and so many decode engines that share `decode_tokens` of memory."""
    return replace(
        AS_DELIVERED,
        seed=SEED,
        prefill=2,
        decode=decode,
        block_tokens=BLOCK_TOKENS,
        prefill_blocks=PREFILL_TOKENS // BLOCK_TOKENS,
        decode_blocks=decode_tokens // decode // BLOCK_TOKENS,
        batch_tokens=8192,
        running=64,
        prefix_cache=False,
        token_us=16,
        step_us=4000,
        setup_us=1000,
        block_us=4500,
        max_leases=100_000,
        lease_term_ms=AS_DELIVERED.lease_ttl_ms if policy is Policy.UPSTREAM else AS_DELIVERED.lease_term_ms,
        fixed_leases=policy is not Policy.ADAPTIVE,
        pinned_leases=policy is Policy.UPSTREAM,
        conversations=len(sessions),
        tenants=1,
        arrive_ms=max(1, START_WITHIN_MS // len(sessions)),
        leaves=0,
        hostile=0,
        wishes=0,
        model_tokens=longest_tokens(sessions) + SPARE_TOKENS,
    )


def run(sessions: Sequence[RecordedSession], plan: Plan) -> Held:
    """Play everything, and let the last lease end."""
    world = World(plan, RouterTurn, checkers=(), traced=False, sessions=sessions)
    people, step = world.people, world.loop.step
    people.open_the_doors()
    while step() and not people.are_through:
        pass
    world.loop.run(world.loop.now_ns + 2 * plan.lease_ttl_ms * MS)
    engines = [node.engine for node in world.around.engines.values() if node.engine is not None]
    tables = [engine.leases.table for engine in engines]
    now_ns = [node.now_ns() for node in world.around.engines.values()]
    held = sum(table.held_block_ns(now) for table, now in zip(tables, now_ns, strict=True))
    return Held(
        people.turns,
        people.turns_returning,
        people.returned_tokens,
        held * plan.block_tokens / S,
        sum(table.counts()[LeaseState.RECLAIMED] for table in tables),
        sum(engine.leases.revived for engine in engines),
        sum(engine.counters.get("preemptions", 0) for engine in engines),
    )
