"""The log of turns: what stands in it, and what happens when its file cannot be written."""

import json
import logging
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from kvloop.errors import UserError
from kvloop.router import turn_log as module
from kvloop.router.config import RouterConfig
from kvloop.router.serve import serving
from tests.router.decode_peer import TOKENS
from tests.router.fake_engine import TURN
from tests.router.harness import HELLO, in_loop, stack, until
from tests.router.test_leases import A1, MORE, OTHER, peer_, renewing


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The turns in a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


@in_loop
async def test_a_conversation_can_be_followed_through_it(tmp_path: Path) -> None:
    """Each turn names the one it goes on from, a fork the one it leaves, and strangers nobody."""
    path = tmp_path / "turns.jsonl"
    with peer_() as peer:
        async with renewing(peer, turn_log=str(path)) as router:
            for messages in ([HELLO], [HELLO, A1, MORE], [HELLO, A1, OTHER], [OTHER], [HELLO]):
                answer = await router.chat(messages, stream=len(messages) > 1)
                assert answer.status_code == 200
    turns = lines_of(path)
    first, second, fork, other, again = turns
    assert (first["goes_on_from"], first["shared_tokens"]) == (None, 0)
    assert second["goes_on_from"] == fork["goes_on_from"] == first["request_id"]
    assert second["conversation"] == fork["conversation"] == first["request_id"]
    assert other["goes_on_from"] is None
    assert again["goes_on_from"] == first["request_id"]
    assert [turn["route"] for turn in turns[:2]] == ["recompute", "return"]
    assert second["reused_tokens"] == TURN["returned_tokens"]
    assert second["prompt_tokens"] == TURN["prompt_tokens"]
    assert second["took_ms"] >= second["first_ms"] > 0
    assert first["first_ms"] == 0
    assert first["answer_tokens"] == max(0, TOKENS + 1 - first["prompt_tokens"])


@in_loop
async def test_there_is_no_text_in_it(tmp_path: Path) -> None:
    """Neither the client's nor the model's, and a tenant is a digest."""
    path = tmp_path / "turns.jsonl"
    async with stack(turn_log=str(path)) as router:
        secret = {"role": "user", "content": "the launch code is 0000"}
        await router.chat([secret], headers={"authorization": "Bearer sk-very-secret"})
    text = path.read_text()
    assert lines_of(path)[0]["tenant"]
    assert not any(word in text for word in ("launch", "0000", "sk-very-secret", "Hello"))


@in_loop
async def test_a_file_that_is_moved_away_is_made_anew(tmp_path: Path) -> None:
    """As logrotate does; no turn is lost."""
    path, old = tmp_path / "turns.jsonl", tmp_path / "turns.jsonl.1"
    with mock.patch.object(module, "FLUSH_S", 0.01):
        async with stack(turn_log=str(path)) as router:
            await router.chat([HELLO])
            await until(lambda: len(lines_of(path)) == 1)
            path.rename(old)
            await router.chat([HELLO, A1, MORE])
    assert len(lines_of(old)) == len(lines_of(path)) == 1


@in_loop
async def test_a_file_that_cannot_be_written_costs_no_turn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said, and what waits is written when it can be."""
    path = tmp_path / "there" / "turns.jsonl"
    path.parent.mkdir()
    with mock.patch.object(module, "FLUSH_S", 0.01), caplog.at_level(logging.WARNING):
        async with stack(turn_log=str(path)) as router:
            path.unlink()
            path.parent.rmdir()
            assert (await router.chat([HELLO])).status_code == 200
            await until(lambda: "turns wait" in caplog.text)
            path.parent.mkdir()
            await until(path.exists)
            assert len(lines_of(path)) == 1


@in_loop
async def test_what_waits_is_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And what is dropped is counted aloud."""
    path = tmp_path / "turns.jsonl"
    with mock.patch.object(module, "MAX_PENDING_BYTES", 10), caplog.at_level(logging.WARNING):
        async with stack(turn_log=str(path)) as router:
            await router.chat([HELLO])
            await router.chat([HELLO])
    assert lines_of(path) == []
    assert "2 turns were not logged" in caplog.text


@in_loop
async def test_a_log_that_cannot_be_is_said_at_the_start(tmp_path: Path) -> None:
    """With the flag's name."""
    config = RouterConfig(decode=("http://127.0.0.1:9",), port=0, turn_log=str(tmp_path / "no" / "file"))
    with pytest.raises(UserError, match=r"--turn-log .*No such file"):
        async with serving(config):
            pass
