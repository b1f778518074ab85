"""A request in tokens, estimated from its bytes; see `core.belief` and `core.script`."""

from kvloop.core.belief import believed
from kvloop.core.decision import Ask
from kvloop.core.lineage import Match
from kvloop.core.report import TurnReport
from kvloop.core.script import Script, TokenEstimator, script_of
from kvloop.wire.openai import Endpoint, Generation
from kvloop.wire.units import root_of


class Beliefs:
    """Estimates, and the counts that correct them."""

    def __init__(self) -> None:
        self._estimator = TokenEstimator()

    def ask(self, generation: Generation, match: Match | None) -> Ask:
        """The turn in tokens. `match`: what may be reused, None for nothing."""
        script = _script(generation)

        def tokens(size_bytes: int) -> int:
            return self._estimator.tokens(generation.model, script, size_bytes)

        total = tokens(_size_bytes(generation))

        def before(depth: int) -> int:
            return tokens(_root_bytes(generation) + sum(map(len, generation.units[:depth])))

        def added(depth: int) -> int:
            return tokens(sum(map(len, generation.units[depth + 1 :])))

        answers_are_units = generation.endpoint in (Endpoint.CHAT, Endpoint.MESSAGES)
        return believed(match, total, before, added if answers_are_units else None)

    def counted(self, generation: Generation, report: TurnReport) -> None:
        """An engine has counted the prompt."""
        self._estimator.counted(
            generation.model, _script(generation), _size_bytes(generation), report.prompt_tokens
        )


def _script(generation: Generation) -> Script:
    if generation.endpoint is Endpoint.COMPLETIONS:
        return script_of(bytes(generation.fields.get("prompt", b"")))
    return script_of(generation.raw)


def _size_bytes(generation: Generation) -> int:
    if generation.endpoint is Endpoint.COMPLETIONS:
        return len(bytes(generation.fields.get("prompt", b"")))
    return _root_bytes(generation) + sum(map(len, generation.units))


def _root_bytes(generation: Generation) -> int:
    return sum(map(len, root_of(generation.endpoint, generation.fields)))
