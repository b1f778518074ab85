"""Turns by token ids: what is read off an answer, what is known to be held, and which turns count."""

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloop.bench import token_turn
from kvloop.bench.token_turn import ANSWER_TOKENS, NEW_TOKENS, Side, TokenTurn, known_reuse, timed, whole
from kvloop.errors import UserError

BODY: dict[str, Any] = {"prompt": [1, 2], "max_tokens": 2}
HEADERS = {"x-kvloop-route": "return", "x-kvloop-reused-tokens": "128"}


@contextmanager
def answering(status: int, *parts: bytes) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that gives everybody the same answer; and the requests that it got."""
    got: list[dict[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(status)
            for name, value in HEADERS.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(b"".join(parts))

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", got
        finally:
            server.shutdown()
            thread.join()


def event(value: dict[str, Any]) -> bytes:
    """One event of a stream."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def test_a_whole_answer_brings_its_tokens() -> None:
    """And what the router says of the turn."""
    with answering(200, json.dumps({"choices": [{"text": "x", "token_ids": [7, 8]}]}).encode()) as (url, got):
        assert whole(url, BODY, "a") == TokenTurn("return", 128, answer=(7, 8))
    assert got == [BODY | {"return_token_ids": True}]


@pytest.mark.parametrize(
    "answer", [b"", b"[]", b'{"choices": [{}]}', b'{"choices": [{"token_ids": [7]}]}', b'{"choices": 5}']
)
def test_an_answer_without_its_tokens_does_not_count(answer: bytes) -> None:
    """None, and fewer than were asked for."""
    with answering(200, answer) as (url, _), pytest.raises(UserError):
        whole(url, BODY, "a")


def test_a_streamed_answer_is_timed() -> None:
    """From its first event with a choice in it; usage has none."""
    chunk, usage = event({"choices": [{"text": ""}]}), event({"choices": [], "usage": {}})
    with answering(200, usage, chunk, chunk, usage, b"data: [DONE]\n\n") as (url, got):
        turn = timed(url, BODY, "a")
    assert turn.first_token_s > 0 <= turn.per_token_s
    assert replace(turn, first_token_s=0, per_token_s=0) == TokenTurn("return", 128)
    assert got == [BODY | {"stream": True}]


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (503, b"no"),
        (200, event({"choices": [{"text": "a"}]}) + event({"error": "no"})),
        (200, b""),
        (200, event({"choices": []})),
    ],
)
def test_a_stream_that_goes_wrong_does_not_count(status: int, answer: bytes) -> None:
    """An error before it or in it, and one without a token."""
    with answering(status, answer) as (url, _), pytest.raises(UserError):
        timed(url, BODY, "a")


def test_what_decode_holds_of_a_prompt() -> None:
    """All but the last token where the prompt goes on from it; whole segments of a changed one; nothing of
    less than a segment."""
    history = list(range(200))
    assert known_reuse(history, [*history, 1, 2]) == 199
    assert known_reuse(history, [*history[:199], 999]) == 199
    assert known_reuse(history, [*history[:198], 999]) == 192
    assert known_reuse(history, [*history[:130], 999, *history[131:]]) == 128
    assert known_reuse(history, history[:63]) == 0
    assert known_reuse(history[:64], [*history[:64], 999]) == 0
    assert known_reuse(history[:65], [*history[:65], 999]) == 64
    assert known_reuse([], history) == 0


@given(st.integers(0, 300), st.integers(0, 301), st.integers(0, 130), st.booleans())
def test_what_is_held_is_the_longest_of_all_that_may_be(
    computed: int, keep: int, new: int, is_same: bool
) -> None:
    """Of all lengths in which the two are the same: whole segments, or all that decode has computed. The new
    tokens may happen to be the old ones."""
    history = [number % 7 for number in range(computed + 1)]
    prompt = [*history[:keep], *(number % 7 if is_same else 7 for number in range(keep, keep + new))]
    lengths = [*range(64, computed, 64), *([computed] if computed >= 64 else [])]
    same = [length for length in lengths if prompt[:length] == history[:length]]
    assert known_reuse(history, prompt) == max(same, default=0)


class _Stack:
    url = "return"

    class _Engine:
        url = "prefill"

    prefill = (_Engine(),)


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> Side:
    """Engines that do as they should: the routers' URLs are the routes that they take."""
    monkeypatch.setattr(token_turn, "served_model", lambda *_: "m")
    monkeypatch.setattr(token_turn, "counted", lambda *_: 0.0)
    first = TokenTurn("recompute", 0, answer=tuple(range(ANSWER_TOKENS)))
    monkeypatch.setattr(token_turn, "whole", lambda *_: first)
    monkeypatch.setattr(token_turn, "timed", _as_planned)
    return Side("s", _Stack(), "recompute")  # type: ignore[arg-type]


def _as_planned(url: str, body: dict[str, Any], _: str) -> TokenTurn:
    held = len(body["prompt"]) - NEW_TOKENS - 1
    return TokenTurn(url, held if url == "return" else 0, first_token_s=1.0 if url == "return" else 2.0)


def test_two_forks_of_a_conversation_are_timed(side: Side) -> None:
    """Each by its own router, whichever is first, with all of the history read back or nothing."""
    for first in (True, False):
        forks = side.forks("seed", 570, returned_first=first)
        assert forks.returned == TokenTurn("return", 570 - NEW_TOKENS - 1, first_token_s=1.0)
        assert forks.one_way == TokenTurn("recompute", 0, first_token_s=2.0)


@pytest.mark.parametrize(
    ("url", "changes"),
    [
        ("return", {"reused_tokens": 64}),
        ("return", {"route": "recompute", "reused_tokens": 0}),
        ("recompute", {"route": "return", "reused_tokens": 454}),
        ("recompute", {"reused_tokens": 454}),
    ],
)
def test_forks_that_are_not_as_planned_do_not_count(
    side: Side, monkeypatch: pytest.MonkeyPatch, url: str, changes: dict[str, Any]
) -> None:
    """Less read back than decode holds, nothing, or something where nothing should be."""

    def otherwise(asked: str, body: dict[str, Any], session: str) -> TokenTurn:
        turn = _as_planned(asked, body, session)
        return replace(turn, **changes) if asked == url else turn

    monkeypatch.setattr(token_turn, "timed", otherwise)
    with pytest.raises(UserError, match="should be"):
        side.forks("seed", 570, returned_first=True)


def test_a_turn_counts_only_if_prefill_counts_the_same(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """The router's account and the engine's own counter."""
    counts = iter([100.0, 228.0, 300.0, 400.0])
    monkeypatch.setattr(token_turn, "counted", lambda *_: next(counts))
    told = TokenTurn("return", 128, answer=(1,))
    monkeypatch.setattr(token_turn, "whole", lambda *_: told)
    assert side.turn([1], 1, "a") == told
    with pytest.raises(UserError, match="prefill loaded 100"):
        side.turn([1], 1, "a")
