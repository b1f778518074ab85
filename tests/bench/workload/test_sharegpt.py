"""Texts in ShareGPT's form: their turns, their roles, what is left out."""

import json
from pathlib import Path

import pytest

from kvloop.bench.workload.options import RecordingOptions
from kvloop.bench.workload.sharegpt import read_sharegpt
from kvloop.bench.workload.turns import Answer, Said
from kvloop.errors import UserError
from tests.bench.workload.layout import check


def said(*messages: tuple[str, str]) -> list[dict[str, str]]:
    """ShareGPT's."""
    return [{"from": who, "value": text} for who, text in messages]


def written(path: Path, value: object) -> Path:
    """A file of it."""
    path.write_text(json.dumps(value))
    return path


FIRST = {
    "id": "a_0",
    "conversations": said(("system", "Be brief."), ("human", "Hi"), ("gpt", "x" * 40), ("human", "Bye")),
}
SECOND = {"messages": [{"role": "user", "content": "One"}, {"role": "assistant", "content": ""}], "extra": 1}


def test_answers_become_turns(tmp_path: Path) -> None:
    """A recorded answer is a turn of its length; the endpoint's own stands in the next prompt."""
    long = {"id": 7, "conversations": said(("human", "1"), ("gpt", "2" * 8), ("human", "3"), ("gpt", "4"))}
    workload = read_sharegpt(written(tmp_path / "f", [FIRST, SECOND, long]))
    check(workload)
    first, second, third = workload.conversations
    assert [first.name, second.name, third.name] == ["a_0", "sharegpt-1", "7"]
    assert first.turns[0].messages == (Said("system", "Be brief."), Said("user", "Hi"))
    assert [turn.answer_tokens for turn in first.turns] == [10]
    assert [turn.answer_tokens for turn in second.turns] == [1]
    assert third.turns[1].messages == (Said("user", "1"), Answer(0), Said("user", "3"))
    assert [turn.after for turn in third.turns] == [None, 0]
    assert [turn.answer_tokens for turn in third.turns] == [2, 1]


def test_lines_are_read_as_lists_are(tmp_path: Path) -> None:
    """One object a line."""
    path = tmp_path / "lines"
    path.write_text(json.dumps(FIRST) + "\n\n" + json.dumps(SECOND) + "\n")
    as_list = read_sharegpt(written(tmp_path / "list", [FIRST, SECOND]))
    assert read_sharegpt(path).conversations == as_list.conversations


def test_roles_take_turns(tmp_path: Path) -> None:
    """What an assistant says first is left out, and messages of one role in a row are one."""
    entry = {
        "id": "a",
        "conversations": said(("gpt", "0"), ("human", "1"), ("human", "2"), ("gpt", "1234"), ("gpt", "5678")),
    }
    workload = read_sharegpt(written(tmp_path / "f", [entry]))
    (turn,) = workload.conversations[0].turns
    assert turn.messages == (Said("user", "1\n\n2"),)
    assert turn.answer_tokens == 2


def test_systems_speak_first(tmp_path: Path) -> None:
    """What one says later is a user's."""
    messages = said(
        ("system", "s"), ("system", "t"), ("human", "1"), ("gpt", "2"), ("system", "u"), ("gpt", "3")
    )
    workload = read_sharegpt(written(tmp_path / "f", [{"id": "a", "conversations": messages}]))
    check(workload)
    assert workload.conversations[0].turns[1].messages == (
        Said("system", "s\n\nt"),
        Said("user", "1"),
        Answer(0),
        Said("user", "u"),
    )


def test_options_shorten_and_choose(tmp_path: Path) -> None:
    """Texts by their beginnings, conversations evenly, histories before they are too long."""
    long = ("human", "u" * 40), ("gpt", "g" * 40)
    entries = [
        {"id": str(at), "conversations": said(*long, ("human", "v"), ("gpt", "w"))} for at in range(10)
    ]
    path = written(tmp_path / "f", entries)
    chosen = read_sharegpt(path, RecordingOptions(scale=4, conversations=3, max_prompt_tokens=4))
    assert [one.name for one in chosen.conversations] == ["0", "3", "6"]
    assert [len(one.turns) for one in chosen.conversations] == [1, 1, 1]
    assert chosen.conversations[0].turns[0].messages == (Said("user", "u" * 10),)
    assert chosen.conversations[0].turns[0].answer_tokens == 2
    assert "3 of 10" in chosen.source
    assert "lengths / 4" in chosen.source


def test_equal_names_are_told_apart(tmp_path: Path) -> None:
    """By a number."""
    workload = read_sharegpt(written(tmp_path / "f", [FIRST, FIRST, FIRST]))
    assert [one.name for one in workload.conversations] == ["a_0", "a_0#2", "a_0#3"]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"id": "b"}, "entry 2: an entry needs"),
        ({"conversations": said(("nobody", "x"))}, r"entry 2: nobody is .* at `\$.conversations\[0\].from`"),
        ({"messages": [{"role": "tool", "content": "x"}]}, r"entry 2: .*\$.messages\[0\].role"),
        ({"conversations": [{"from": "gpt", "value": 5}]}, r"entry 2: .*\$.conversations\[0\].value"),
        ({"messages": "x"}, r"entry 2: .*\$.messages"),
        ({"id": [], "messages": []}, r"entry 2: .*\$.id"),
        (5, "entry 2: "),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, entry: object, words: str) -> None:
    """The entry and the field."""
    with pytest.raises(UserError, match=words):
        read_sharegpt(written(tmp_path / "f", [FIRST, entry]))


def test_a_file_without_an_answer_is_no_workload(tmp_path: Path) -> None:
    """Nothing says how long to answer."""
    entry = {"id": "a", "conversations": said(("human", "1"))}
    with pytest.raises(UserError, match="of 1 conversations none has a turn"):
        read_sharegpt(written(tmp_path / "f", [entry]))
    with pytest.raises(UserError, match="of 0 conversations"):
        read_sharegpt(written(tmp_path / "g", []))
