"""What a history may do between two turns, and what of it is read back. Every answer equals a cold
engine's."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.conftest import BLOCK_TOKENS
from tests.e2e.turns import Pair, Turn, salt

Messages = list[dict[str, Any]]
SEGMENT = 64


def user(text: str) -> dict[str, Any]:
    """A user's message."""
    return {"role": "user", "content": text}


def assistant(text: Any) -> dict[str, Any]:
    """The model's message."""
    return {"role": "assistant", "content": text}


def opening(subject: str, words: int = 80) -> Messages:
    """A first message of a few hundred tokens that nobody else sends."""
    return [user(f"{subject} {salt()}: " + " ".join(f"{subject}{i}" for i in range(words)))]


def check(pair: Pair, turn: Turn, messages: Messages, **fields: Any) -> None:
    """The turn's answer is a cold engine's, and the account adds up to the prompt."""
    assert turn.tokens == pair.oracle(messages, **fields)
    account = turn.account
    total = account["local_tokens"] + account["returned_tokens"] + account["computed_tokens"]
    assert total == account["prompt_tokens"]
    assert turn.cached_tokens == account["local_tokens"] + account["returned_tokens"]
    assert (turn.reason is None) == (turn.returned > 0)


def converse(
    pair: Pair, messages: Messages, filed: Any, question: str, **fields: Any
) -> tuple[Messages, Turn]:
    """One turn and the history that it leaves behind, with the next question asked."""
    turn = pair.turn(messages, filed, **fields)
    check(pair, turn, messages)
    return [*messages, assistant(turn.text), user(question)], turn


@pytest.mark.parametrize("stream", [False, True])
def test_conversation(pair: Pair, stream: bool) -> None:
    """In a three-turn chat everything but the new suffix is read back, streamed or not."""
    messages, first = converse(pair, opening("rivers"), None, "Which is the longest?", stream=stream)
    assert (first.returned, first.reason) == (0, "no_handle")
    for question in ("And the widest one?", "Thank you, and the deepest?"):
        before = messages
        messages, turn = converse(pair, messages, first.filed, question, stream=stream)
        held = first.account["prompt_tokens"] + len(first.tokens) - 1
        # The last token of the answer (its end mark, or cut off) has no KV: the history matches up to it.
        assert turn.returned == held or turn.returned == held // SEGMENT * SEGMENT, before
        assert turn.returned > held - SEGMENT
        assert len(turn.filed["kvloop_handle"]) <= 300  # type: ignore[index]
        first = turn


def test_tool_call_turns(pair: Pair) -> None:
    """A turn that carries tools, a tool call and its result reuses what came before it."""
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
    fields: dict[str, Any] = {"tools": tools, "tool_choice": "none"}
    messages = opening("cities")
    first = pair.turn(messages, **fields)
    check(pair, first, messages, **fields)
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "look_up", "arguments": '{"city":"Ulm"}'},
    }
    messages = [
        *messages,
        {"role": "assistant", "content": first.text, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": json.dumps({"people": 126_000})},
    ]
    second = pair.turn(messages, first.filed, **fields)
    check(pair, second, messages, **fields)
    assert second.returned >= first.account["prompt_tokens"] // SEGMENT * SEGMENT


def two_turns(pair: Pair, subject: str, **fields: Any) -> tuple[Messages, Turn]:
    """A conversation of two turns: its history, and the second turn, whose lease holds all of it."""
    messages = opening(subject)
    first = pair.turn(messages, **fields)
    messages = [
        *messages,
        assistant(first.text),
        user("Go on about " + " ".join(f"more{i}" for i in range(40))),
    ]
    second = pair.turn(messages, first.filed, **fields)
    return [*messages, assistant(second.text)], second


def test_reasoning_stripped_from_the_history(pair: Pair) -> None:
    """Where the client drops the reasoning from an old answer, only what precedes it is read back."""
    messages = opening("proofs")
    first = pair.turn(messages)
    edited = [*messages, assistant(first.text[len(first.text) // 2 :]), user("Why?")]
    second = pair.turn(edited, first.filed)
    check(pair, second, edited)
    assert second.returned == first.account["prompt_tokens"] // SEGMENT * SEGMENT


def test_middle_message_removed(pair: Pair) -> None:
    """A compacted history is proven up to the cut and no further."""
    history, last = two_turns(pair, "planets")
    compacted = [history[0], history[2], history[3], user("And then?")]
    turn = pair.turn(compacted, last.filed)
    check(pair, turn, compacted)
    first_message_tokens = pair.prefill_hop(history[:1])["kvloop_turn"]["prompt_tokens"]
    assert 0 < turn.returned <= first_message_tokens


def test_first_message_edited(pair: Pair) -> None:
    """An edit near the beginning leaves nothing that can be proven beyond it."""
    history, last = two_turns(pair, "oceans")
    edited = [user("Changed. " + history[0]["content"]), *history[1:], user("And?")]
    turn = pair.turn(edited, last.filed)
    check(pair, turn, edited)
    assert (turn.returned, turn.reason) == (0, "no_match")


def test_last_turn_regenerated(pair: Pair) -> None:
    """The same history again: the prompt is read back, its last answer is not part of it."""
    history, last = two_turns(pair, "islands")
    turn = pair.turn(history[:-1], last.filed)
    check(pair, turn, history[:-1])
    prompt = last.account["prompt_tokens"]
    assert turn.returned == prompt // SEGMENT * SEGMENT
    assert turn.tokens == last.tokens


@pytest.mark.parametrize(
    "rewrite",
    [
        pytest.param(lambda text: text + " ", id="trailing space"),
        pytest.param(lambda text: text + " \U0001f9ea\u200d\u2695", id="emoji"),
        pytest.param(lambda text: [{"type": "text", "text": text}], id="content parts"),
        pytest.param(lambda text: text.strip(), id="stripped"),
    ],
)
def test_answer_tokenised_differently(pair: Pair, rewrite: Any) -> None:
    """What the client's copy of an answer does to its tokens decides how far it matches, never what is
    said."""
    messages = opening("birds")
    first = pair.turn(messages)
    again = [*messages, assistant(rewrite(first.text)), user("More?")]
    second = pair.turn(again, first.filed)
    check(pair, second, again)
    assert second.returned >= first.account["prompt_tokens"] // SEGMENT * SEGMENT


def test_other_tools_with_the_same_messages(pair: Pair) -> None:
    """Tools come before the messages in the prompt: other tools, other tokens, no reuse of what follows."""
    history, last = two_turns(pair, "roads")
    messages = [*history, user("And?")]
    tools = [{"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}]
    fields: dict[str, Any] = {"tools": tools, "tool_choice": "none"}
    turn = pair.turn(messages, last.filed, **fields)
    check(pair, turn, messages, **fields)
    assert turn.returned == 0


def test_other_template_arguments(pair: Pair) -> None:
    """Without the generation prompt the prompt's end differs; what precedes it is still proven."""
    history, last = two_turns(pair, "winds")
    messages = [*history, user("And?")]
    turn = pair.turn(messages, last.filed, add_generation_prompt=False)
    check(pair, turn, messages, add_generation_prompt=False)
    assert turn.returned > 0


@pytest.mark.parametrize("forks", [2, 5])
def test_concurrent_forks(pair: Pair, forks: int) -> None:
    """Any number of branches read one lease at a time."""
    history, last = two_turns(pair, "trees")
    branches = [[*history, user(f"Branch {i}, please.")] for i in range(forks)]
    with ThreadPoolExecutor(forks) as pool:
        turns = list(pool.map(lambda branch: pair.turn(branch, last.filed), branches))
    for branch, turn in zip(branches, turns, strict=True):
        check(pair, turn, branch)
        assert turn.returned > last.account["prompt_tokens"] - SEGMENT


def test_prompt_shorter_than_what_decode_holds(pair: Pair) -> None:
    """A prompt that ends inside the held history is read back up to its last whole segment."""
    history, last = two_turns(pair, "stones")
    shorter = history[:1]
    turn = pair.turn(shorter, last.filed)
    check(pair, turn, shorter)
    prompt = turn.account["prompt_tokens"]
    # The generation prompt follows the shorter history, an answer the longer one: they part at or before
    # its end.
    assert prompt - 2 * SEGMENT < turn.returned <= prompt


def test_another_conversations_handle(pair: Pair) -> None:
    """A handle that belongs to other tokens proves nothing and changes nothing."""
    _, foreign = two_turns(pair, "metals")
    messages = opening("songs")
    turn = pair.turn(messages, foreign.filed)
    check(pair, turn, messages)
    assert (turn.returned, turn.reason) == (0, "no_match")


def test_same_content_under_another_salt(pair: Pair) -> None:
    """Equal tokens of another tenant are not this tenant's: the root differs."""
    history, last = two_turns(pair, "coins", cache_salt="tenant-a")
    messages = [*history, user("And?")]
    turn = pair.turn(messages, last.filed, cache_salt="tenant-b")
    check(pair, turn, messages)
    assert (turn.returned, turn.reason) == (0, "wrong_root")
    own = pair.turn(messages, last.filed, cache_salt="tenant-a")
    assert own.returned > 0


def test_requests_that_take_no_part(pair: Pair) -> None:
    """Prompt log-probabilities need every position computed: nothing is read, and all of them come."""
    history, last = two_turns(pair, "clouds")
    messages = [*history, user("And?")]
    params = pair.prefill_hop(messages, last.filed, prompt_logprobs=1)
    assert params["kvloop_turn"]["reason"] == "skips_prefix_cache"
    assert params["kvloop_turn"]["computed_tokens"] == params["kvloop_turn"]["prompt_tokens"]


def test_threshold(pair: Pair) -> None:
    """Fewer proven tokens than `kv_recompute_threshold` are computed again, and the claim is given back."""
    short = [user("Hi " + salt()[:8])]
    first = pair.turn(short, max_tokens=64)
    if first.filed is None:
        pytest.fail("a turn above the threshold was not retained")
    again = [user("Hi " + salt()[:8])]
    turn = pair.turn(again, first.filed)
    check(pair, turn, again)
    assert turn.returned == 0


def test_blocks_are_smaller_than_the_history() -> None:
    """The cases above cross block borders: their first messages span several blocks."""
    assert BLOCK_TOKENS * 4 < 80 * 3
