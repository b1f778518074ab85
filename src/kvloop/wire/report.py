"""What prefill says it did with a prompt, in its handover's `kvloop_turn`.

The counts go into headers that clients are billed by and into metrics that operators decide by, so they are
whole or not there: counts that are no counts, or that do not add up to the prompt, make no report. A report
that is missing costs nobody a turn.
"""

from dataclasses import dataclass

import msgspec

from kvloop.core.chain import MAX_CHAIN_TOKENS


@dataclass(frozen=True, slots=True)
class TurnReport:
    """Tokens of one prompt by where their KV came from; `reason` says why nothing was returned.

    ValueError for what cannot be.
    """

    prompt_tokens: int
    local_tokens: int
    returned_tokens: int
    computed_tokens: int
    reason: str | None = None

    def __post_init__(self) -> None:
        parts = (self.local_tokens, self.returned_tokens, self.computed_tokens)
        if min(parts) < 0 or sum(parts) != self.prompt_tokens or self.prompt_tokens > MAX_CHAIN_TOKENS:
            raise ValueError("the counts do not add up to a prompt")

    @property
    def cached_tokens(self) -> int:
        """Tokens that were not computed."""
        return self.local_tokens + self.returned_tokens


class _Handover(msgspec.Struct):
    kvloop_turn: TurnReport | None = None


_HANDOVER = msgspec.json.Decoder(_Handover)


def read_report(handover: bytes | msgspec.Raw, asked: bool) -> TurnReport | None:
    """The report in a handover; None where there is none, or one that cannot be true.

    `asked`: prefill was given a handle to read back from, without which nothing is returned.
    """
    try:
        report = _HANDOVER.decode(handover).kvloop_turn
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return None if report is not None and report.returned_tokens and not asked else report
