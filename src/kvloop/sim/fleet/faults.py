"""What goes wrong, when, and for how long: each kind of fault comes by itself, as often as the plan says.

Every fault ends: what was killed is started again, what was stopped goes on, what was cut is mended. When the
safety phase is over all of it is undone at once, and nothing more goes wrong.
"""

from collections.abc import Callable

from kvloop.sim.fleet.around import Around
from kvloop.sim.fleet.chance import Chance
from kvloop.sim.fleet.plan import MS, Plan
from kvloop.sim.fleet.router import RouterNode

SHORTEST_MS, LONGEST_MS = 20, 5000
WALL_STEPS_MS = (-60_000, -20_000, -1000, 1000, 20_000, 60_000)


class Faults:
    """The faults of one run."""

    def __init__(self, around: Around, plan: Plan, routers: list[RouterNode], chance: Chance) -> None:
        self.count = 0
        self._around = around
        self._plan = plan
        self._routers = routers
        self._chance = chance
        self._is_over = False

    def begin(self) -> None:
        """Let things go wrong from now on."""
        plan = self._plan
        for mean_ms, fault in (
            (plan.crash_ms, self._crash),
            (plan.stop_ms, self._stop),
            (plan.cut_ms, self._cut),
            (plan.router_crash_ms, self._crash_router),
            (plan.wall_step_ms, self._step_wall),
            (plan.reset_ms, self._reset),
        ):
            if mean_ms:
                self._plan_next(mean_ms, fault)

    def end(self) -> None:
        """Undo everything."""
        self._is_over = True
        self._around.note("faults", "are over")
        self._around.network.heal()
        for node in self._around.engines.values():
            node.clocks.wall_off_ms = 0
            if node.engine is None:
                node.start()
            node.resume()
        for router in self._routers:
            if not router.is_up:
                router.start()

    def _plan_next(self, mean_ms: int, fault: Callable[[], None]) -> None:
        def happen() -> None:
            if not self._is_over:
                self.count += 1
                fault()
                self._plan_next(mean_ms, fault)

        self._around.loop.after(self._chance.waiting(mean_ms * MS), happen)

    def _later(self, action: Callable[[], None]) -> None:
        self._around.loop.after(self._chance.spread(SHORTEST_MS, LONGEST_MS) * MS, action)

    def _crash(self) -> None:
        node = self._chance.pick(list(self._around.engines.values()))
        if node.engine is None:
            return
        node.crash()

        def start() -> None:
            if node.engine is None:
                node.start()

        self._later(start)

    def _stop(self) -> None:
        node = self._chance.pick(list(self._around.engines.values()))
        node.stop()
        self._later(node.resume)

    def _cut(self) -> None:
        names = [*self._around.engines, *(router.name for router in self._routers)]
        one = self._chance.pick(names)
        others = [name for name in names if name != one]
        cut = others if self._chance.permille(300) else [self._chance.pick(others)]
        self._around.note("faults", "cut", one, "from", ",".join(cut))
        for other in cut:
            self._around.network.cut(one, other)

        def mend() -> None:
            self._around.note("faults", "mend", one)
            for other in cut:
                self._around.network.mend(one, other)

        self._later(mend)

    def _crash_router(self) -> None:
        router = self._chance.pick(self._routers)
        if not router.is_up:
            return
        router.crash()

        def start() -> None:
            if not router.is_up:
                router.start()

        self._later(start)

    def _step_wall(self) -> None:
        node = self._chance.pick(list(self._around.engines.values()))
        node.clocks.wall_off_ms = self._chance.pick(WALL_STEPS_MS)
        self._around.note("faults", "set the wall clock of", node.name, node.clocks.wall_off_ms)

    def _reset(self) -> None:
        self._chance.pick(list(self._around.engines.values())).reset()
