"""Engines that answer the Responses and Messages APIs as vLLM does: its own bytes, recorded.

Recorded by `tests.connector.vllm_answers`. A handle counts up with the requests that an engine has served,
and so does a response's id.
"""

import json
from pathlib import Path
from typing import Any

from tests.router.fake_engine import Answer, Asked, decode_plan, handle_event, json_answer, stream_answer

ANSWERS: dict[str, Any] = json.loads(
    (Path(__file__).parent.parent / "vectors" / "vllm_answers.json").read_text()
)
HANDLE = '"kv_transfer_params":{"kvloop_handle":"HANDLE"}'


def body(name: str, served: str = "1") -> bytes:
    """A JSON answer."""
    return _numbered(ANSWERS[name], served)


def events(name: str, served: str = "1") -> list[bytes]:
    """A stream's events; where kvloop's plugin adds one, with that."""
    made = [_numbered(event, served) for event in ANSWERS[name]]
    if not name.startswith("response"):
        made.insert(-1, handle_event(f"h{served}"))
    return made


def plan(asked: Asked) -> Answer:
    """A well-behaved decode engine of every generation endpoint; it calls the tools that it is given."""
    kind = {"/v1/responses": "response", "/v1/messages": "message"}.get(asked.path)
    if asked.path == "/v1/messages/count_tokens":
        return json_answer(body("count_tokens"))
    if kind is None and not (asked.body.get("tools") and asked.path == "/v1/chat/completions"):
        return decode_plan(asked)
    kind = kind or "chat"
    served, tools = asked.headers["x-served"], "_tools" if asked.body.get("tools") else ""
    if asked.body.get("stream"):
        return stream_answer(*events(f"{kind}_stream{tools}", served))
    return json_answer(body(f"{kind}{tools}", served))


def _numbered(text: str, served: str) -> bytes:
    return text.replace('"HANDLE"', f'"h{served}"').replace('"resp_1"', f'"resp_{served}"').encode()
