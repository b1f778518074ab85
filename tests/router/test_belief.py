"""A request's size in tokens is estimated alike on every endpoint, and corrected by what engines count."""

import json

import pytest

from kvloop.core.report import TurnReport
from kvloop.router.belief import Beliefs, size_of
from kvloop.wire.openai import Endpoint, Generation, read_generation

LATIN = "The quick brown fox jumps over the lazy dog. " * 200
CHINESE = "敏捷的棕色狐狸跳过了懒狗。" * 200


def request(endpoint: Endpoint, text: str) -> Generation:
    """One that says this, on any endpoint."""
    message = [{"role": "user", "content": text}]
    name = {Endpoint.COMPLETIONS: "prompt", Endpoint.RESPONSES: "input"}.get(endpoint, "messages")
    body = {"model": "m", name: message if name == "messages" else text}
    return read_generation(endpoint, json.dumps(body, ensure_ascii=False).encode())


def tokens(beliefs: Beliefs, sent: Generation) -> int:
    """How many it is believed to be."""
    return beliefs.ask(sent, size_of(sent), None).tokens


@pytest.mark.parametrize("endpoint", Endpoint)
def test_estimates(endpoint: Endpoint) -> None:
    """The same text is about as long everywhere."""
    beliefs = Beliefs()
    for text in (LATIN, CHINESE):
        chat = tokens(beliefs, request(Endpoint.CHAT, text))
        assert chat > 100
        assert tokens(beliefs, request(endpoint, text)) == pytest.approx(chat, rel=0.05)


@pytest.mark.parametrize("endpoint", Endpoint)
def test_engines_counts_correct_them(endpoint: Endpoint) -> None:
    """For texts of that script alone."""
    beliefs = Beliefs()
    sent, other = request(endpoint, LATIN), request(endpoint, CHINESE)
    before, of_other = tokens(beliefs, sent), tokens(beliefs, other)
    for _ in range(50):
        beliefs.counted(size_of(sent), TurnReport(4 * before, 0, 0, 4 * before, None))
    assert tokens(beliefs, sent) > 2 * before
    assert tokens(beliefs, other) == of_other
