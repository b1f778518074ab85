"""All engines, and the choice among them."""

from collections.abc import Callable, Collection, Sequence

from kvloop.core.placement import Candidate, choose
from kvloop.router.engine import Engine


class Fleet:
    """All engines, and the choice among them."""

    def __init__(
        self, prefill: Sequence[Engine], decode: Sequence[Engine], clock: Callable[[], float]
    ) -> None:
        self.prefill = {engine.url: engine for engine in prefill}
        self.decode = {engine.url: engine for engine in decode}
        self._clock = clock
        self._prefills = 0  # one count per role: a shared one would give every engine of a pair one parity
        self._decodes = 0

    def engines(self) -> list[Engine]:
        """Every engine, prefill first."""
        return [*self.prefill.values(), *self.decode.values()]

    def choose_prefill(self, excluded: Collection[str]) -> str | None:
        """A prefill engine that is not excluded and has not just failed."""
        self._prefills += 1
        return choose(self._candidates(self.prefill), self._prefills, excluded=excluded)

    def choose_decode(
        self, preferred: str | None, excluded: Collection[str], last_resort: bool
    ) -> str | None:
        """A decode engine, `preferred` if its queue allows; as a last resort one that has just failed."""
        self._decodes += 1
        chosen = choose(self._candidates(self.decode), self._decodes, preferred, excluded)
        if chosen is None and last_resort:
            everyone = [Candidate(engine.url, engine.in_flight) for engine in self.decode.values()]
            chosen = choose(everyone, self._decodes, preferred, excluded)
        return chosen

    def is_available(self, engine: Engine) -> bool:
        """Whether an engine has not just failed."""
        return engine.available(self._clock())

    def healthy(self) -> bool:
        """Whether some decode engine is worth trying: without one nothing can be served."""
        now_s = self._clock()
        return any(engine.available(now_s) for engine in self.decode.values())

    def close(self) -> None:
        """Abort every connection."""
        for engine in self.engines():
            engine.close()

    def _candidates(self, engines: dict[str, Engine]) -> list[Candidate]:
        now_s = self._clock()
        return [
            Candidate(engine.url, engine.in_flight, engine.available(now_s)) for engine in engines.values()
        ]
