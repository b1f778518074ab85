"""What an engine says it did with a prompt, in its answer's `kvloop_turn`: prefill's beside its handover,
decode's beside its handle. One that is missing, or cannot be true, costs nobody a turn.
"""

from dataclasses import replace

import msgspec

from kvloop.core.report import TurnReport

MAX_REASON_CHARS = 64
MAX_TOKENS_PER_BYTE = 4  # a byte that no merge knows is up to four tokens
MAX_TEMPLATE_TOKENS = 65_536  # what a template adds, and what a short link to a picture becomes


class _Params(msgspec.Struct):
    kvloop_turn: TurnReport | None = None


_PARAMS = msgspec.json.Decoder(_Params)


def read_report(params: bytes | msgspec.Raw, asked: bool, body_bytes: int) -> TurnReport | None:
    """The report in an engine's parameters; None where there is none, or one that cannot be true.

    `asked`: the engine was given another's KV to load, without which nothing is. `body_bytes`: the request's
    size, which bounds its tokens. A reason that is no word is `other`.
    """
    try:
        report = _PARAMS.decode(params).kvloop_turn
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if report is None or (report.returned_tokens and not asked):
        return None
    if report.prompt_tokens > MAX_TOKENS_PER_BYTE * body_bytes + MAX_TEMPLATE_TOKENS:
        return None
    return report if is_word(report.reason) else replace(report, reason="other")


def is_word(reason: str | None) -> bool:
    """Whether a reason is one word of ASCII, or none: fit for logs, metrics and a terminal."""
    if reason is None:
        return True
    return len(reason) <= MAX_REASON_CHARS and reason.isascii() and reason.isidentifier()
