"""One run: a fleet out of a seed, a time in which things go wrong, a time in which they may not, and an end.

    safety      clients come and go, faults happen; every promise is looked at all the time
    liveness    no faults: after a moment nobody is refused any more, and whoever waits gets his answer
    drained     nobody asks, terms have passed: every block is home, nobody remembers anything

What is found is a `ViolationError`, or whatever the code under test raised.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvloop.sim.config import EngineConfig
from kvloop.sim.fleet.around import Around
from kvloop.sim.fleet.census import Census
from kvloop.sim.fleet.chance import Chance
from kvloop.sim.fleet.checkers import ALL
from kvloop.sim.fleet.clocks import Clocks
from kvloop.sim.fleet.faults import Faults
from kvloop.sim.fleet.filing import MODEL
from kvloop.sim.fleet.network import Network
from kvloop.sim.fleet.node import EngineNode
from kvloop.sim.fleet.people import People, Turn
from kvloop.sim.fleet.plan import MS, Plan, S
from kvloop.sim.fleet.players import Players
from kvloop.sim.fleet.recorded import RecordedSession
from kvloop.sim.fleet.router import PREFILL_TIMEOUT_NS, RouterNode
from kvloop.sim.fleet.trace import KEPT_LINES, Trace
from kvloop.sim.fleet.turns import MakeTurn
from kvloop.sim.fleet.watch import Checker, ViolationError
from kvloop.sim.loop import Loop
from kvloop.sim.profile import Frontend, Limits, Profile, Step, Transfer

KEY = bytes(range(32))
WARM_NS = 3600 * S  # monotonic clocks began up to an hour ago
MAX_EVENTS_PER_MS = 20_000  # of virtual time: beyond, something goes round in circles


@dataclass(slots=True)
class Outcome:
    """What came of a run. `finding`: what was not as promised, None if everything was."""

    plan: Plan
    finding: Exception | None
    turns: int
    conversations: int
    events: int
    faults: int
    returned_tokens: int
    virtual_ns: int
    trace: Trace
    where: str = ""
    first_token_ns: Sequence[int] = ()
    census: Counter[str] = field(default_factory=Counter)

    @property
    def held(self) -> bool:
        """Whether every checker held."""
        return self.finding is None

    @property
    def name(self) -> str:
        """The checker that found something, or the exception's kind; empty if nothing was found."""
        if isinstance(self.finding, ViolationError):
            return self.finding.checker
        return "" if self.finding is None else type(self.finding).__name__


class World:
    """One run. `checkers` None: all of them. `profile`: every engine's, in place of what the plan says.

    `sessions`: what clients play, in place of what they would make up.
    """

    def __init__(
        self,
        plan: Plan,
        make_turn: MakeTurn,
        *,
        checkers: Sequence[type[Checker]] | None = None,
        profile: Profile | None = None,
        traced: bool = True,
        kept_lines: int = KEPT_LINES,
        sessions: Sequence[RecordedSession] = (),
    ) -> None:
        self.plan = plan
        self.loop = Loop()
        self.trace = Trace(is_on=traced, kept_lines=kept_lines)
        self.finding: Exception | None = None
        self.where = ""
        self.is_calm = False  # faults are over, and what they left has had time to mend
        network = Network(self.loop, plan, Chance(plan.seed, "network"))
        self.census = Census()
        made = [checker() for checker in (ALL if checkers is None else checkers)]
        if made:
            made.append(self.census)
        self.around = Around(self.loop, network, self.trace, made, KEY, plan.sealed, self._failed)
        clocks = Chance(plan.seed, "clocks")
        shapes = {"p": profile_of(plan, plan.prefill_blocks), "d": profile_of(plan, plan.decode_blocks)}
        for role, count in (("p", plan.prefill), ("d", plan.decode)):
            for number in range(count):
                config = config_of(plan, f"{role}{number}")
                node = EngineNode(self.around, config, profile or shapes[role], clocks_of(plan, clocks))
                self.around.engines[node.name] = node
        self.routers = [
            RouterNode(self.around, f"r{number}", plan, make_turn, clocks_of(plan, clocks))
            for number in range(plan.routers)
        ]
        parties = (self.around, plan, self.routers, Chance(plan.seed, "people"), self._tell)
        self.people = Players(*parties, sessions) if sessions else People(*parties)
        self.faults = Faults(self.around, plan, self.routers, Chance(plan.seed, "faults"))

    def run(self) -> Outcome:
        """Let it happen."""
        try:
            for checker in self.around.checkers:
                checker.begin(self)
            self.people.open_the_doors()
            self.faults.begin()
            self._pass(self.plan.safety_ms * MS)
            self.faults.end()
            self._pass(self.loop.now_ns + self.plan.settle_ms * MS)
            self.is_calm = True
            self._pass(self.loop.now_ns + self.plan.calm_ms * MS)
            self.people.close_the_doors()
            self._pass_until_answered()
            self._pass(self.loop.now_ns + self._everything_ends_ns())
            for router in self.routers:
                router.filing.lineage.expire(router.now_ns())
            for checker in self.around.checkers:
                checker.drained(self)
        except ViolationError as violation:
            self.finding = violation
        except _FoundError:
            pass
        return self._outcome()

    def _outcome(self) -> Outcome:
        people = self.people
        return Outcome(
            plan=self.plan,
            finding=self.finding,
            turns=people.turns,
            conversations=people.begun,
            events=self.trace.count,
            faults=self.faults.count,
            returned_tokens=people.returned_tokens,
            virtual_ns=self.loop.now_ns,
            trace=self.trace,
            where=self.where,
            first_token_ns=people.first_token_ns,
            census=self.census.counts,
        )

    def _pass(self, until_ns: int) -> None:
        """Let everything up to then happen."""
        loop = self.loop
        allowed = MAX_EVENTS_PER_MS * ((until_ns - loop.now_ns) // MS + 1)
        while (next_ns := loop.next_ns()) is not None and next_ns <= until_ns:
            loop.step()
            allowed -= 1
            if not allowed:
                raise ViolationError("Progress", "the same things happen over and over")
        loop.run(until_ns)

    def _pass_until_answered(self) -> None:
        deadline_ns = self.loop.now_ns + 2 * PREFILL_TIMEOUT_NS + 30 * S
        while self.people.open and self.loop.now_ns < deadline_ns and len(self.loop):
            self._pass(self.loop.now_ns + 100 * MS)

    def _everything_ends_ns(self) -> int:
        """After so long without requests no lease, claim, handover or memory of them is left.

        A slow clock takes longer, an aborted read may have been slow, and the last of a router's leases was
        filed at the end.
        """
        plan = self.plan
        longest_ms = (
            2 * plan.lease_ttl_ms + 4 * plan.claim_term_ms + plan.claim_timeout_ms + 2 * plan.renew_ms
        )
        return longest_ms * MS * 11 // 10 + 20 * S

    def _tell(self, what: str, turn: Turn, data: bytes, why: str) -> None:
        self.around.note("client", what, turn.name, why or data[:12].hex())
        for checker in self.around.checkers:
            if what == "answered":
                checker.answered(turn, data)
            elif what == "delivered":
                checker.delivered(turn, data)
            elif what == "smuggled":
                checker.smuggled(turn)
            elif what == "refused":
                checker.refused(turn, why)

    def _failed(self, who: str, error: Exception) -> None:
        self.finding, self.where = error, who
        raise _FoundError from error


class _FoundError(Exception):
    """The code under test raised something: the run is over."""


def profile_of(plan: Plan, blocks: int) -> Profile:
    """An engine's timing and size."""
    limits = Limits(plan.block_tokens, blocks, plan.batch_tokens, plan.running, plan.model_tokens)
    step = Step(plan.step_us * 1000, 0, plan.token_us * 1000, 0)
    transfer = Transfer(plan.setup_us * 1000, plan.block_us * 1000, 0)
    return Profile("drawn", MODEL, 0, limits, Frontend(0, 0), step, transfer)


def config_of(plan: Plan, name: str) -> EngineConfig:
    """An engine's settings."""
    is_prefill = name.startswith("p")
    return EngineConfig(
        engine_id=name,
        incarnation="",
        key=KEY,
        control=(name, 1),
        side_channel=(name, 2),
        reads=is_prefill and plan.returns,
        retains=not is_prefill,
        prefix_cache=plan.prefix_cache or not is_prefill,
        recompute_threshold_tokens=plan.threshold_tokens,
        lease_term_ns=plan.lease_term_ms * MS if plan.returns else 1,
        lease_ttl_ns=plan.lease_ttl_ms * MS,
        claim_timeout_ns=plan.claim_timeout_ms * MS,
        claim_term_ns=plan.claim_term_ms * MS,
        claim_margin_ns=plan.claim_margin_ms * MS,
        handover_ns=plan.lease_ttl_ms * MS,
        max_retained_permille=plan.max_retained,
        max_leases=plan.max_leases,
        max_claims=plan.max_claims,
        max_bulk_steps=plan.bulk_steps,
        revives=not plan.pinned_leases,
    )


def clocks_of(plan: Plan, chance: Chance) -> Clocks:
    """A machine's clocks: begun some time ago, and as slow as the plan allows."""
    return Clocks(chance.within(0, WARM_NS), chance.within(0, plan.clock_ppm) if plan.clock_ppm else 0)
