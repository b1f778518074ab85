"""Prefill's report: what adds up to a prompt is believed, and nothing else."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloop.core.chain import MAX_CHAIN_TOKENS
from kvloop.core.report import TurnReport
from kvloop.wire.report import MAX_TEMPLATE_TOKENS, MAX_TOKENS_PER_BYTE, read_report

TURN = {"prompt_tokens": 9, "local_tokens": 1, "returned_tokens": 2, "computed_tokens": 6, "reason": None}
BODY_BYTES = MAX_CHAIN_TOKENS
COUNTS = ("prompt_tokens", "local_tokens", "returned_tokens", "computed_tokens")
# What is written in place of a count. No sum of it is a prompt.
NONSENSE = ["-1", "-2", "true", "false", "2.0", "2.5", "1e3", "1e400", '"2"', "null", "[]", "{}", "NaN"]
NONSENSE += ["Infinity", "1" * 30, "-" + "1" * 30, str(2**63), "1" * 5000]


def handover(turn: dict[str, Any]) -> bytes:
    """A handover with this report."""
    return json.dumps({"remote_block_ids": [[1]], "kvloop_turn": turn}).encode()


def read(params: bytes, asked: bool) -> TurnReport | None:
    """What is read of it beside a body that is long enough."""
    return read_report(params, asked, BODY_BYTES)


def test_a_report() -> None:
    """Its counts as they are; members that are not known are skipped."""
    report = read_report(
        handover({**TURN, "reason": "expired", "new": [1]}), asked=True, body_bytes=BODY_BYTES
    )
    assert report == TurnReport(9, 1, 2, 6, "expired")
    assert report.cached_tokens == 3
    assert read(b"{}", asked=True) is read(b'{"kvloop_turn":null}', asked=True) is None


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("nonsense", NONSENSE)
def test_nonsense_is_no_report(count: str, nonsense: str) -> None:
    """In place of any count, however it is written."""
    text = handover({**TURN, count: "@"}).replace(b'"@"', nonsense.encode())
    assert read(text, asked=True) is None


@pytest.mark.parametrize("count", COUNTS)
def test_each_count_is_needed(count: str) -> None:
    """What is left out is not taken for 0."""
    turn: dict[str, Any] = dict.fromkeys(COUNTS, 0)
    assert read(handover(turn), asked=True) == TurnReport(0, 0, 0, 0)
    del turn[count]
    assert read(handover(turn), asked=True) is None


@pytest.mark.parametrize("prompt", [MAX_CHAIN_TOKENS, MAX_CHAIN_TOKENS + 1])
def test_a_prompt_has_an_end(prompt: int) -> None:
    """No prompt is longer than the longest that a handle can name."""
    turn = {**TURN, "prompt_tokens": prompt, "computed_tokens": prompt - 3}
    assert (read(handover(turn), asked=True) is not None) is (prompt <= MAX_CHAIN_TOKENS)


def test_nothing_is_returned_unasked() -> None:
    """Without a handle there was nothing to read from."""
    assert read(handover(TURN), asked=False) is None
    assert (
        read_report(
            handover({**TURN, "local_tokens": 3, "returned_tokens": 0}), asked=False, body_bytes=BODY_BYTES
        )
        is not None
    )


_ANY = st.integers() | st.booleans() | st.floats() | st.none()
_SMALL = st.integers(-2, 9)


_TRUE = st.tuples(*[st.integers(0, 2 * MAX_CHAIN_TOKENS)] * 3).map(
    lambda parts: dict(zip(COUNTS, (sum(parts), *parts), strict=True))
)


@given(
    st.fixed_dictionaries(dict.fromkeys(COUNTS, _ANY))
    | st.fixed_dictionaries(dict.fromkeys(COUNTS, _SMALL))
    | _TRUE,
    st.booleans(),
)
def test_no_more_is_reused_than_the_prompt_has(turn: dict[str, Any], asked: bool) -> None:
    """Whatever an engine says, what is believed is a division of a prompt."""
    report = read(handover(turn), asked)
    if report is not None:
        assert 0 <= report.returned_tokens <= report.cached_tokens <= report.prompt_tokens <= MAX_CHAIN_TOKENS
        assert report.cached_tokens + report.computed_tokens == report.prompt_tokens
        assert asked or not report.returned_tokens
    believable = all(type(turn[name]) is int for name in COUNTS) and min(turn.values()) >= 0
    believable = believable and turn["prompt_tokens"] <= MAX_CHAIN_TOKENS
    believable = believable and sum(turn.values()) == 2 * turn["prompt_tokens"]
    assert (report is not None) is (believable and (asked or not turn["returned_tokens"]))


def test_more_tokens_than_a_body_can_have_are_no_report() -> None:
    """Or an engine could make itself look fast, and every prompt long."""
    most = MAX_TOKENS_PER_BYTE * 100 + MAX_TEMPLATE_TOKENS
    for count, believed in ((most, True), (most + 1, False)):
        turn = {
            **TURN,
            "prompt_tokens": count,
            "local_tokens": count,
            "returned_tokens": 0,
            "computed_tokens": 0,
        }
        assert (read_report(handover(turn), asked=True, body_bytes=100) is not None) is believed


@pytest.mark.parametrize("reason", ["x" * 65, "two words", "\x1b[2J", "é", "", "a" * 10**6])
def test_a_reason_is_one_word(reason: str) -> None:
    """What is kept of thousands of turns and printed on terminals is bounded, and plain."""
    report = read(handover({**TURN, "reason": reason}), asked=True)
    assert report is not None
    assert report.reason == "other"
