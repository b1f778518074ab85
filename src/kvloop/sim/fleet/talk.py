"""What passes between clients and routers, as bytes: written and read by `wire`, as in the real router.

The answer of a simulated decode engine is put into the shape that vLLM gives it, with the handle in it, and
goes through the router's own filter, in pieces as a network cuts them.
"""

import msgspec

from kvloop.sim.formats import DONE, event
from kvloop.wire.openai import HANDOVER_FIELD, Endpoint, RequestError, read_generation, take_handle
from kvloop.wire.sse import HANDLE_OBJECT, HandleFilter

PIECE_BYTES = 61  # cuts events, and the handle, somewhere
MAX_EVENT_BYTES = 1 << 20
_SMUGGLED = msgspec.json.encode(
    {"model": "sim", "messages": [{"role": "user", "content": "x"}], HANDOVER_FIELD: {"kvloop_handle": "x"}}
)
_FILED = msgspec.json.Decoder(dict[str, str])


def passed_on(said: bytes, handle: str | None, *, stream: bool) -> tuple[bytes, str | None]:
    """An answer as its client gets it, and the handle that the router has taken out of it."""
    params = None if handle is None else {"kvloop_handle": handle}
    text = said.decode(errors="replace")
    if not stream:
        body, taken = take_handle(msgspec.json.encode({"choices": [{"text": text}], HANDOVER_FIELD: params}))
        return body.replace(b',"kv_transfer_params":null', b""), _read(taken)
    sent = event({"choices": [{"text": text}]})
    if params is not None:
        sent += event({"object": HANDLE_OBJECT, "choices": [], HANDOVER_FIELD: params})
    sent += DONE
    filtered = HandleFilter(MAX_EVENT_BYTES)
    pieces = [filtered.feed(sent[at : at + PIECE_BYTES]) for at in range(0, len(sent), PIECE_BYTES)]
    return b"".join((*pieces, filtered.close())), _read(filtered.handle)


def is_taken(smuggles: bool) -> bool:
    """Whether a router takes a client's request; `smuggles`: with block metadata in it."""
    if not smuggles:
        return True
    try:
        read_generation(Endpoint.CHAT, _SMUGGLED)
    except RequestError:
        return False
    return True


def _read(taken: bytes | None) -> str | None:
    return None if taken is None else _FILED.decode(taken)["kvloop_handle"]
