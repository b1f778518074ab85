"""A request in tokens, estimated from its bytes; see `core.belief` and `core.script`."""

import msgspec

from kvloop.core.belief import believed
from kvloop.core.decision import Ask
from kvloop.core.lineage import Match
from kvloop.core.report import TurnReport
from kvloop.core.script import Script, TokenEstimator, script_of
from kvloop.wire.openai import Endpoint, Generation
from kvloop.wire.units import root_of


class Size(msgspec.Struct, frozen=True):
    """What a prompt's tokens are estimated from: taken once, for it takes a look at every byte."""

    model: str
    script: Script
    total_bytes: int


class Beliefs:
    """Estimates, and the counts that correct them."""

    def __init__(self) -> None:
        self._estimator = TokenEstimator()

    def ask(self, generation: Generation, size: Size, match: Match | None) -> Ask:
        """The turn in tokens. `match`: what may be reused, None for nothing."""

        def tokens(size_bytes: int) -> int:
            return self._estimator.tokens(size.model, size.script, size_bytes)

        def before(depth: int) -> int:
            return tokens(_root_bytes(generation) + sum(map(len, generation.units[:depth])))

        def added(depth: int) -> int:
            return tokens(sum(map(len, generation.units[depth + 1 :])))

        total = tokens(size.total_bytes)
        answers_are_units = generation.endpoint in (Endpoint.CHAT, Endpoint.MESSAGES)
        return believed(match, total, before, added if answers_are_units else None)

    def counted(self, size: Size, report: TurnReport) -> None:
        """An engine has counted the prompt."""
        self._estimator.counted(size.model, size.script, size.total_bytes, report.prompt_tokens)


def size_of(generation: Generation) -> Size:
    """A prompt's size: with all that is rendered before its first unit."""
    if generation.endpoint is Endpoint.COMPLETIONS:
        prompt = bytes(generation.fields.get("prompt", b""))
        return Size(generation.model, script_of(prompt), len(prompt))
    total_bytes = _root_bytes(generation) + sum(map(len, generation.units))
    return Size(generation.model, script_of(generation.raw), total_bytes)


def _root_bytes(generation: Generation) -> int:
    return sum(map(len, root_of(generation.endpoint, generation.fields)))
