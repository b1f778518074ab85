"""A client of the OpenAI chat API, as small as the demo needs: one streamed turn, timed to its first token.

The time to first token runs from before the request is sent to the arrival of the first event with text in
it, as a user would feel it. Everything else is read off the answer: usage from the stream's last chunk, the
route and the reuse from the router's headers.
"""

import http.client
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kvloop.errors import UserError

Message = dict[str, str]

# A long prompt on one slow core; a router that hangs must not hang the demo for ever.
TURN_TIMEOUT_S = 600.0
_ERROR_BYTES = 500
APPEND = "append"
_MISS = re.compile(r'^kvloop_router_return_misses_total\{reason="(\w+)"\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class TurnResult:
    """One answered turn. Token counts are None where the answer did not say."""

    text: str
    route: str | None
    prompt_tokens: int | None
    reused_tokens: int | None
    cached_tokens: int | None
    first_token_s: float
    last_token_s: float = 0.0
    answer_tokens: int | None = None

    @property
    def per_token_s(self) -> float | None:
        """Seconds per output token after the first (vLLM's TPOT); None for an answer of fewer than two."""
        if self.answer_tokens is None or self.answer_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.answer_tokens - 1)

    @property
    def computed_tokens(self) -> int | None:
        """Prompt tokens that had to be computed."""
        if self.prompt_tokens is None or self.cached_tokens is None:
            return None
        return self.prompt_tokens - self.cached_tokens


def _connect(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TURN_TIMEOUT_S)


def served_model(url: str) -> str:
    """The first model that the server at `url` offers. Raises `UserError` if it offers none."""
    connection = _connect(url)
    try:
        connection.request("GET", "/v1/models")
        answer = json.loads(connection.getresponse().read())
        return str(answer["data"][0]["id"])
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{url}/v1/models does not answer with a model: {error}") from error
    finally:
        connection.close()


def return_misses(admin_url: str) -> str:
    """Why handles brought nothing back so far, by the router's metrics: `no_reply 2`; "" if unknown."""
    connection = _connect(admin_url)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    except (OSError, http.client.HTTPException, ValueError):
        return ""
    finally:
        connection.close()
    found = _MISS.findall(text)
    return ", ".join(f"{reason} {float(count):.0f}" for reason, count in found)


def _chunks(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: {"):
            yield json.loads(line[len(b"data: ") :])
        elif line.startswith(b"data: [DONE]"):
            response.read()
            return
    raise UserError("the answer broke off before its end")


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def _read(response: http.client.HTTPResponse, began_s: float) -> TurnResult:
    text, first_token_s, last_token_s = "", 0.0, 0.0
    usage: dict[str, Any] = {}
    for chunk in _chunks(response):
        if "error" in chunk:
            raise UserError(f"the turn was answered with an error: {chunk['error']}")
        usage = chunk.get("usage") or usage
        for choice in chunk.get("choices", []):
            piece = choice.get("delta", {}).get("content") or ""
            if piece:
                last_token_s = time.monotonic() - began_s
                first_token_s = first_token_s or last_token_s
            text += piece
    if not text:
        raise UserError("the turn was answered without a word")
    route = response.getheader("x-kvloop-route")
    reused = _number(response.getheader("x-kvloop-reused-tokens"))
    cached = _number(response.getheader("x-kvloop-cached-tokens"))
    if route == APPEND:  # decode found in its own cache what else would have been read back
        reused = cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return TurnResult(
        text=text,
        route=route,
        prompt_tokens=usage.get("prompt_tokens"),
        reused_tokens=reused,
        cached_tokens=cached,
        first_token_s=first_token_s,
        last_token_s=last_token_s,
        answer_tokens=usage.get("completion_tokens"),
    )


def stream_turn(url: str, body: dict[str, Any]) -> TurnResult:
    """Post one streamed chat completion and read it to its end. Raises `UserError` for an error answer."""
    full = body | {"stream": True, "stream_options": {"include_usage": True}}
    connection = _connect(url)
    began_s = time.monotonic()
    try:
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(full), {"content-type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != http.client.OK:
            detail = response.read(_ERROR_BYTES).decode(errors="replace")
            raise UserError(f"the turn was answered with HTTP {response.status}: {detail}")
        return _read(response, began_s)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise UserError(f"the turn was not answered: {error}") from error
    finally:
        connection.close()
