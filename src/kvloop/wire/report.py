"""What an engine says it did with a prompt, in its answer's `kvloop_turn`: prefill's beside its handover,
decode's beside its handle. One that is missing, or cannot be true, costs nobody a turn.
"""

import msgspec

from kvloop.core.report import TurnReport


class _Params(msgspec.Struct):
    kvloop_turn: TurnReport | None = None


_PARAMS = msgspec.json.Decoder(_Params)


def read_report(params: bytes | msgspec.Raw, asked: bool) -> TurnReport | None:
    """The report in an engine's parameters; None where there is none, or one that cannot be true.

    `asked`: the engine was given another's KV to load, without which nothing is.
    """
    try:
        report = _PARAMS.decode(params).kvloop_turn
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return None if report is not None and report.returned_tokens and not asked else report
