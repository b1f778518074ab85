"""Recordings that name blocks: two prompts have as much text in common as they had blocks, and no more."""

import gzip
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from kvloop.bench.workload import mooncake as mooncake_reader
from kvloop.bench.workload.as_recorded import to_recorded
from kvloop.bench.workload.mooncake import read_mooncake
from kvloop.bench.workload.options import RecordingOptions
from kvloop.bench.workload.prefixes import Prefixes, joined
from kvloop.bench.workload.recorded import read_agent_sessions
from kvloop.bench.workload.turns import Answer, Conversation, Workload, planned_tokens
from tests.bench.workload.layout import check, common, tokens_of
from tests.bench.workload.traces import Prompt, traces

BLOCK = 4
SESSION_BLOCK = 64
FEW = settings(max_examples=60, deadline=None)


def written(lines: list[dict[str, object]], directory: str) -> Path:
    """A file of these lines."""
    path = Path(directory) / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def mooncake(prompts: list[Prompt], block_tokens: int = BLOCK, **changes: float) -> Workload:
    """The trace as a workload. The n-th request's answer has n + 1 tokens: so they are told apart."""
    lines: list[dict[str, object]] = [
        {
            "timestamp": prompt.at_ms,
            "input_length": len(prompt.whole) * block_tokens + prompt.tail_tokens,
            "output_length": number + 1,
            "hash_ids": [*prompt.whole, *([prompt.tail] if prompt.tail_tokens else [])],
        }
        for number, prompt in enumerate(prompts)
    ]
    with TemporaryDirectory() as directory:
        options = RecordingOptions(block_tokens=block_tokens, **changes)  # type: ignore[arg-type]
        return read_mooncake(written(lines, directory), options)


def sessions(prompts: list[Prompt]) -> Workload:
    """The same as one agent session, in blocks of 64."""
    requests = [
        {
            "t": prompt.at_ms / 1000,
            "in": len(prompt.whole) * SESSION_BLOCK + prompt.tail_tokens,
            "out": number + 1,
            "api_time": 1.0,
            "hash_ids": prompt.whole,
        }
        for number, prompt in enumerate(prompts)
    ]
    with TemporaryDirectory() as directory:
        return read_agent_sessions(written([{"id": "s", "requests": requests}], directory))


def by_answer(workload: Workload) -> dict[int, tuple[Conversation, int]]:
    """Each request's conversation and turn, by its number in the recording."""
    return {
        turn.answer_tokens - 1: (one, number)
        for one in workload.conversations
        for number, turn in enumerate(one.turns)
    }


def answers_at(conversation: Conversation, number: int, token: int) -> int | None:
    """Where the answer begins that holds this token of a prompt; None where none does."""
    end = 0
    for message in conversation.turns[number].messages:
        answer = isinstance(message, Answer)
        length = conversation.turns[message.turn].answer_tokens if isinstance(message, Answer) else 0
        length = length or getattr(message, "tokens", 0)
        if answer and end < token < end + length:
            return end
        end += length
    return None


def check_identities(workload: Workload, prompts: list[Prompt], block_tokens: int) -> None:
    """Each pair of prompts has its blocks in common, and no block more; within an answer, up to its start."""
    places = by_answer(workload)
    assert len(places) == len(prompts)
    texts = {number: tokens_of(*place) for number, place in places.items()}
    for one, prompt in enumerate(prompts):
        assert len(texts[one]) == planned_tokens(*places[one])
        assert len(texts[one]) == len(prompt.whole) * block_tokens + prompt.tail_tokens
        for other in range(one):
            blocks = common(prompt.whole, prompts[other].whole)
            found = common(texts[one], texts[other])
            assert found // block_tokens <= blocks, (other, one)
            if found < blocks * block_tokens:
                torn = [answers_at(*places[at], blocks * block_tokens) for at in (one, other)]
                assert found in torn, (other, one)


@FEW
@given(traces(BLOCK), st.sampled_from((0, 1, 2, 8)))
def test_mooncake_prompts_share_text_as_far_as_blocks(prompts: list[Prompt], forks: int) -> None:
    """Over all pairs, of one conversation or two, wherever conversations are told apart."""
    with patch.object(mooncake_reader, "MAX_FORKS", forks):
        workload = mooncake(prompts)
    check(workload)
    check_identities(workload, prompts, BLOCK)


@FEW
@given(traces(SESSION_BLOCK))
def test_session_prompts_share_text_as_far_as_blocks(prompts: list[Prompt]) -> None:
    """The same for recorded sessions, whose requests are one conversation."""
    workload = sessions(prompts)
    check(workload)
    assert len(workload.conversations) == 1
    check_identities(workload, prompts, SESSION_BLOCK)


@FEW
@given(traces(SESSION_BLOCK))
def test_what_the_simulation_plays_shares_the_same_blocks(prompts: list[Prompt]) -> None:
    """A workload as recorded sessions: names of blocks agree as far as texts do."""
    workload = sessions(prompts)
    (conversation,) = workload.conversations
    (session,) = to_recorded(workload)
    texts = [tokens_of(conversation, number) for number in range(len(prompts))]
    played = {turn.answer_tokens - 1: turn for turn in session.turns}
    for one in range(len(prompts)):
        assert played[one].prompt_tokens == len(texts[one])
        assert len(played[one].blocks()) == len(texts[one]) // SESSION_BLOCK
        for other in range(one):
            blocks = common(played[one].blocks(), played[other].blocks())
            assert blocks == common(texts[one], texts[other]) // SESSION_BLOCK


@FEW
@given(traces(BLOCK), st.sampled_from((1.5, 2.0, 7.0, 100.0)))
def test_scaled_recordings_hold_together(prompts: list[Prompt], scale: float) -> None:
    """Lengths shrink by the scale, up to what keeps each answer and each new message there."""
    full, scaled = mooncake(prompts), mooncake(prompts, scale=scale)
    check(scaled)
    assert [len(one.turns) for one in full.conversations] == [len(one.turns) for one in scaled.conversations]
    for one, other in zip(full.conversations, scaled.conversations, strict=True):
        for number, turn in enumerate(one.turns):
            before, after = planned_tokens(one, number), planned_tokens(other, number)
            assert before is not None
            assert after is not None
            assert before // scale <= after + 1
            assert after <= max(1, before / scale) + 2 * len(turn.messages)


@FEW
@given(traces(BLOCK))
def test_the_same_trace_makes_the_same_workload(prompts: list[Prompt]) -> None:
    """Reading draws nothing."""
    assert mooncake(prompts) == mooncake(prompts)


@FEW
@given(st.lists(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 5)), max_size=4), max_size=12))
def test_the_tree_finds_what_comparing_all_finds(rows: list[list[tuple[int, int]]]) -> None:
    """The longest common beginning with any earlier row, and a row that has it: as the naive search does."""
    tree = Prefixes()
    names: list[list[int]] = []
    for number, row in enumerate(rows):
        named = [at for first, length in row for at in range(first, first + length)]
        assert [at for first, length in joined(row) for at in range(first, first + length)] == named
        node, like = tree.put(number, row)
        longest = max((common(named, other) for other in names), default=0)
        assert node.depth == longest
        if longest:
            assert like is not None
            assert common(named, names[like]) == longest
            ends = [at for at, other in enumerate(names) if other == named[:longest]]
            assert like == ends[-1] if ends else True
        else:
            assert like is None
        names.append(named)


def test_packed_sessions_are_read(tmp_path: Path) -> None:
    """By gzip or not."""
    line = {"id": "s", "requests": [{"t": 0, "in": 100, "out": 5, "hash_ids": [1]}]}
    packed = tmp_path / "trace.gz"
    packed.write_bytes(gzip.compress(json.dumps(line).encode()))
    assert read_agent_sessions(packed).turns == 1
