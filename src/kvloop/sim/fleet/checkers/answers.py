"""What clients get: the right answer, and an answer at all."""

from typing import TYPE_CHECKING

from kvloop.sim.fleet.watch import Checker, End

if TYPE_CHECKING:
    from kvloop.sim.fleet.people import Turn
    from kvloop.sim.fleet.world import World


class NeverAWrongToken(Checker):
    """KV is used for a position only if it was computed for exactly the same tokens before it.

    Seen twice: by the client, who knows what a model answers that reads just his prompt, and in the engine,
    whose memory says what the KV was computed for, also for a request that nobody waits for any more.
    """

    def answered(self, turn: "Turn", data: bytes) -> None:
        """What came is the right answer, or the beginning of it."""
        if not turn.expected.startswith(data):
            self.fail(f"{turn.name} was answered {data[:32]!r}, not {turn.expected[:32]!r}")

    def finished(self, end: End) -> None:
        """Nothing was computed from anything else."""
        if end.event.wrong:
            self.fail(f"{end.event.request_id} was computed from other KV on {end.node.name}")


class ClientsSeeNoMetadata(Checker):
    """Clients neither see nor supply block metadata: what decode says for the router's ears only is not in
    what they get, and what they say for an engine's is refused.
    """

    def delivered(self, turn: "Turn", body: bytes) -> None:
        """Not a word of it, in a stream or in a whole answer; and all of the answer."""
        if b"kvloop" in body or b"kv_transfer_params" in body:
            self.fail(f"{turn.name} was shown {body[-200:]!r}")

    def smuggled(self, turn: "Turn") -> None:
        """A request with block metadata in it was taken."""
        self.fail(f"{turn.name} supplied block metadata")


class LossCostsTime(Checker):
    """Losing anything costs time, never an answer: where no process dies, stops or is cut off, no client ever
    gets an error; and when faults are over, nobody does, and everybody has his answer soon.
    """

    def begin(self, world: "World") -> None:
        """Which faults there can be."""
        self._world, plan = world, world.plan
        self._may_refuse = bool(plan.crash_ms or plan.stop_ms or plan.cut_ms or plan.router_crash_ms)

    def refused(self, turn: "Turn", why: str) -> None:
        """An error is excused only by a fault that takes a whole process or link away."""
        if not self._may_refuse or self._world.is_calm:
            self.fail(f"{turn.name} got an error: {why}")

    def drained(self, world: "World") -> None:
        """Nobody waits."""
        if world.people.open:
            waiting = ", ".join(world.people.open)
            self.fail(f"never answered: {waiting}")
