"""The router's log of turns as a workload: what goes on from what, and how far."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloop.bench.workload.options import RecordingOptions
from kvloop.bench.workload.turn_log import LoggedTurn, read_turn_log
from kvloop.bench.workload.turns import Answer, MadeUp, Workload, planned_tokens
from kvloop.errors import UserError
from tests.bench.workload.layout import check, common, tokens_of

FIRST = LoggedTurn(
    time=1000.0,
    request_id="r1",
    conversation="c",
    tenant="t",
    prompt_tokens=100,
    answer_tokens=30,
    ending="tool_calls",
    route="prefill",
    took_ms=2000.0,
)


def later(number: int, **changes: Any) -> LoggedTurn:
    """A turn that goes on from the one before it."""
    fields = {"time": 1000.0 + 10 * number, "request_id": f"r{number}", "goes_on_from": f"r{number - 1}"}
    return msgspec.structs.replace(FIRST, **(fields | {"ending": "stop"} | changes))


def read(tmp_path: Path, *lines: LoggedTurn, options: RecordingOptions | None = None) -> Workload:
    """A log of these turns, read."""
    path = tmp_path / "turns.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in lines))
    workload = read_turn_log(path, options)
    check(workload)
    return workload


def test_a_turn_goes_on_from_the_one_that_its_line_names(tmp_path: Path) -> None:
    """Wherever its line stands; it waits as long as it waited."""
    second = later(2, prompt_tokens=180, shared_tokens=130)
    workload = read(tmp_path, second, FIRST)
    (conversation,) = workload.conversations
    assert (conversation.name, conversation.tenant) == ("c", "t")
    assert conversation.turns[1].messages == (
        MadeUp("user", (("c/0", 100),)),
        Answer(0),
        MadeUp("user", (("c/1", 50),)),
    )
    assert conversation.turns[1].after == 0
    assert conversation.turns[1].wait_s == pytest.approx(20 - 2)
    assert [turn.kind for turn in conversation.turns] == ["user", "tool"]


def test_a_few_tokens_of_a_template_do_not_part_an_answer(tmp_path: Path) -> None:
    """An answer that is there but for its last tokens is there."""
    workload = read(tmp_path, FIRST, later(2, prompt_tokens=180, shared_tokens=126))
    assert Answer(0) in workload.conversations[0].turns[1].messages


def test_both_branches_have_the_answer(tmp_path: Path) -> None:
    """Unlike blocks, the log says so of each."""
    workload = read(
        tmp_path,
        FIRST,
        later(2, prompt_tokens=180, shared_tokens=130),
        later(3, prompt_tokens=190, shared_tokens=130, goes_on_from="r1"),
    )
    (conversation,) = workload.conversations
    assert [turn.after for turn in conversation.turns] == [None, 0, 0]
    assert all(Answer(0) in turn.messages for turn in conversation.turns[1:])
    assert conversation.turns[2].kind == "fork"


def test_a_history_may_be_left_in_its_middle(tmp_path: Path) -> None:
    """What is shared is kept, what is torn goes on otherwise."""
    workload = read(tmp_path, FIRST, later(2, prompt_tokens=120, shared_tokens=40))
    (conversation,) = workload.conversations
    assert conversation.turns[1].messages == (MadeUp("user", (("c/0", 40), ("c/1", 80))),)
    assert (conversation.turns[1].kind, conversation.turns[1].after) == ("edit", 0)


def test_a_log_that_was_rotated_is_read(tmp_path: Path) -> None:
    """A turn whose earlier one is gone begins anew, in the conversation that it names."""
    lost = later(5, prompt_tokens=400, shared_tokens=300)
    alone = later(7, conversation="", goes_on_from="gone")
    other_tenant = later(8, tenant="u", goes_on_from=None)
    workload = read(tmp_path, FIRST, lost, alone, other_tenant)
    names = [(one.name, one.tenant, len(one.turns)) for one in workload.conversations]
    assert names == [("c", "t", 2), ("r7", "t", 1), ("c#2", "u", 1)]
    assert workload.conversations[0].turns[1].messages == (MadeUp("user", (("c/1", 400),)),)
    assert workload.conversations[0].turns[1].after == 0


@st.composite
def logs(draw: st.DrawFn) -> list[LoggedTurn]:
    """Turns that go on from others as far as they may."""
    turns: list[LoggedTurn] = []
    for number in range(draw(st.integers(1, 10))):
        before = draw(st.sampled_from([None, *turns]))
        shared, grown = 0, draw(st.integers(1, 60))
        if before is not None:
            shared = draw(st.integers(0, before.prompt_tokens + before.answer_tokens))
        turns.append(
            LoggedTurn(
                time=1e9 + number * draw(st.integers(0, 20)),
                request_id=f"r{number}",
                goes_on_from=before.request_id if before else None,
                conversation=draw(st.sampled_from(("", "a", "b"))),
                prompt_tokens=shared + grown,
                shared_tokens=shared,
                answer_tokens=draw(st.integers(0, 30)),
                took_ms=draw(st.floats(0, 1e5)),
            )
        )
    return turns


@settings(max_examples=60, deadline=None)
@given(logs(), st.sampled_from((1.0, 3.0)))
def test_any_log_makes_a_sound_workload(
    tmp_path_factory: pytest.TempPathFactory, turns: list[LoggedTurn], scale: float
) -> None:
    """Whatever goes on from whatever, prompts are as long as they were, and the workload holds together."""
    workload = read(tmp_path_factory.mktemp("log"), *turns, options=RecordingOptions(scale=scale))
    assert workload.turns == len(turns)
    if scale == 1:
        lengths = [
            planned_tokens(one, number) for one in workload.conversations for number in range(len(one.turns))
        ]
        assert sorted(length or 0 for length in lengths) == sorted(turn.prompt_tokens for turn in turns)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 90), st.integers(1, 60))
def test_what_is_shared_is_shared(tmp_path_factory: pytest.TempPathFactory, shared: int, grown: int) -> None:
    """Of a prompt, to the token, but for the template's; an answer whole or not."""
    first = msgspec.structs.replace(FIRST, prompt_tokens=60, answer_tokens=30)
    second = later(2, prompt_tokens=shared + grown, shared_tokens=shared)
    (conversation,) = read(tmp_path_factory.mktemp("log"), first, second).conversations
    found = common(tokens_of(conversation, 0), tokens_of(conversation, 1))
    if shared < 52:
        assert found == shared
    else:
        assert found == min(60, shared + grown)
        is_whole = shared >= 82 and shared + grown > 90
        assert (Answer(0) in conversation.turns[1].messages) == is_whole


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (b'"time":-1', r"line 2: .*\$.time"),
        (b'"time":1e15', r"line 2: .*\$.time"),
        (b'"time":1,"prompt_tokens":0', r"line 2: a request needs tokens - at `\$.prompt_tokens`"),
        (b'"time":1,"prompt_tokens":99999999', r"line 2: .*\$.prompt_tokens"),
        (b'"time":1,"shared_tokens":101', r"line 2: more tokens are shared than there are"),
        (b'"time":1,"ending":"gone"', r"line 2: .*\$.ending"),
        (b'"time":1,"goes_on_from":7', r"line 2: .*\$.goes_on_from"),
        (b'"time":1,"request_id":""', r"line 2: .*\$.request_id"),
        (b'"time":1,"took_ms":-1', r"line 2: .*\$.took_ms"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, change: bytes, words: str) -> None:
    """The line and the field."""
    good = msgspec.json.encode(FIRST)
    path = tmp_path / "log"
    path.write_bytes(good + b"\n" + good[:-1] + b"," + change + b"}\n")
    with pytest.raises(UserError, match=words):
        read_turn_log(path)
