"""Mooncake's traces: which request goes on from which, when, and what a system prompt is."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvloop.bench.workload.mooncake import MAX_FORKS, read_mooncake
from kvloop.bench.workload.options import RecordingOptions
from kvloop.bench.workload.recording import took_s
from kvloop.bench.workload.turns import Answer, MadeUp, Workload, planned_tokens
from kvloop.errors import UserError
from tests.bench.workload.layout import check, common, tokens_of

BLOCK = 512


def line(at_s: float, tokens: int, answer: int, *ids: int) -> dict[str, Any]:
    """A request."""
    return {"timestamp": at_s * 1000, "input_length": tokens, "output_length": answer, "hash_ids": list(ids)}


def read(tmp_path: Path, *lines: dict[str, Any], options: RecordingOptions | None = None) -> Workload:
    """A trace of these lines, read."""
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    workload = read_mooncake(path, options)
    check(workload)
    return workload


def test_a_request_goes_on_from_the_longest_it_begins_with(tmp_path: Path) -> None:
    """Its prompt is that prompt, that answer, and what is new; others start conversations of their own."""
    workload = read(
        tmp_path,
        line(0, 3 * BLOCK + 100, 300, 0, 1, 2, 3),
        line(5, 700, 3, 50, 51),
        line(60, 5 * BLOCK, 20, 0, 1, 2, 4, 5),
        line(90, 5 * BLOCK + 200, 20, 0, 1, 2, 4, 5, 6),
    )
    first, other = workload.conversations
    assert [len(first.turns), len(other.turns)] == [3, 1]
    assert first.turns[0].messages == (MadeUp("user", (("block-0", 3 * BLOCK + 100),)),)
    assert first.turns[1].messages == (
        *first.turns[0].messages,
        Answer(0),
        MadeUp("user", (("mooncake-0/1", 2 * BLOCK - 100 - 300),)),
    )
    assert first.turns[2].messages[:4] == (*first.turns[1].messages, Answer(1))
    assert [planned_tokens(first, at) for at in range(3)] == [3 * BLOCK + 100, 5 * BLOCK, 5 * BLOCK + 200]
    assert other.start_s == 5
    assert [turn.after for turn in first.turns] == [None, 0, 1]
    assert [turn.wait_s for turn in first.turns] == pytest.approx([0, 60 - took_s(300), 30 - took_s(20)])


def test_a_wait_is_never_negative(tmp_path: Path) -> None:
    """A request that came while the answer must have been under way comes right after it."""
    workload = read(tmp_path, line(0, BLOCK, 300, 0), line(1, 2 * BLOCK, 5, 0, 1))
    (conversation,) = workload.conversations
    assert conversation.turns[1].after == 0
    assert conversation.turns[1].wait_s == 0


def test_requests_at_once_are_beside_one_another(tmp_path: Path) -> None:
    """None of them can have the other's answer."""
    workload = read(tmp_path, line(2, BLOCK, 300, 0), line(2, BLOCK, 10, 0), line(2, 2 * BLOCK, 20, 0, 1))
    (conversation,) = workload.conversations
    assert [turn.after for turn in conversation.turns] == [None, None, None]
    assert [turn.kind for turn in conversation.turns] == ["user", "retry", "user"]


def test_a_system_prompt_joins_no_conversations(tmp_path: Path) -> None:
    """What many prompts begin with is text that they share, not a history."""
    lines = [line(at, 3 * BLOCK, 5, 0, 10 * at + 5, 10 * at + 7) for at in range(MAX_FORKS + 1)]
    short = line(0, BLOCK + 10, 5, 0, 1000)
    workload = read(tmp_path, short, *lines)
    assert len(workload.conversations) == MAX_FORKS + 2
    for one in workload.conversations:
        (message,) = one.turns[0].messages
        assert isinstance(message, MadeUp)
        assert message.stretches[0] == ("block-0", BLOCK)


def test_an_edited_history_stays_in_its_conversation(tmp_path: Path) -> None:
    """With most of an earlier prompt in common, a request leaves it where they part."""
    workload = read(tmp_path, line(0, 4 * BLOCK, 5, 0, 1, 2, 3), line(60, 4 * BLOCK, 5, 0, 1, 2, 77))
    (conversation,) = workload.conversations
    assert conversation.turns[1].kind == "edit"
    assert conversation.turns[1].messages == (
        MadeUp("user", (("block-0", 3 * BLOCK), ("mooncake-0/1", BLOCK))),
    )


def test_tails_of_other_names_are_others(tmp_path: Path) -> None:
    """Prompts that end in the same block, but not the same part of it, have its beginning not in common."""
    for tail, expected in ((2, 2 * BLOCK + 9), (3, 2 * BLOCK)):
        first, second = line(0, 2 * BLOCK + 9, 900, 0, 1, 2), line(60, 2 * BLOCK + 30, 900, 0, 1, tail)
        (conversation,) = read(tmp_path, first, second).conversations
        texts = [tokens_of(conversation, number) for number in (0, 1)]
        assert common(*texts) == expected


def test_options_apply(tmp_path: Path) -> None:
    """Other blocks, shorter texts, faster times, fewer conversations, no prompt too long."""
    lines = [
        request
        for at in range(6)
        for request in (
            line(100 * at, 64, 10, 9 * at, 9 * at + 1),
            line(100 * at + 50, 128, 10, *range(9 * at, 9 * at + 4)),
        )
    ]
    options = RecordingOptions(block_tokens=32, scale=2, time_scale=0.5, conversations=2)
    workload = read(tmp_path, *lines, options=options)
    assert [one.start_s for one in workload.conversations] == [0, 150]
    assert [planned_tokens(workload.conversations[0], at) for at in (0, 1)] == [32, 64]
    assert workload.conversations[0].turns[1].wait_s == pytest.approx((50 - took_s(10)) / 2)
    cut = read(tmp_path, *lines, options=RecordingOptions(block_tokens=32, max_prompt_tokens=64))
    assert [len(one.turns) for one in cut.conversations] == [1] * 6
    with pytest.raises(UserError, match="of 6 conversations none is left, prompts up to 63 tokens"):
        read(tmp_path, *lines, options=RecordingOptions(block_tokens=32, max_prompt_tokens=63))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"timestamp": -1}, r"line 2: .*\$.timestamp"),
        ({"timestamp": "0"}, r"line 2: .*\$.timestamp"),
        ({"input_length": 0}, r"line 2: a request needs tokens - at `\$.input_length`"),
        ({"input_length": 10**30}, "line 2: "),
        ({"input_length": 2.5}, r"line 2: .*\$.input_length"),
        ({"output_length": -5}, r"line 2: .*\$.output_length"),
        ({"output_length": None}, r"line 2: .*\$.output_length"),
        ({"hash_ids": [0, -1]}, r"line 2: .*\$.hash_ids\[1\]"),
        ({"hash_ids": [0, 1, 2]}, r"line 2: 3 blocks of 512 do not fit into 600 tokens - at `\$.hash_ids`"),
        ({"hash_ids": [10**19]}, "line 2: "),
        ({"hash_ids": 5}, r"line 2: .*\$.hash_ids"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    """The line and the field."""
    good = line(0, 600, 5, 0, 1)
    with pytest.raises(UserError, match=words):
        read(tmp_path, good, good | change)
