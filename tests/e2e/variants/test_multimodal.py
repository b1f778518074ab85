"""Images: the same placeholder tokens stand for any image, so what is proven ends where another one
starts."""

from typing import Any

import pytest

from tests.e2e.test_histories import SEGMENT, Messages, assistant, check, opening, user
from tests.e2e.turns import Pair, Turn
from tests.e2e.variants.models import IMAGE_TOKENS, image_part

FILLER = " ".join(f"word{i}" for i in range(40))


def looking_at(*images: dict[str, Any], text: str = "What is it? " + FILLER) -> dict[str, Any]:
    """A user's message with images and some text after them."""
    return {"role": "user", "content": [*images, {"type": "text", "text": text}]}


def shown(pair: Pair, *images: dict[str, Any]) -> tuple[Messages, Turn]:
    """A conversation that begins with text and in which images are then shown; the turn that saw them."""
    messages = opening("pictures")
    first = pair.turn(messages)
    messages = [*messages, assistant(first.text), looking_at(*images)]
    turn = pair.turn(messages, first.filed)
    check(pair, turn, messages)
    assert turn.returned > 0
    return messages, turn


def tokens_of(pair: Pair, messages: Messages) -> int:
    """How long a history is."""
    account = pair.prefill_hop(messages, add_generation_prompt=False)["kvloop_turn"]
    return int(account["prompt_tokens"])


def test_images_are_seen(pair: Pair) -> None:
    """Two images, two answers, and each takes its tokens: else nothing below would show anything."""
    text = opening("pictures")[0]["content"]
    answers = [pair.oracle([looking_at(image_part(seed), text=text)]) for seed in (1, 2)]
    assert answers[0] != answers[1]
    seen = tokens_of(pair, [looking_at(image_part(1), text=text)])
    assert seen >= tokens_of(pair, [looking_at(text=text)]) + IMAGE_TOKENS


def test_the_same_image_is_read_back(pair: Pair) -> None:
    """A history with an image in it, sent again: everything held comes back."""
    messages, last = shown(pair, image_part(1))
    messages = [*messages, assistant(last.text), user("And?")]
    turn = pair.turn(messages, last.filed)
    check(pair, turn, messages)
    assert turn.returned == last.account["prompt_tokens"] + len(last.tokens) - 1


@pytest.mark.parametrize(
    ("held", "asked", "same"),
    [
        pytest.param((1,), (2,), 0, id="another"),
        pytest.param((1,), (), 0, id="none"),
        pytest.param((1,), (1, 2), 1, id="one more"),
        pytest.param((1, 2), (2, 1), 0, id="other order"),
    ],
)
def test_other_images_end_what_is_proven(
    pair: Pair, held: tuple[int, ...], asked: tuple[int, ...], same: int
) -> None:
    """The same text with other images in it: what came before the first other one is read back, and nothing
    after."""
    messages, last = shown(pair, *map(image_part, held))
    edited = [*messages[:2], looking_at(*map(image_part, asked)), assistant(last.text), user("And?")]
    turn = pair.turn(edited, last.filed)
    check(pair, turn, edited)
    ends_at = tokens_of(pair, messages[:2]) + same * IMAGE_TOKENS
    assert ends_at // SEGMENT * SEGMENT <= turn.returned < ends_at + SEGMENT
    assert turn.tokens != pair.oracle([*messages, assistant(last.text), user("And?")])


def test_images_that_clients_name(pair: Pair) -> None:
    """vLLM believes a client's name for an image and hashes nothing: such a turn is neither kept nor read
    back."""
    named = [image_part(seed) | {"uuid": "holiday"} for seed in (1, 2)]
    messages = opening("names")
    first = pair.turn(messages)
    messages = [*messages, assistant(first.text), looking_at(named[0])]
    turn = pair.turn(messages, first.filed)
    assert (turn.returned, turn.reason, turn.filed) == (0, "media_named", None)
