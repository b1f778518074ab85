"""Turns by token ids: the same prompts, token for token, to real engines and to simulated ones.

A real tokenizer and the simulated one make different tokens of one text. Completions take token ids, and an
answer that is not streamed brings its own, so a conversation can be held that has the same length at every
turn whoever answers, and of which it is known how many tokens decode holds: all of the prompt and the answer
but the answer's last token, which was never computed.
"""

import http.client
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kvloop.bench.engine import READ_BACK, counted
from kvloop.core.chain import SEGMENT_TOKENS
from kvloop.errors import UserError
from kvloop.local.chat import TURN_TIMEOUT_S, served_model
from kvloop.local.stack import Stack

NEW_TOKENS = 115
"""Of a timed turn, as in `conversation`: what decode does not hold."""
ANSWER_TOKENS = 16
_TOKEN_IDS = range(1000, 9000)  # plain ones of any vocabulary
_EVENT = b"data: {"


@dataclass(frozen=True, slots=True)
class TokenTurn:
    """One answered turn. `answer` is empty for a streamed one, `first_token_s` 0 for one that is not."""

    route: str
    reused_tokens: int
    answer: tuple[int, ...] = ()
    first_token_s: float = 0.0
    per_token_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Forks:
    """One conversation's timed turn twice: with its history read back, and computed anew."""

    returned: TokenTurn
    one_way: TokenTurn


def token_ids(seed: str, number: int) -> list[int]:
    """`number` token ids, the same for the same seed."""
    return random.Random(seed).choices(_TOKEN_IDS, k=number)


def known_reuse(history: Sequence[int], prompt: Sequence[int]) -> int:
    """How many tokens of `prompt` decode can give back, whose last turn came to `history`.

    A prompt that goes on from all that was computed matches to the token, any other one to the last whole
    segment. Less than one segment is not worth a read.
    """
    held = history[:-1]
    shared = 0
    for mine, theirs in zip(prompt, held, strict=False):
        if mine != theirs:
            break
        shared += 1
    matched = shared if shared == len(held) else shared // SEGMENT_TOKENS * SEGMENT_TOKENS
    return matched if matched >= SEGMENT_TOKENS else 0


class Side:
    """Engines, real or simulated, behind two routers: one that returns, and one that does not."""

    def __init__(self, name: str, stack: Stack, one_way_url: str) -> None:
        self.name = name
        self._stack = stack
        self._one_way_url = one_way_url
        self._model = served_model(stack.url)

    def turn(self, prompt: Sequence[int], answer_tokens: int, session: str) -> TokenTurn:
        """A turn that is not timed. Raises `UserError` where prefill's own count is not the router's."""
        prefill = self._stack.prefill[0].url
        before = counted(prefill, READ_BACK)
        turn = whole(self._stack.url, self._body(prompt, answer_tokens), session)
        loaded = int(counted(prefill, READ_BACK) - before)
        if loaded != turn.reused_tokens:
            raise UserError(f"{self.name}: prefill loaded {loaded}, the router says {turn.reused_tokens}")
        return turn

    def forks(self, seed: str, tokens: int, *, returned_first: bool) -> Forks:
        """A fresh conversation whose second turn is timed. Raises `UserError` for one that is not as
        planned."""
        first = token_ids(seed, tokens - ANSWER_TOKENS - NEW_TOKENS)
        history = [*first, *self.turn(first, ANSWER_TOKENS, seed).answer]
        taken: dict[str, TokenTurn] = {}
        ways = [("return", self._stack.url, len(history) - 1), ("recompute", self._one_way_url, 0)]
        for route, url, reused in ways if returned_first else reversed(ways):
            prompt = [*history, *token_ids(f"{seed} {route}", NEW_TOKENS)]
            turn = taken[route] = timed(url, self._body(prompt, ANSWER_TOKENS), seed)
            if (turn.route, turn.reused_tokens) != (route, reused):
                raise UserError(f"{self.name}, {tokens} tokens: {turn} should be {route} of {reused}")
        return Forks(taken["return"], taken["recompute"])

    def _body(self, prompt: Sequence[int], answer_tokens: int) -> dict[str, Any]:
        body = {"model": self._model, "prompt": list(prompt), "temperature": 0, "ignore_eos": True}
        return body | {"max_tokens": answer_tokens}


def whole(url: str, body: dict[str, Any], session: str) -> TokenTurn:
    """A completion that is not streamed, with its token ids. Raises `UserError`."""
    connection, response, _ = _posted(url, body | {"return_token_ids": True}, session)
    try:
        answer = json.loads(response.read())["choices"][0]["token_ids"]
        turn = _turn(response, answer=tuple(answer))
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
        raise UserError(f"a turn was not answered with token ids: {error!r}") from error
    finally:
        connection.close()
    if len(turn.answer) != body["max_tokens"]:
        raise UserError(f"an answer of {len(turn.answer)} tokens, {body['max_tokens']} were wanted")
    return turn


def timed(url: str, body: dict[str, Any], session: str) -> TokenTurn:
    """A streamed completion, timed from before it is sent to its first event, and from there to its last.
    Raises `UserError`."""
    connection, response, began_s = _posted(url, body | {"stream": True}, session)
    try:
        arrived_s = arrivals_s(response, began_s)
    except (OSError, http.client.HTTPException) as error:
        raise UserError(f"a turn broke off: {error!r}") from error
    finally:
        connection.close()
    if not arrived_s:
        raise UserError("a turn was answered without a token")
    per_token_s = (arrived_s[-1] - arrived_s[0]) / max(1, body["max_tokens"] - 1)
    return _turn(response, first_token_s=arrived_s[0], per_token_s=per_token_s)


def arrivals_s(lines: Any, began_s: float) -> list[float]:
    """When each event with a choice in it came. Raises `UserError` for an event that is an error."""
    found: list[float] = []
    for line in lines:
        if line.startswith(_EVENT):
            arrived_s = time.monotonic() - began_s
            event = json.loads(line.partition(b" ")[2])
            if "error" in event:
                raise UserError(f"a turn was answered with an error: {event['error']}")
            if event.get("choices"):
                found.append(arrived_s)
    return found


def _posted(
    url: str, body: dict[str, Any], session: str
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse, float]:
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=TURN_TIMEOUT_S)
    data = json.dumps(body)
    headers = {"content-type": "application/json", "x-session-id": session}
    began_s = time.monotonic()
    try:
        connection.request("POST", "/v1/completions", data, headers)
        response = connection.getresponse()
        if response.status == http.client.OK:
            return connection, response, began_s
        detail = f"HTTP {response.status}: {response.read(500)!r}"
    except (OSError, http.client.HTTPException) as error:
        detail = repr(error)
    connection.close()
    raise UserError(f"a turn was not answered: {detail}")


def _turn(response: http.client.HTTPResponse, **measured: Any) -> TokenTurn:
    return TokenTurn(
        route=response.getheader("x-kvloop-route") or "",
        reused_tokens=int(response.getheader("x-kvloop-reused-tokens") or 0),
        **measured,
    )
