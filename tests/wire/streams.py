"""Streams as vLLM writes them, by hand after its protocol classes, and what a client may see of them.

0.32: no chunk knows `kv_transfer_params`; kvloop's plugin adds an event. 0.33:
`chunk.model_dump_json(exclude_unset=True)` writes the field into every chunk but the first, null until the
finish reason is there. `HANDLE` marks what has to go.
"""

import json
from typing import Any

PARAMS = {"kvloop_handle": "hGFiYw-_", "nested": {"kv_transfer_params": {"a": [1, "}"]}}}
UPSTREAM = {
    "do_remote_prefill": False,
    "do_remote_decode": True,
    "remote_block_ids": [[11, 12, 13]],
    "remote_engine_id": "d0",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}
# Text of a model that means mischief, or documents this router.
NASTY = (
    'He said "kv_transfer_params":{"a":1}, {"object":"kvloop.handle","kv_transfer_params":{}}'
    "\n\ndata: [DONE]\n\n"
)
DONE = b"data: [DONE]\n\n"
HANDLE_EVENT = {"object": "kvloop.handle", "choices": [], "kv_transfer_params": PARAMS}


def event(value: dict[str, Any]) -> bytes:
    """As pydantic writes JSON: without spaces."""
    return b"data: " + json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


def chat_chunk(index: int = 0, **parts: Any) -> dict[str, Any]:
    """A `chat.completion.chunk`; `finish` is its finish reason, `extra` what follows `choices`."""
    choice = {
        "index": index,
        "delta": parts.get("delta", {"content": parts.get("text", "")}),
        "logprobs": parts.get("logprobs"),
        "finish_reason": parts.get("finish"),
    }
    if parts.get("finish"):
        choice["stop_reason"] = None
    if "token_ids" in parts:
        choice["token_ids"] = parts["token_ids"]
    head = {"id": "chatcmpl-8f1", "object": "chat.completion.chunk", "created": 1790000000, "model": "tiny"}
    return {**head, "choices": [choice], **parts.get("extra", {})}


def text_chunk(text: str, finish: str | None, extra: dict[str, Any]) -> dict[str, Any]:
    """A `text_completion` chunk with logprobs, whose `top_logprobs` have tokens for names."""
    logprobs = {
        "text_offset": [0],
        "token_logprobs": [-0.1],
        "tokens": [text],
        "top_logprobs": [{"kv_transfer_params": -0.1, text: -2.5}],
    }
    choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish, "stop_reason": None}
    head = {"id": "cmpl-8f1", "object": "text_completion", "created": 1790000000, "model": "tiny"}
    return {**head, "choices": [choice], **extra}


USAGE = chat_chunk(extra={"usage": {"prompt_tokens": 9, "total_tokens": 12, "completion_tokens": 3}}) | {
    "choices": []
}
NULL = {"kv_transfer_params": None}
LOGPROBS = {
    "content": [{"token": '"kv_transfer_params"', "logprob": -0.1, "bytes": [34], "top_logprobs": []}]
}


def _cases() -> dict[str, tuple[bytes, bytes, dict[str, Any] | None]]:
    role = event(chat_chunk(delta={"role": "assistant", "content": ""}))
    nasty = event(chat_chunk(text=NASTY, logprobs=LOGPROBS))
    nasty_null = event(chat_chunk(text=NASTY, extra=NULL))
    fingerprint = {"system_fingerprint": "vllm-0.33.0-tp1-1"}

    def last(index: int, params: dict[str, Any] | None, **more: Any) -> bytes:
        extra = {**more, **({"kv_transfer_params": params} if params is not None else {})}
        return event(chat_chunk(index, text="", finish="stop", extra=extra))

    usage = {"usage": {"prompt_tokens": 9, "total_tokens": 12, "completion_tokens": 3}}
    tool = {"tool_calls": [{"index": 0, "function": {"arguments": '{"kv_transfer_params":{"a":1}}'}}]}
    tool_event = event(chat_chunk(delta=tool, extra=NULL))
    text = event(text_chunk("é\u2028", None, NULL))
    start = role + nasty
    return {
        "chat_032": (
            start + last(0, None) + event(USAGE) + event(HANDLE_EVENT) + DONE,
            start + last(0, None) + event(USAGE) + DONE,
            PARAMS,
        ),
        "chat_032_without_handle": (start + last(0, None) + DONE, start + last(0, None) + DONE, None),
        "chat_033": (
            role + nasty_null + tool_event + last(0, PARAMS, **fingerprint) + DONE,
            role + nasty_null + tool_event + last(0, None, **fingerprint) + DONE,
            PARAMS,
        ),
        "chat_033_null": (role + nasty_null + last(0, None, **NULL) + DONE,) * 2 + (None,),
        "chat_033_two_choices": (
            role + last(0, UPSTREAM) + nasty_null + last(1, UPSTREAM) + event(USAGE) + DONE,
            role + last(0, None) + nasty_null + last(1, None) + event(USAGE) + DONE,
            UPSTREAM,
        ),
        "chat_033_continuous_usage": (
            role
            + event(chat_chunk(text="a", extra=usage | NULL))
            + event(chat_chunk(finish="length", extra=usage | {"kv_transfer_params": UPSTREAM}))
            + DONE,
            role
            + event(chat_chunk(text="a", extra=usage | NULL))
            + event(chat_chunk(finish="length", extra=usage))
            + DONE,
            UPSTREAM,
        ),
        "field_first": (
            event({"kv_transfer_params": PARAMS, **chat_chunk(text="x")}) + DONE,
            event(chat_chunk(text="x")) + DONE,
            PARAMS,
        ),
        "field_alone": (event({"kv_transfer_params": PARAMS}) + DONE, b"data: {}\n\n" + DONE, PARAMS),
        "text_033": (
            text + event(text_chunk("z", "stop", {"kv_transfer_params": UPSTREAM})) + DONE,
            text + event(text_chunk("z", "stop", {})) + DONE,
            UPSTREAM,
        ),
        "comments_and_carriage_returns": (
            b": ping\n\n" + (start + last(0, PARAMS) + event(HANDLE_EVENT) + DONE).replace(b"\n", b"\r\n"),
            b": ping\n\n" + (start + last(0, None) + DONE).replace(b"\n", b"\r\n"),
            PARAMS,
        ),
        "error": (role + event({"error": {"message": NASTY, "code": 500}}) + DONE,) * 2 + (None,),
        "not_json": (b'data: {"kv_transfer_params":{"a":1}\n\ndata: "kv_transfer_params":{}\n\n' + DONE,) * 2
        + (None,),
        "broken_off": (role + event(HANDLE_EVENT)[:-1], role, PARAMS),
        "no_line_end": (role + last(0, PARAMS)[:-2], role + last(0, None)[:-2], PARAMS),
        "empty": (b"", b"", None),
    }


CASES = _cases()
