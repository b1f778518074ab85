"""Turns that decode computes itself, from what it kept: the same answers, and a lease for the next turn."""

import json
import urllib.request
from typing import Any

from kvloop.local.stack import Router
from tests.e2e.conftest import BLOCK_TOKENS
from tests.e2e.leases.conftest import StartRouter
from tests.e2e.test_histories import opening
from tests.e2e.test_router import Answer, Client, grow
from tests.e2e.turns import Pair

APPEND_FIRST = "tests.e2e.leases.append_first:AppendFirst"


def decision(router: Router, answer: Answer) -> dict[str, Any]:
    """What the router says of a turn."""
    url = f"{router.admin_url}/decisions/{answer.headers['x-request-id']}"
    with urllib.request.urlopen(url) as said:
        found: dict[str, Any] = json.loads(said.read())
    return found


def test_an_appended_turn(pair: Pair, start_router: StartRouter) -> None:
    """Three turns, streamed and not: every answer is a cold engine's, decode finds whole blocks of what it
    kept, and computes no more than what is new and a block."""
    router = start_router(placement=APPEND_FIRST)
    client = Client(router.url)
    messages = opening("orchards")
    answer = client.chat(messages)
    assert answer.route == "recompute"
    for question, stream in (("What next?", False), ("And after that?", True)):
        first = decision(router, answer)
        held = first["decode"]["prompt_tokens"] + len(answer.tokens) - 1
        messages = grow(messages, answer, question)
        answer = client.chat(messages, {"stream": stream})
        assert answer.tokens == pair.oracle(messages)
        assert answer.route == "append"
        found = decision(router, answer)
        assert found["prefill"] is None
        assert found["believed"]["held_tokens"] == held
        assert held - BLOCK_TOKENS < found["decode"]["local_tokens"] <= held
        assert found["decode"]["returned_tokens"] == 0


def test_prefill_reads_back_what_was_appended(pair: Pair, start_router: StartRouter) -> None:
    """What decode computed by itself is as good as what it was handed."""
    client = Client(start_router(placement=APPEND_FIRST).url)
    messages = opening("meadows")
    messages = grow(messages, client.chat(messages), "And?")
    appended = client.chat(messages)
    assert appended.route == "append"
    messages = grow(messages, appended, "And then?")
    other = Client(start_router().url)  # knows nothing of it: one turn through it leads to its lease
    assert other.chat(messages[:-2]).tokens == appended.tokens
    returned = other.chat(messages)
    assert returned.route == "return"
    assert returned.tokens == pair.oracle(messages)


def test_an_edited_history_is_not_appended_to(pair: Pair, start_router: StartRouter) -> None:
    """Where decode does not hold what the router believes, it computes: the answer is a cold engine's."""
    client = Client(start_router(placement=APPEND_FIRST).url)
    messages = opening("castles")
    first = client.chat(messages, {"conversation_id": "c"})
    edited = grow(messages, first, "Go on.")
    edited[1]["content"] = "Something that nobody said."
    answer = client.chat(edited, {"conversation_id": "c"})
    assert answer.tokens == pair.oracle(edited)
