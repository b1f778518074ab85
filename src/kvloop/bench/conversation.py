"""Two-turn conversations of planned length, in tokens as the engine itself counts them.

The measured turn is to have a given number of prompt tokens, of which about `NEW_TOKENS` are new to decode:

    prompt(turn 2) = prompt(turn 1) + answer + new        decode holds prompt(turn 1) + answer - 1

So the first prompt is planned short by the answer and the new tokens, and the second is fitted once the
answer is known. Words are fitted by bisection: more words are never fewer tokens. Each conversation begins
with words of its own, so nothing of one is a prefix of another.
"""

import json
import random
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass

from kvloop.errors import UserError
from kvloop.local.chat import TURN_TIMEOUT_S, Message

NEW_TOKENS = 115
ANSWER_TOKENS = 16
TOLERANCE_TOKENS = 6
"""How far a prompt may be from its planned size: a word may be several tokens."""
MAX_WORDS = 100_000

_WORDS = (
    *(
        "amber",
        "anchor",
        "autumn",
        "basin",
        "bridge",
        "candle",
        "carbon",
        "circle",
        "cloud",
        "copper",
        "coral",
    ),
    *("cotton", "creek", "crystal", "desert", "dragon", "eagle", "engine", "fabric", "feather", "field"),
    *(
        "forest",
        "garden",
        "granite",
        "harbor",
        "island",
        "jacket",
        "jungle",
        "lemon",
        "marble",
        "meadow",
        "mirror",
    ),
    *("mountain", "needle", "ocean", "palace", "pepper", "planet", "rabbit", "ribbon", "river", "rocket"),
    *("shadow", "silver", "spring", "stone", "summer", "temple", "thunder", "timber", "tunnel", "valley"),
    *("velvet", "violet", "water", "window", "winter"),
)

Count = Callable[[list[Message]], int]
"""Tokens of a conversation's prompt, chat template included."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Prompt tokens of the first turn and of the measured one."""

    first_tokens: int
    measured_tokens: int


def plan(measured_tokens: int, answer_tokens: int = ANSWER_TOKENS, new_tokens: int = NEW_TOKENS) -> Plan:
    """The turns' sizes. Raises `UserError` where the measured turn is too short for what is new in it."""
    first = measured_tokens - answer_tokens - new_tokens
    if first < new_tokens:
        raise UserError(
            f"a turn of {measured_tokens} tokens cannot have {new_tokens} new ones after a history"
        )
    return Plan(first, measured_tokens)


def fit(words: list[str], target_tokens: int, count: Callable[[str], int]) -> str:
    """The longest run of `words` for which `count` is not above `target_tokens`.

    Raises `UserError` if that is more than `TOLERANCE_TOKENS` below it: there are too few words, or even
    none of them are too many.
    """
    low, high = 0, len(words)
    while low < high:
        middle = (low + high + 1) // 2
        if count(" ".join(words[:middle])) <= target_tokens:
            low = middle
        else:
            high = middle - 1
    text = " ".join(words[:low])
    tokens = count(text)
    if not target_tokens - TOLERANCE_TOKENS <= tokens <= target_tokens:
        raise UserError(f"no prompt of {target_tokens} tokens can be made: the nearest has {tokens}")
    return text


def words(seed: str, number: int) -> list[str]:
    """`number` words, the same for the same seed, and from the start different for different ones."""
    drawn = random.Random(seed)
    return [drawn.choice(_WORDS) for _ in range(number)]


def first_turn(seed: str, tokens: int, count: Count) -> list[Message]:
    """A conversation's first request, `tokens` tokens long."""

    def messages(text: str) -> list[Message]:
        return [
            {"role": "system", "content": f"{seed}. You are given words; say what they have in common."},
            {"role": "user", "content": text},
        ]

    filler = words(seed, min(MAX_WORDS, tokens))
    return messages(fit(filler, tokens, lambda text: count(messages(text))))


def next_turn(history: list[Message], answer: str, seed: str, tokens: int, count: Count) -> list[Message]:
    """The request after `answer`, `tokens` tokens long; different seeds make different forks."""
    before: list[Message] = [*history, {"role": "assistant", "content": answer}]

    def messages(text: str) -> list[Message]:
        return [*before, {"role": "user", "content": text}]

    filler = words(f"{seed} next", NEW_TOKENS * 4)
    return messages(fit(filler, tokens, lambda text: count(messages(text))))


def counter(engine_url: str, model: str) -> Count:
    """Counts with the tokenizer and chat template of the engine at `engine_url` (vLLM's `/tokenize`)."""

    def count(messages: list[Message]) -> int:
        body = json.dumps({"model": model, "messages": messages, "add_generation_prompt": True}).encode()
        request = urllib.request.Request(engine_url + "/tokenize", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=TURN_TIMEOUT_S) as answer:
            return int(json.loads(answer.read())["count"])

    return count
