"""One arrangement under the traffic, in virtual time, and what came of it.

Figures about time (memory held on average, prefill's share of busy time) are of the time in which there is
traffic: from the beginning until every conversation has begun and nine tenths of the turns are answered. The
last conversations of a recording can go on for hours, alone, and would make everything look idle.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from kvloop.bench.load.spread import quantile
from kvloop.bench.planning.arrangement import Arrangement, engine_of, plan_of
from kvloop.bench.planning.looks import Look, Looks
from kvloop.bench.planning.traffic import Traffic
from kvloop.core.lease import LeaseState
from kvloop.local.fleet_turns import RouterTurn
from kvloop.sim.fleet.people import Turn
from kvloop.sim.fleet.router import Reply
from kvloop.sim.fleet.world import World
from kvloop.sim.profile import Profile
from kvloop.sim.text import TOKEN_BYTES

NS_PER_S = 1e9
NS_PER_MS = 1e6
TRAFFIC_SHARE = 0.9
TURN_EVENTS, ANSWER_TOKEN_EVENTS, SPARE_EVENTS = 400, 4, 100_000
"""A turn takes some twenty events, and a token of its answer one at most, unless turns are tried over and
over by engines that can never keep up."""


@dataclass(slots=True)
class Tokens:
    """Where the prompts' tokens came from, by the accounts that turns had from their engines; and how long
    the answers took after their first tokens, all together."""

    prompt: int = 0
    returned: int = 0
    at_decode: int = 0
    at_prefill: int = 0
    computed_by_prefill: int = 0
    computed_by_decode: int = 0
    returning_turns: int = 0
    appended_turns: int = 0
    unaccounted_turns: int = 0
    answer: int = 0
    answering_ns: int = 0

    def hear(self, turn: Turn, reply: Reply, now_ns: int) -> None:
        """A turn was answered."""
        if reply.first_ns:
            self.answer += len(reply.data) // TOKEN_BYTES - 1
            self.answering_ns += now_ns - reply.first_ns
        tokens = len(turn.ask.text)
        self.prompt += tokens
        if reply.turn is not None:
            returned, local = _number(reply.turn, "returned_tokens"), _number(reply.turn, "local_tokens")
            self.returned += returned
            self.at_prefill += local
            self.computed_by_prefill += tokens - returned - local
            self.returning_turns += returned > 0
        elif reply.decoded is not None:
            local = _number(reply.decoded, "local_tokens")
            self.at_decode += local
            self.computed_by_decode += tokens - local
            self.appended_turns += 1
        else:
            self.computed_by_decode += tokens
            self.unaccounted_turns += 1


@dataclass(frozen=True, slots=True)
class Came:
    """What an arrangement came to. Times are of the first token, in milliseconds, None where no turn was
    answered. `busy_share`: of the time of all prefill engines, that in which they computed. `open`:
    conversations that had begun and were not over, on average. Memory is in tokens, of all decode engines.
    `is_through`: every turn was answered.
    """

    arrangement: Arrangement
    turns: int
    tokens: Tokens
    median_ms: float | None
    p90_ms: float | None
    p99_ms: float | None
    prefill_busy_s: float
    busy_share: float
    open: float
    held_tokens: float
    most_held_tokens: int
    room_tokens: int
    reclaimed: int
    preempted: int
    lasted_s: float
    is_through: bool

    @property
    def reused_share(self) -> float:
        """Of the prompts' tokens, those that nobody computed again."""
        tokens = self.tokens
        return self.share_of(tokens.returned + tokens.at_decode + tokens.at_prefill)

    @property
    def per_token_ms(self) -> float | None:
        """Of an answer after its first token, on average; None where no answer had a second one."""
        tokens = self.tokens
        return tokens.answering_ns / NS_PER_MS / tokens.answer if tokens.answer else None

    def share_of(self, tokens: int) -> float:
        """Of all prompts' tokens; 0 where there were none."""
        return tokens / self.tokens.prompt if self.tokens.prompt else 0.0


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs that were made so far, and what all of them have in common."""

    traffic: Traffic
    profile: Profile
    prefill_cache: bool = True
    seed: int = 1
    played: dict[Arrangement, Came] = field(default_factory=dict)

    def play(self, arrangement: Arrangement) -> Came:
        """What it comes to; what was played before is not played again."""
        came = self.played.get(arrangement)
        if came is None:
            came = self.played[arrangement] = self._play(arrangement)
        return came

    def _play(self, arrangement: Arrangement) -> Came:
        traffic = self.traffic
        plan = plan_of(arrangement, traffic, self.profile, prefill_cache=self.prefill_cache, seed=self.seed)
        world = World(
            plan,
            RouterTurn,
            checkers=(),
            traced=False,
            sessions=traffic.sessions,
            profile=engine_of(self.profile),
        )
        tokens, people, step = Tokens(), world.people, world.loop.step
        people.hears = lambda turn, reply: tokens.hear(turn, reply, world.loop.now_ns)
        people.open_the_doors()
        looks = Looks(world)
        left = SPARE_EVENTS + TURN_EVENTS * traffic.turns + ANSWER_TOKEN_EVENTS * traffic.answer_tokens
        while left and not people.are_through and step():
            left -= 1
        return _came(arrangement, world, tokens, looks, self.profile)


def _came(arrangement: Arrangement, world: World, tokens: Tokens, looks: Looks, profile: Profile) -> Came:
    people, block_tokens = world.people, profile.limits.block_tokens
    engines = [node.engine for node in world.around.engines.values() if node.engine is not None]
    ends = looks.now()
    while_busy = with_traffic([*looks.seen, ends], people.turns)
    lasted_ns = while_busy[-1].at_ns
    first_ms = [taken / NS_PER_MS for taken in sorted(people.first_token_ns)]
    median, p90, p99 = (quantile(first_ms, part) if first_ms else None for part in (0.5, 0.9, 0.99))
    reclaimed = sum(engine.leases.table.counts()[LeaseState.RECLAIMED] for engine in engines)
    return Came(
        arrangement=arrangement,
        turns=people.turns,
        tokens=tokens,
        median_ms=median,
        p90_ms=p90,
        p99_ms=p99,
        prefill_busy_s=ends.prefill_busy_ns / NS_PER_S,
        busy_share=while_busy[-1].prefill_busy_ns / max(1, lasted_ns) / arrangement.prefill,
        open=mean_of(while_busy, lambda look: look.open),
        held_tokens=block_tokens * mean_of(while_busy, lambda look: look.held_blocks),
        most_held_tokens=block_tokens * max(looks.most_blocks, ends.held_blocks),
        room_tokens=block_tokens * profile.limits.blocks * arrangement.decode,
        reclaimed=reclaimed if world.plan.returns else 0,
        preempted=sum(engine.counters.get("preemptions", 0) for engine in engines),
        lasted_s=ends.at_ns / NS_PER_S,
        is_through=people.are_through,
    )


def with_traffic(looks: Sequence[Look], turns: int) -> Sequence[Look]:
    """Those up to the moment at which the traffic is as good as over; there is one at least."""
    for number, look in enumerate(looks, 1):
        if look.all_have_begun and look.answered >= TRAFFIC_SHARE * turns:
            return looks[:number]
    return looks


def mean_of(looks: Sequence[Look], told: Callable[[Look], int]) -> float:
    """A mean over time: what each look found is taken to last until the next one. Of no time, the last's."""
    lasted_ns = looks[-1].at_ns - looks[0].at_ns
    if not lasted_ns:
        return told(looks[-1])
    total = sum(told(early) * (late.at_ns - early.at_ns) for early, late in pairwise(looks))
    return total / lasted_ns


def _number(account: dict[str, object], name: str) -> int:
    return int(str(account[name]))
