"""Drives a prefill and a decode engine by hand, as a router would, and keeps the books.

The oracle is the same prompt computed cold: by the prefill engine with nothing cached (a salt of its own)
and nothing returned. The tiny model runs in float32 and is peaked, so greedy output is a function of the
KV that was read.
"""

import json
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvloop.local.stack import Engine

ANSWER_TOKENS = 16
REQUEST_TIMEOUT_S = 120
POLL_S = 0.05


class EngineError(Exception):
    """An engine answered with an HTTP error."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"{status}: {body[:500]}")
        self.status = status


@dataclass(frozen=True)
class Turn:
    """One turn's outcome. `account` is prefill's `kvloop_turn`, `filed` what the router would keep."""

    text: str
    tokens: list[int]
    account: dict[str, Any]
    filed: dict[str, Any] | None
    cached_tokens: int

    @property
    def returned(self) -> int:
        """Tokens read back from decode."""
        return int(self.account["returned_tokens"])

    @property
    def reason(self) -> str | None:
        """Why nothing was returned, if so."""
        return self.account["reason"]  # type: ignore[no-any-return]


def post(url: str, body: dict[str, Any], timeout_s: float = REQUEST_TIMEOUT_S) -> bytes:
    """The answer's body; `EngineError` for an HTTP error."""
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return answer.read()  # type: ignore[no-any-return]
    except urllib.error.HTTPError as error:
        raise EngineError(error.code, error.read().decode(errors="replace")) from error


def counted(engine: Engine, metric: str) -> float:
    """One of an engine's Prometheus counters, summed over its labels."""
    with urllib.request.urlopen(engine.url + "/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(metric))


def events(body: bytes) -> list[dict[str, Any]]:
    """The JSON events of an event stream."""
    lines = [line[6:] for line in body.decode().splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def salt() -> str:
    """A cache salt nobody used before: under it every engine is cold."""
    return uuid.uuid4().hex


class Pair:
    """A prefill engine and a decode engine, and the router's part played by hand."""

    def __init__(self, prefill: Engine, decode: Engine, model: str = "tiny") -> None:
        self.prefill = prefill
        self.decode = decode
        self.model = model

    def _body(self, messages: list[dict[str, Any]], fields: dict[str, Any]) -> dict[str, Any]:
        return {
            "model": self.model,
            "messages": messages,
            "temperature": 0,
            "return_token_ids": True,
        } | fields

    def prefill_hop(
        self, messages: list[dict[str, Any]], filed: dict[str, Any] | None = None, **fields: Any
    ) -> dict[str, Any]:
        """The first hop's `kv_transfer_params`."""
        params = {"do_remote_decode": True, "do_remote_prefill": False} | (filed or {})
        body = self._body(messages, fields) | {"max_tokens": 1, "stream": False, "kv_transfer_params": params}
        answer = json.loads(post(self.prefill.url + "/v1/chat/completions", body))
        return answer["kv_transfer_params"]  # type: ignore[no-any-return]

    def step(self, engine: Engine) -> None:
        """Let an engine take a step: what has ended meanwhile gives its blocks back then, and the books are
        checked."""
        body = self._body([{"role": "user", "content": "Step."}], {"max_tokens": 1})
        post(engine.url + "/v1/chat/completions", body)

    def turn(
        self,
        messages: list[dict[str, Any]],
        filed: dict[str, Any] | None = None,
        *,
        stream: bool = False,
        max_tokens: int = ANSWER_TOKENS,
        **fields: Any,
    ) -> Turn:
        """Both hops of one turn."""
        params = self.prefill_hop(messages, filed, **fields)
        return self.decode_hop(messages, params, stream=stream, max_tokens=max_tokens, **fields)

    def decode_hop(
        self,
        messages: list[dict[str, Any]],
        params: dict[str, Any],
        *,
        stream: bool = False,
        max_tokens: int = ANSWER_TOKENS,
        **fields: Any,
    ) -> Turn:
        """The second hop, with what the first answered."""
        body = self._body(messages, fields) | {"max_tokens": max_tokens, "kv_transfer_params": params}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        raw = post(self.decode.url + "/v1/chat/completions", body)
        text, tokens, kept, usage = _streamed(raw) if stream else _whole(raw)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Turn(text, tokens, params["kvloop_turn"], kept, cached)

    def oracle(
        self, messages: list[dict[str, Any]], max_tokens: int = ANSWER_TOKENS, **fields: Any
    ) -> list[int]:
        """The answer's tokens from a cold engine: nothing cached, nothing returned, one engine alone."""
        body = self._body(messages, fields) | {"max_tokens": max_tokens, "cache_salt": salt()}
        answer = json.loads(post(self.prefill.url + "/v1/chat/completions", body))
        details = answer["usage"].get("prompt_tokens_details") or {}
        assert not details.get("cached_tokens"), "the oracle was not cold"
        return answer["choices"][0]["token_ids"]  # type: ignore[no-any-return]


def _whole(raw: bytes) -> tuple[str, list[int], dict[str, Any] | None, dict[str, Any]]:
    answer = json.loads(raw)
    choice = answer["choices"][0]
    return (
        choice["message"]["content"] or "",
        choice["token_ids"],
        answer["kv_transfer_params"],
        answer["usage"],
    )


def _streamed(raw: bytes) -> tuple[str, list[int], dict[str, Any] | None, dict[str, Any]]:
    text, kept = "", None
    tokens: list[int] = []
    usage: dict[str, Any] = {}
    for event in events(raw):
        if event.get("object") == "kvloop.handle":
            kept = event["kv_transfer_params"]
            continue
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            text += choice["delta"].get("content") or ""
            tokens += choice.get("token_ids") or []
    assert raw.rstrip().endswith(b"data: [DONE]")
    return text, tokens, kept, usage


def until(condition: Callable[[], object], what: str, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
    """Wait for what must come; `what` says what has not, where it does not."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(POLL_S)
