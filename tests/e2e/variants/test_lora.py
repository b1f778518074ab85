"""LoRA adapters: KV computed under one is never used for another, nor for the base model, nor for newer
weights of its own."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvloop.local.stack import Stack
from tests.e2e.test_histories import Messages, assistant, check, opening, user
from tests.e2e.turns import Pair, Turn, post
from tests.e2e.variants.conftest import ADAPTERS, MODEL, under
from tests.e2e.variants.models import write_adapter

MODELS = (MODEL, *ADAPTERS)


@pytest.fixture(scope="module")
def first_turns(variant_stack: Stack) -> dict[str, tuple[Messages, Turn]]:
    """The same first message under each model: the history that it leaves, and its turn."""
    messages = opening("adapters")
    turns = {}
    for model in MODELS:
        turn = under(variant_stack, model).turn(messages)
        turns[model] = ([*messages, assistant(turn.text), user("And?")], turn)
    return turns


def test_adapters_answer_differently(first_turns: dict[str, tuple[Messages, Turn]]) -> None:
    """Else nothing below would show anything."""
    answers = {tuple(turn.tokens) for _, turn in first_turns.values()}
    assert len(answers) == len(MODELS)


@pytest.mark.parametrize("asked", MODELS)
@pytest.mark.parametrize("held", MODELS)
def test_only_the_same_adapter_continues(
    variant_stack: Stack, first_turns: dict[str, tuple[Messages, Turn]], held: str, asked: str
) -> None:
    """The same messages, with the handle of each model presented under each: own KV is read back, foreign KV
    is not, and the answer is a cold engine's."""
    pair = under(variant_stack, asked)
    messages, first = first_turns[held]
    turn = pair.turn(messages, first.filed)
    check(pair, turn, messages)
    if held == asked:
        assert turn.returned == first.account["prompt_tokens"] + len(first.tokens) - 1
    else:
        assert (turn.returned, turn.reason) == (0, "wrong_root")


def load(pair: Pair, name: str, path: Path, *, in_place: bool = False) -> None:
    """Load an adapter into both engines while they run."""
    for engine in (pair.prefill, pair.decode):
        body: dict[str, Any] = {"lora_name": name, "lora_path": str(path), "load_inplace": in_place}
        post(engine.url + "/v1/load_lora_adapter", body)


def unload(pair: Pair, name: str) -> None:
    """Unload an adapter from both engines."""
    for engine in (pair.prefill, pair.decode):
        post(engine.url + "/v1/unload_lora_adapter", {"lora_name": name})


def test_new_weights_under_an_old_name(variant_stack: Stack, folder: Path) -> None:
    """An adapter that is loaded again from the same path with other weights is another adapter; KV of the
    old ones is not read, and KV of the new ones is."""
    pair = under(variant_stack, "changing")
    messages = opening("weights")
    load(pair, "changing", write_adapter(folder, seed=10))
    before = pair.turn(messages)
    unload(pair, "changing")
    load(pair, "changing", write_adapter(folder, seed=11))
    messages = [*messages, assistant(before.text), user("And?")]
    turn = pair.turn(messages, before.filed)
    check(pair, turn, messages)
    assert (turn.returned, turn.reason) == (0, "wrong_root")
    messages = [*messages, assistant(turn.text), user("And now?")]
    again = pair.turn(messages, turn.filed)
    check(pair, again, messages)
    assert again.returned > turn.account["prompt_tokens"]


def test_adapter_that_changes_in_place(variant_stack: Stack, folder: Path) -> None:
    """vLLM reads an adapter that was loaded in place anew at any time, so nothing of it can be proven."""
    pair = under(variant_stack, "fluid")
    messages = opening("fluids")
    load(pair, "fluid", write_adapter(folder, seed=12))
    before = pair.turn(messages)
    assert before.filed is not None
    write_adapter(folder, seed=13)
    load(pair, "fluid", folder, in_place=True)
    messages = [*messages, assistant(before.text), user("And?")]
    turn = pair.turn(messages, before.filed)
    check(pair, turn, messages)
    assert (turn.returned, turn.reason, turn.filed) == (0, "adapter_not_fixed", None)


def test_adapters_through_a_router(variant_stack: Stack) -> None:
    """A client that takes its history to another adapter gets that adapter's answer; the one that it came
    from is read back."""
    router = variant_stack.add_router("router-adapters", ("--policy", "sticky"))
    pair = under(variant_stack)

    def ask(model: str, messages: Messages) -> dict[str, Any]:
        body = {"model": model, "messages": messages, "max_tokens": 16, "temperature": 0}
        answer = json.loads(post(router.url + "/v1/chat/completions", body | {"return_token_ids": True}))
        pair.model = model
        assert answer["choices"][0]["token_ids"] == pair.oracle(messages)
        return answer  # type: ignore[no-any-return]

    messages = opening("routes")
    first = ask(MODEL, messages)
    messages = [*messages, assistant(first["choices"][0]["message"]["content"]), user("And?")]
    for model in ADAPTERS:
        assert ask(model, messages)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    again = ask(MODEL, messages)
    held = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"] - 1
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= held
    router.shut_down()
