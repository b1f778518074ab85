"""How long a client wants decode to keep what this turn computes: `X-Kvloop-Retain: off`, or seconds.

The router learns by itself who comes back and when; a client may know better. The last turn of a batch job
is worth nothing to anybody, a conversation that waits for a person at lunch is worth more than its past
says. A wish binds nobody: decode's own limit (`decoder_kv_blocks_ttl`) and its need of memory come first.
"""

import re

from kvloop.router.request import Request
from kvloop.wire.openai import RequestError

RETAIN = b"x-kvloop-retain"
_SECONDS = re.compile(rb"[0-9]{1,9}(\.[0-9]{1,9})?")
_NAME = RETAIN.decode()
_NS_PER_S = 1_000_000_000


def retention_asked_ns(request: Request) -> int | None:
    """For how long to keep the turn's KV: 0 for not at all, None where the client does not say.

    RequestError for anything else than `off` or a decimal number of seconds, once.
    """
    if RETAIN not in request.named:
        return None
    values = [value.strip().lower() for name, value in request.headers if name == RETAIN]
    if len(values) == 1 and values[0] == b"off":
        return 0
    if len(values) != 1 or not _SECONDS.fullmatch(values[0]):
        raise RequestError("X-Kvloop-Retain is `off` or a number of seconds", _NAME, "invalid_value")
    return int(float(values[0]) * _NS_PER_S)


def without_retention(handover: bytes) -> bytes:
    """`handover`, a JSON object, with word to decode that nothing of this turn is to be kept."""
    end = handover.rindex(b"}")
    comma = b"" if handover[:end].rstrip().endswith(b"{") else b","
    return b"".join((handover[:end], comma, b'"kvloop_retain":false}'))
