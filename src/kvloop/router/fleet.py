"""All engines, and what the router's choices go by: `core.placement`, with the engines' state of health."""

from collections.abc import Callable, Collection, Sequence

from kvloop.core.decision import DECODE, PREFILL, AppendLimits, Ask, Option
from kvloop.core.placement import Eligible, Holds, Placement
from kvloop.core.policy import Policy
from kvloop.core.progress import Progress
from kvloop.router.engine import Engine


def _any(_: str) -> bool:
    return True


class Fleet:
    """The engines by URL and role. `clock_ns`: monotonic.

    `suits`, in each choice: whether an engine can serve the turn at all.
    """

    def __init__(
        self,
        prefill: Sequence[Engine],
        decode: Sequence[Engine],
        clock_ns: Callable[[], int],
        policy: Policy,
        limits: AppendLimits,
    ) -> None:
        self.prefill = {engine.url: engine for engine in prefill}
        self.decode = {engine.url: engine for engine in decode}
        self.placement = Placement(policy, limits)
        self.clock_ns = clock_ns
        for engine in prefill:
            self.placement.add(engine.url, PREFILL)
        for engine in decode:
            self.placement.add(engine.url, DECODE)

    def engines(self) -> list[Engine]:
        """Every engine, prefill first."""
        return [*self.prefill.values(), *self.decode.values()]

    def progress(self, ask: Ask) -> Progress:
        """The books of one turn."""
        return Progress(self.placement, ask)

    def choose(self, ask: Ask, suits: Holds = _any) -> list[Option]:
        """The ways that a turn may go, the best first; none without a decode engine that suits it."""
        return self.placement.choose(ask, self.clock_ns(), self._eligible(suits))

    def choose_prefill(self, ask: Ask, excluded: Collection[str], suits: Holds = _any) -> str | None:
        """Another prefill engine, one that has not just failed."""
        return self.placement.choose_prefill(ask, self.clock_ns(), self._eligible(suits), excluded)

    def choose_decode(
        self, ask: Ask, prefill: str | None, excluded: Collection[str], last_resort: bool, suits: Holds = _any
    ) -> str | None:
        """A decode engine to go on from what `prefill` has computed; as a last resort one that has just
        failed."""
        eligible = self._eligible(suits)
        return self.placement.choose_decode(
            ask, self.clock_ns(), eligible, excluded, prefill=prefill, last_resort=last_resort
        )

    def is_available(self, engine: Engine) -> bool:
        """Whether an engine has not just failed."""
        return engine.available(self.clock_ns() / 1e9)

    def healthy(self) -> bool:
        """Whether some decode engine is worth trying: without one nothing can be served."""
        return any(self.is_available(engine) for engine in self.decode.values())

    def close(self) -> None:
        """Abort every connection."""
        for engine in self.engines():
            engine.close()

    def _eligible(self, suits: Holds) -> Eligible:
        now_s = self.clock_ns() / 1e9

        def is_usable(url: str) -> bool:
            engine = self.prefill.get(url) or self.decode[url]
            return engine.available(now_s)

        return Eligible(suits, is_usable)
