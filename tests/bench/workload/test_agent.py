"""The synthetic agent: one seed, one workload; its figures are those of its distributions."""

import hashlib
import statistics
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloop.bench.workload.agent import AgentOptions, made_up
from kvloop.bench.workload.distributions import Exponential, Fixed, Lognormal, Uniform
from kvloop.bench.workload.turns import Answer, MadeUp, Turn, Workload, planned_tokens
from kvloop.errors import UserError
from tests.bench.workload.layout import check, common, tokens_of

SMALL = AgentOptions(
    conversations=8,
    turns=Lognormal(4, 0.5, 8),
    system_tokens=Fixed(40),
    user_tokens=Lognormal(6, 1, 30),
    tool_tokens=Lognormal(6, 1, 30),
    answer_tokens=Lognormal(5, 1, 20),
    fork_share=0.5,
    tenants=3,
)


def lines(workload: Workload) -> list[Turn]:
    """All turns."""
    return [turn for one in workload.conversations for turn in one.turns]


def last_tokens(turns: list[Turn]) -> list[int]:
    """What each brings, in order of size."""
    return sorted(turn.messages[-1].tokens for turn in turns if isinstance(turn.messages[-1], MadeUp))


def test_lengths_and_gaps_are_as_named() -> None:
    """Medians and shares over some thousand turns, none capped."""
    workload = made_up(replace(AgentOptions(), conversations=400, turns=Lognormal(20, 0.5, 100)))
    check(workload)
    turns = lines(workload)
    tool = [turn for turn in turns if turn.kind == "tool"]
    user = [turn for turn in turns if turn.kind == "user" and turn.after is not None]
    assert statistics.median(last_tokens(tool)) == pytest.approx(381, rel=0.1)
    assert statistics.median(last_tokens(user)) == pytest.approx(309, rel=0.2)
    assert last_tokens(tool)[len(tool) * 9 // 10] == pytest.approx(3545, rel=0.2)
    assert statistics.median(turn.answer_tokens for turn in turns) == pytest.approx(211, rel=0.06)
    assert len(tool) / (len(tool) + len(user)) == pytest.approx(0.85, abs=0.02)
    assert statistics.median(turn.wait_s for turn in tool) == pytest.approx(5.2, rel=0.1)
    assert sum(turn.kind == "fork" for turn in turns) / 400 == pytest.approx(0.1, abs=0.04)


def test_arrivals_are_a_poisson_process() -> None:
    """Gaps between starts have the mean and the median of an exponential."""
    workload = made_up(replace(SMALL, conversations=1500, turns=Fixed(1), start_gap_s=Exponential(3)))
    starts = [one.start_s for one in workload.conversations]
    gaps = [after - before for before, after in pairwise(starts)]
    assert statistics.mean(gaps) == pytest.approx(3, rel=0.1)
    assert statistics.median(gaps) == pytest.approx(3 * 0.693, rel=0.12)


def test_turns_and_single_turns() -> None:
    """The share of single turns has one, all others two and more."""
    options = replace(SMALL, conversations=600, single_share=0.3, turns=Uniform(2, 6), fork_share=0.0)
    counts = [len(one.turns) for one in made_up(options).conversations]
    assert counts.count(1) / 600 == pytest.approx(0.3, abs=0.06)
    assert max(counts) == 6


@settings(max_examples=30, deadline=None)
@given(st.integers(), st.integers(2, 200), st.integers(1, 30), st.floats(0.5, 50))
def test_any_options_make_a_sound_workload(seed: int, prompt: int, answer: int, scale: float) -> None:
    """Roles, answers and caps hold; and the same options make the same again."""
    options = replace(
        SMALL, seed=seed, max_prompt_tokens=prompt, max_answer_tokens=answer, scale=scale, conversations=4
    )
    workload = made_up(options)
    assert workload == made_up(options)
    check(workload)
    for one in workload.conversations:
        for number, turn in enumerate(one.turns):
            assert turn.answer_tokens <= answer
            assert (planned_tokens(one, number) or 0) <= prompt


def test_more_conversations_change_none_of_the_others() -> None:
    """The first eight of twenty are the eight."""
    assert made_up(replace(SMALL, conversations=20)).conversations[:8] == made_up(SMALL).conversations


def test_another_seed_is_another_workload() -> None:
    """And names stay the same, for texts have the seed themselves."""
    assert made_up(SMALL) != made_up(replace(SMALL, seed=1))


def test_a_turn_brings_the_history_back() -> None:
    """Each prompt of a line is the one before, its answer, and a new message; a fork changes the last one."""
    workload = made_up(replace(SMALL, fork_share=1.0, conversations=20))
    for one in workload.conversations:
        for turn in one.turns[1:]:
            assert turn.after is not None
            before = one.turns[turn.after]
            assert turn.messages[:-1] == (*before.messages, Answer(turn.after))
        forks = [number for number, turn in enumerate(one.turns) if turn.kind == "fork"]
        assert len(forks) == 1
        at = forks[0]
        twins = [turn for turn in one.turns[:at] if turn.after == one.turns[at].after]
        assert [twin.messages[:-1] for twin in twins] == [one.turns[at].messages[:-1]]
        assert twins[0].messages[-1] != one.turns[at].messages[-1]


def test_an_agents_users_share_its_system_prompt_alone() -> None:
    """Two conversations have the system prompt of their agent in common, or nothing."""
    workload = made_up(replace(SMALL, conversations=12, agents=2))
    texts = [tokens_of(one, 0) for one in workload.conversations]
    in_common = {common(texts[one], texts[other]) for one in range(12) for other in range(one)}
    assert in_common == {0, 40}


def test_a_workload_does_not_depend_on_hash_seeds() -> None:
    """Two processes with two of them make the same."""
    program = (
        "import hashlib; from kvloop.bench.workload.agent import AgentOptions, made_up; "
        "print(hashlib.sha256(repr(made_up(AgentOptions(conversations=3))).encode()).hexdigest())"
    )
    digest = hashlib.sha256(repr(made_up(AgentOptions(conversations=3))).encode()).hexdigest()
    for seed in ("1", "2"):
        made = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            check=True,
            text=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        )
        assert made.stdout.strip() == digest


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tool_share", 1.1),
        ("fork_share", -0.1),
        ("single_share", float("nan")),
        ("conversations", 0),
        ("tenants", 0),
        ("max_prompt_tokens", 1),
        ("max_answer_tokens", 0),
        ("scale", 0.0),
        ("time_scale", -1.0),
    ],
)
def test_options_out_of_range_are_named(field: str, value: float) -> None:
    """Before anything is drawn."""
    with pytest.raises(UserError, match=field):
        AgentOptions(**{field: value})  # type: ignore[arg-type]


def test_an_edited_history_keeps_its_lengths() -> None:
    """Only the words of one earlier message change, and stay changed; without a share nothing is edited."""
    options = AgentOptions(seed=3, conversations=20, turns=Fixed(8), fork_share=0.0, edit_share=0.5)
    edited = 0
    for conversation in made_up(options).conversations:
        for before, turn in pairwise(conversation.turns):
            kept, past = turn.messages[: len(before.messages)], before.messages
            changed = [(one, other) for one, other in zip(past, kept, strict=True) if one != other]
            assert len(changed) == (turn.kind == "edit")
            for one, other in changed:
                assert isinstance(one, MadeUp)
                assert isinstance(other, MadeUp)
                assert (one.role, one.tokens) == (other.role, other.tokens) == ("user", one.tokens)
                edited += 1
    assert 40 <= edited <= 100
    plain = made_up(AgentOptions(seed=3, conversations=20))
    assert all(turn.kind != "edit" for one in plain.conversations for turn in one.turns)
