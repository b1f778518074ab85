"""Recorded agent sessions as conversations: what they wait for, what comes beside what."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvloop.bench.workload.options import RecordingOptions
from kvloop.bench.workload.recorded import read_agent_sessions
from kvloop.bench.workload.turns import Answer, MadeUp, Workload, planned_tokens
from kvloop.errors import UserError
from tests.bench.workload.layout import check


def request(at_s: float, tokens: int, answer: int, took_s: float, **more: Any) -> dict[str, Any]:
    """One; its blocks go on from those before it unless they are named."""
    return {"t": at_s, "in": tokens, "out": answer, "api_time": took_s} | more


def read(tmp_path: Path, *requests: dict[str, Any], options: RecordingOptions | None = None) -> Workload:
    """A session of these, read."""
    path = tmp_path / "sessions.jsonl"
    path.write_text(json.dumps({"id": "s", "requests": requests}) + "\n")
    workload = read_agent_sessions(path, options)
    check(workload)
    return workload


def test_turns_wait_as_long_as_they_did(tmp_path: Path) -> None:
    """From an answer's end to the next request, whatever the answer takes now."""
    tool = request(0, 300, 40, 3.5, stop="tool_use")
    workload = read(tmp_path, tool, request(9, 500, 20, 30), request(100, 640, 5, 1))
    (conversation,) = workload.conversations
    assert [turn.wait_s for turn in conversation.turns] == pytest.approx([0, 5.5, 61])
    assert [turn.after for turn in conversation.turns] == [None, 0, 1]
    assert [turn.kind for turn in conversation.turns] == ["user", "tool", "user"]
    assert [planned_tokens(conversation, at) for at in range(3)] == [300, 500, 640]
    assert conversation.turns[2].messages == (
        MadeUp("user", (("s/0", 300),)),
        Answer(0),
        MadeUp("user", (("s/1", 160),)),
        Answer(1),
        MadeUp("user", (("s/2", 120),)),
    )


def test_an_answer_that_was_not_there_is_not_in_a_prompt(tmp_path: Path) -> None:
    """A request that began before the one before it was answered comes beside it."""
    workload = read(
        tmp_path,
        request(0, 300, 40, 2),
        request(10, 400, 40, 60),
        request(15, 500, 40, 5),
        request(90, 700, 4, 1),
    )
    (conversation,) = workload.conversations
    first, second, beside, last = conversation.turns
    assert Answer(0) in second.messages
    assert Answer(1) not in beside.messages
    assert beside.messages[: len(second.messages)] == second.messages
    assert [turn.after for turn in (first, second, beside)] == [None, 0, 0]
    assert beside.wait_s - second.wait_s == pytest.approx(5)
    assert last.after == 2
    assert last.wait_s == pytest.approx(70)


def test_an_answer_that_came_back_shorter_is_made_up(tmp_path: Path) -> None:
    """Where less is new than was answered (thoughts are not resent), all that is new is made up."""
    workload = read(tmp_path, request(0, 640, 500, 2), request(10, 900, 40, 6))
    messages = workload.conversations[0].turns[1].messages
    assert messages[1:] == (
        MadeUp("assistant", (("s/1/answer", 130),)),
        MadeUp("user", (("s/1", 130),)),
    )


def test_a_subagent_is_a_conversation_of_its_own(tmp_path: Path) -> None:
    """It shares nothing, and its names are its own."""
    agent = {"t": 5, "type": "subagent", "requests": [request(6, 200, 5, 1), request(9, 300, 5, 1)]}
    workload = read(tmp_path, request(0, 300, 40, 2), agent)
    assert [one.name for one in workload.conversations] == ["s", "s/1"]
    assert workload.conversations[1].turns[0].messages == (MadeUp("user", (("s/1/0", 200),)),)


def test_options_apply(tmp_path: Path) -> None:
    """To lengths, gaps and the end."""
    requests = request(0, 300, 40, 3.5), request(9, 500, 20, 30), request(100, 640, 5, 1)
    options = RecordingOptions(scale=10, time_scale=0.1, max_prompt_tokens=50)
    (conversation,) = read(tmp_path, *requests, options=options).conversations
    assert [planned_tokens(conversation, at) for at in range(2)] == [30, 50]
    assert len(conversation.turns) == 2
    assert conversation.turns[1].wait_s == pytest.approx(0.55)
    assert [turn.answer_tokens for turn in conversation.turns] == [4, 2]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"in": 0}, r"line 1: a request needs tokens - at `\$.requests\[1\].in`"),
        ({"out": -1}, r"line 1: .*\$.requests\[1\].out"),
        ({"t": "soon"}, r"line 1: .*\$.requests\[1\].t"),
        ({"hash_ids": [1] * 50}, r"line 1: 50 blocks do not fit into 300 tokens"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    """The line and the field."""
    with pytest.raises(UserError, match=words):
        read(tmp_path, request(0, 300, 40, 2), request(9, 300, 40, 2) | change)
