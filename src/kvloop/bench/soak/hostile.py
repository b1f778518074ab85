"""Requests that nobody should send, each with what has to come of it.

`BODIES` are whole requests that have to be refused with a 4xx in the API's shape. `GARBAGE` are bytes that
are no request, or not a whole one: the router may answer 4xx or hang up, and forget about it.
"""

from collections.abc import Sequence
from typing import Any

from kvloop.bench.soak.conversation import MODEL
from kvloop.bench.soak.hearing import CHAT, COMPLETIONS, MESSAGES, RESPONSES

_HELLO = [{"role": "user", "content": "hello"}]
_GOOD: dict[str, Any] = {"model": MODEL, "messages": _HELLO, "max_tokens": 8}
_NESTED = b'{"model":"soak","messages":' + b"[" * 20_000 + b"]" * 20_000 + b"}"
_MEMBERS = b'{"model":"soak",' + b",".join(b'"f%d":1' % number for number in range(2000)) + b',"messages":[]}'
BODIES: Sequence[tuple[str, bytes | dict[str, Any]]] = (
    (CHAT, b"{"),
    (CHAT, b"\xff\xfe\x00"),
    (CHAT, b"[]"),
    (CHAT, _NESTED),
    (CHAT, _MEMBERS),
    (CHAT, {**_GOOD, "messages": 7}),
    (CHAT, {**_GOOD, "model": "another"}),
    (CHAT, {**_GOOD, "n": 10**6}),
    (CHAT, {**_GOOD, "max_tokens": 10**9}),
    (CHAT, {**_GOOD, "cache_salt": "kvloop.mine"}),
    (CHAT, {**_GOOD, "kv_transfer_params": {"kvloop_handle": "x", "do_remote_prefill": True}}),
    (COMPLETIONS, {"model": MODEL, "max_tokens": 8}),
    (COMPLETIONS, {"model": MODEL, "prompt": [-1], "max_tokens": 8}),
    (RESPONSES, {"model": MODEL, "input": "x", "previous_response_id": "resp_of_somebody_else"}),
    (RESPONSES, {"model": MODEL, "input": 7}),
    (RESPONSES, {"model": MODEL, "input": "x", "background": True}),
    (MESSAGES, {"model": MODEL, "messages": _HELLO}),
    (MESSAGES, {**_GOOD, "messages": []}),
    ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/"}),
    ("/sleep", b""),
)
_LINE = b"POST /v1/chat/completions HTTP/1.1\r\nhost: router\r\n"
GARBAGE: Sequence[bytes] = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS on a plain port
    b"GET /\r\n\r\n",
    b"\x00" * 512,
    _LINE + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello!",
    _LINE + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    _LINE + b"transfer-encoding: chunked\r\n\r\nzz\r\nhello\r\n",
    _LINE + b"x-big: " + b"a" * 100_000 + b"\r\n\r\n",
    _LINE + b"content-length: 1000\r\n\r\n{",  # and never the rest
    _LINE[:30],
)
