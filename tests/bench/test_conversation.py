"""The planner: turns of the size asked for, whatever the tokenizer, and never the same conversation twice."""

import pytest

from kvloop.bench.conversation import (
    ANSWER_TOKENS,
    NEW_TOKENS,
    TOLERANCE_TOKENS,
    first_turn,
    fit,
    next_turn,
    plan,
    words,
)
from kvloop.errors import UserError
from kvloop.local.chat import Message

TEMPLATE_TOKENS = 7


def count(messages: list[Message]) -> int:
    """A tokenizer with a template: some words are several tokens."""
    parts = [word for message in messages for word in message["content"].split()]
    return sum(1 + len(word) // 6 for word in parts) + TEMPLATE_TOKENS * len(messages)


@pytest.mark.parametrize("tokens", [570, 1_900, 5_600])
def test_both_turns_have_their_size(tokens: int) -> None:
    """The measured prompt has the tokens asked for, of which what decode lacks is new."""
    planned = plan(tokens)
    history = first_turn("run 1", planned.first_tokens, count)
    answer = " ".join(["word"] * ANSWER_TOKENS)
    measured = next_turn(history, answer, "run 1", tokens, count)
    assert 0 <= planned.first_tokens - count(history) <= TOLERANCE_TOKENS
    assert 0 <= tokens - count(measured) <= TOLERANCE_TOKENS
    new = count(measured) - count(history) - ANSWER_TOKENS
    assert abs(new - NEW_TOKENS) <= TOLERANCE_TOKENS
    assert measured[: len(history)] == history


def test_a_turn_too_short_for_a_history_is_refused() -> None:
    """There must be something to return."""
    with pytest.raises(UserError, match="cannot have"):
        plan(2 * NEW_TOKENS)


def test_conversations_differ_from_their_first_words() -> None:
    """Nothing of one conversation is a prefix of another, and a seed gives the same one again."""
    one, other = (first_turn(seed, 400, count) for seed in ("run 1", "run 2"))
    assert one[0] != other[0]
    assert one == first_turn("run 1", 400, count)
    assert words("a", 50) != words("b", 50)


def test_forks_share_everything_but_their_last_message() -> None:
    """Two ways of measuring one conversation have prompts of one length and one history."""
    history = first_turn("run 1", 400, count)
    forks = [next_turn(history, "an answer", seed, 520, count) for seed in ("a", "b")]
    assert forks[0][:-1] == forks[1][:-1]
    assert forks[0][-1] != forks[1][-1]
    assert abs(count(forks[0]) - count(forks[1])) <= TOLERANCE_TOKENS


def test_fit_finds_the_longest_that_fits() -> None:
    """As many words as fit exactly."""
    assert fit(["a"] * 10, 5, lambda text: len(text.split())) == "a a a a a"


@pytest.mark.parametrize(("number", "target"), [(10, 100), (10, -20)])
def test_what_cannot_be_fitted_is_an_error(number: int, target: int) -> None:
    """Too few words, or no room even for none of them, is said and not measured."""
    with pytest.raises(UserError, match="nearest"):
        fit(["a"] * number, target, lambda text: len(text.split()))
