"""What leases hold and how busy prefill is, looked at in regular times while a fleet runs.

A block that several leases hold is one block, so that its references cannot simply be added up. A run may
last a minute or a week: when there are many looks, every second one is forgotten, and from then on they are
twice as far apart. So a mean over them is one over time.
"""

from dataclasses import dataclass

from kvloop.sim.fleet.plan import S
from kvloop.sim.fleet.world import World

MAX_LOOKS = 256
FIRST_NS = S // 64


@dataclass(frozen=True, slots=True)
class Look:
    """A moment: blocks held by leases, nanoseconds for which prefill engines had computed by then, turns
    answered by then, conversations that are open, and whether every one had begun."""

    at_ns: int
    held_blocks: int
    prefill_busy_ns: int
    answered: int
    open: int
    all_have_begun: bool


class Looks:
    """The looks at one run. `most_blocks`: the most that any of them found, forgotten ones too."""

    def __init__(self, world: World) -> None:
        self.seen: list[Look] = []
        self.most_blocks = 0
        self._world = world
        self._every_ns = FIRST_NS
        self._look()

    def now(self) -> Look:
        """One more, which is not kept."""
        world, people = self._world, self._world.people
        engines = world.around.engines
        held = busy_ns = 0
        for name, node in engines.items():
            if node.engine is None:
                continue
            held += len(node.engine.leases.table.block_ids())
            if name.startswith("p"):
                busy_ns += node.engine.counters.get("busy_ns", 0)
        return Look(
            world.loop.now_ns,
            held,
            busy_ns,
            len(people.first_token_ns),
            people.alive,
            people.begun >= world.plan.conversations,
        )

    def _look(self) -> None:
        look = self.now()
        self.most_blocks = max(self.most_blocks, look.held_blocks)
        self.seen.append(look)
        if len(self.seen) > MAX_LOOKS:  # an odd number: the last one stays
            del self.seen[1::2]
            self._every_ns *= 2
        self._world.loop.after(self._every_ns, self._look)
