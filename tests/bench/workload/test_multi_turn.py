"""The input of vLLM's multi-turn benchmark: conversations, and how to make them up."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from kvloop.bench.workload.multi_turn import read_multi_turn
from kvloop.bench.workload.options import RecordingOptions
from kvloop.bench.workload.turns import Answer, MadeUp, Said, Workload, planned_tokens
from kvloop.errors import UserError
from tests.bench.workload.layout import check, common, tokens_of

UNIFORM: dict[str, Any] = {"distribution": "uniform", "min": 12, "max": 18}
PLAN: dict[str, Any] = {
    "filetype": "generate_conversations",
    "num_conversations": 24,
    "text_files": ["some.txt"],
    "print_stats": False,
    "prompt_input": {
        "num_turns": UNIFORM,
        "common_prefix_num_tokens": {"distribution": "constant", "value": 500},
        "prefix_num_tokens": {"distribution": "lognormal", "average": 1000, "max": 5000},
        "num_tokens": {"distribution": "uniform", "min": 120, "max": 160},
    },
    "prompt_output": {"num_tokens": {"distribution": "uniform", "min": 80, "max": 120}},
}


def read(tmp_path: Path, plan: object, options: RecordingOptions | None = None) -> Workload:
    """A file of it, over several lines as people write it, read."""
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan, indent=1))
    return read_multi_turn(path, options)


def changed(section: str, field: str, value: object) -> dict[str, Any]:
    """The plan with another distribution."""
    return PLAN | {section: PLAN[section] | {field: value}}


def test_conversations_are_read(tmp_path: Path) -> None:
    """As the tool's converter writes them."""
    messages = [("user", "a"), ("assistant", "bbbb"), ("user", "c"), ("assistant", "dddd")]
    entry = {"id": "UzTK34D", "messages": [{"role": role, "content": text} for role, text in messages]}
    workload = read(tmp_path, [entry])
    check(workload)
    assert workload.name == "multi-turn"
    (conversation,) = workload.conversations
    assert conversation.turns[1].messages == (Said("user", "a"), Answer(0), Said("user", "c"))


def test_a_plan_is_followed(tmp_path: Path) -> None:
    """Turns, prefixes and lengths are drawn from what it names."""
    workload = read(tmp_path, PLAN)
    check(workload)
    assert len(workload.conversations) == 24
    assert {len(one.turns) for one in workload.conversations} <= {6, 7, 8, 9}
    prefixes = []
    for one in workload.conversations:
        lengths = [planned_tokens(one, number) or 0 for number in range(len(one.turns))]
        prefixes.append(lengths[0] - 500)
        for number, turn in enumerate(one.turns):
            assert 80 <= turn.answer_tokens <= 120
            if number:
                new = lengths[number] - lengths[number - 1] - one.turns[number - 1].answer_tokens
                assert 120 <= new <= 160
                assert turn.after == number - 1
    assert 700 < statistics.median(prefixes) < 1500
    texts = [tokens_of(one, 0) for one in workload.conversations]
    assert {common(texts[0], other) for other in texts[1:]} == {500}


def test_a_plan_and_a_seed_make_one_workload(tmp_path: Path) -> None:
    """The same for the same seed, another for another."""
    assert read(tmp_path, PLAN) == read(tmp_path, PLAN)
    assert read(tmp_path, PLAN) != read(tmp_path, PLAN, RecordingOptions(seed=1))


@pytest.mark.parametrize(
    ("drawn", "least", "most"),
    [
        ({"distribution": "constant", "value": 7}, 7, 7),
        ({"distribution": "zipf", "alpha": 1.2, "max": 100}, 1, 100),
        ({"distribution": "poisson", "alpha": 10, "max": 12}, 1, 12),
        ({"distribution": "lognormal", "mean": 2.0, "sigma": 0.5, "max": 30}, 1, 30),
        ({"distribution": "lognormal", "average": 9, "median_ratio": 0.5, "max": 40}, 1, 40),
        ({"distribution": "uniform", "min": 1.5, "max": 2.5}, 2, 2),
    ],
)
def test_each_distribution_is_known(tmp_path: Path, drawn: object, least: int, most: int) -> None:
    """By the names and numbers that the tool knows."""
    workload = read(tmp_path, changed("prompt_output", "num_tokens", drawn))
    answers = [turn.answer_tokens for one in workload.conversations for turn in one.turns]
    assert least <= min(answers)
    assert max(answers) <= most


def test_a_prefix_for_all_may_be_left_out(tmp_path: Path) -> None:
    """As in plans from before there was one."""
    section = {name: one for name, one in PLAN["prompt_input"].items() if name != "common_prefix_num_tokens"}
    workload = read(tmp_path, PLAN | {"prompt_input": section})
    (message,) = workload.conversations[0].turns[0].messages
    assert isinstance(message, MadeUp)
    assert len(message.stretches) == 1


def turns(**drawn: object) -> dict[str, Any]:
    """The plan with so many turns."""
    return changed("prompt_input", "num_turns", drawn)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (PLAN | {"filetype": "other"}, r"\$.filetype"),
        (PLAN | {"num_conversations": 0}, r"\$.num_conversations"),
        (PLAN | {"num_conversations": 10**12}, r"\$.num_conversations"),
        (PLAN | {"num_conversation": 1}, "num_conversation"),
        ({name: one for name, one in PLAN.items() if name != "prompt_output"}, "prompt_output"),
        (turns(distribution="normal"), r"\$.prompt_input.num_turns"),
        (turns(distribution="constant"), r"`value`.*\$.prompt_input.num_turns"),
        (turns(**UNIFORM, step=2), "step"),
        (turns(distribution="uniform", min=30, max=18), "plan.json: nothing can be drawn"),
        (turns(distribution="lognormal"), "plan.json: a lognormal needs"),
        (turns(distribution="zipf", alpha=1), r"\$.prompt_input.num_turns.alpha"),
        (turns(distribution="constant", value=-1), r"\$.prompt_input.num_turns.value"),
        (changed("prompt_output", "num_tokens", 5), r"\$.prompt_output.num_tokens"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, plan: object, words: str) -> None:
    """The field."""
    with pytest.raises(UserError, match=words):
        read(tmp_path, plan)


def test_numbers_without_end_stay_bounded(tmp_path: Path) -> None:
    """A conversation ends before a prompt that no engine holds, however long its turns are to be."""
    plan = changed("prompt_input", "num_tokens", {"distribution": "constant", "value": 1e9})
    plan["prompt_input"]["num_turns"] = {"distribution": "constant", "value": 1e9}
    with pytest.raises(UserError, match="of 24 conversations none is left"):
        read(tmp_path, plan)
