"""A decode engine is killed while it streams: another one goes on, and the client has the same tokens and the
same text as if nothing had been."""

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from kvloop.local.ports import free_ports
from kvloop.local.stack import Router, Stack
from kvloop.local.stack_config import StackConfig
from tests.e2e.conftest import run_stack
from tests.e2e.turns import REQUEST_TIMEOUT_S, salt

# Of 600 greedy tokens the closest race is one of 0.02 in log-probability: what prefill computes at once and
# decode in steps differs by less.
ANSWER_TOKENS = 600
SEEN_EVENTS = 40  # of the first engine's, before it is killed
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Name ten rivers."}]})
TEXT = ("/v1/completions", {"prompt": "Once upon a time"})


@pytest.fixture(scope="module")
def many(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """One prefill engine and two decode engines, without prefix caches."""
    flags = ("--max-model-len", "2048", "--block-size", "32", "--no-enable-prefix-caching")
    yield from run_stack(request, StackConfig(router=False, decode=2, engine_flags=flags))


@pytest.fixture(scope="module")
def router(many: Stack) -> Iterator[Router]:
    """A router in front of them."""
    admin_port = free_ports(1, "127.0.0.1")[0]
    router = many.add_router("router", ("--append-max-tokens", "0"), admin_port=admin_port)
    yield router
    router.shut_down()


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=REQUEST_TIMEOUT_S) as answer:
        return bytes(answer.read())


def _streamed(router: Router, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A stream's events, as they come; the end has to be there."""
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(router.url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as answer:
        for line in answer:
            if line.strip() == b"data: [DONE]":
                return
            if line.startswith(b"data: "):
                event: dict[str, Any] = json.loads(line[6:])
                assert "error" not in event, event
                yield event
    raise AssertionError("a silent stop")


def _read(events: list[dict[str, Any]]) -> tuple[list[int], str, list[str], dict[str, int], set[str]]:
    """A stream's ids, text, finish reasons, usage, and what it calls itself."""
    choices = [choice for event in events for choice in event["choices"]]
    ids = [one for choice in choices for one in choice.get("token_ids") or []]
    text = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
    ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    usage = {name: count for name, count in events[-1]["usage"].items() if isinstance(count, int)}
    return ids, text, ends, usage, {event["id"] for event in events}


@pytest.mark.parametrize(
    ("path", "prompt", "asks_for_ids"),
    [(*CHAT, True), (*TEXT, True), (*CHAT, False)],
    ids=["chat", "completions", "chat-text"],
)
def test_killed_while_it_streams(
    many: Stack, router: Router, path: str, prompt: dict[str, Any], asks_for_ids: bool
) -> None:
    """Tokens, text, ending and usage of the continued stream are those of one without a death."""
    for engine in many.decode:
        if not engine.running:
            engine.restart()
    body = {"model": "tiny", "stream": True, "temperature": 0, "max_tokens": ANSWER_TOKENS} | prompt
    body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
    body |= {"return_token_ids": True} if asks_for_ids else {}
    whole = _read(list(_streamed(router, path, body | {"cache_salt": salt()})))
    assert len(whole[0]) == (ANSWER_TOKENS if asks_for_ids else 0)
    assert whole[3]["completion_tokens"] == ANSWER_TOKENS
    stream = _streamed(router, path, body | {"cache_salt": salt()})
    events = [next(stream) for _ in range(SEEN_EVENTS)]
    engines = json.loads(_get(router.admin_url + "/health"))["engines"]
    busy = {one["url"] for one in engines if one["role"] == "decode" and one["in_flight"]}
    (serving,) = [engine for engine in many.decode if engine.url in busy]
    serving.kill()
    events += list(stream)
    continued = _read(events)
    assert continued[:4] == whole[:4]
    assert len(continued[4]) == 1
    metrics = _get(router.admin_url + "/metrics").decode()
    assert 'kvloop_router_streams_continued_total{outcome="continued"}' in metrics
    assert 'streams_continued_total{outcome="failed"}' not in metrics
