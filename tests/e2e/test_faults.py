"""Losing anything costs time, never an answer: each fault on real engines, with the cold engine's output.

Faults that only timing can make go through a middleman on the control channel, which stops or kills
decode between the grant of a claim and the read that it protects.
"""

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvloop.bench.control import Middleman
from kvloop.local.ports import free_ports
from kvloop.wire.control import Claim, Granted, Message, Refused, Release
from kvloop.wire.handle import decode_handle, encode_handle
from tests.e2e.conftest import CLAIM_TERM_MS, CLAIM_TIMEOUT_MS
from tests.e2e.test_histories import Messages, check, two_turns, user
from tests.e2e.turns import Pair, Turn

STOPPED_S = 10
SOON_S = 60
LOG_LINES = 200


def history_of(pair: Pair, subject: str) -> tuple[Messages, Turn]:
    """A held history with the next question asked, and the turn whose lease holds it."""
    history, last = two_turns(pair, subject)
    return [*history, user("And?")], last


def relay_then(act: Callable[[], None], on: type = Claim) -> Callable[..., Message | None]:
    """A relay that asks decode, then acts, then answers prefill."""

    def relay(message: Message, ask: Callable[[Message], Message]) -> Message | None:
        answer = ask(message) if isinstance(message, on) else None
        if isinstance(answer, Granted):
            act()
        return answer

    return relay


def recomputes(pair: Pair, messages: Messages, filed: dict[str, Any]) -> dict[str, Any]:
    """Prefill answers the turn without any return; what it says of it."""
    account = pair.prefill_hop(messages, filed)["kvloop_turn"]
    assert account["returned_tokens"] == 0
    assert account["computed_tokens"] == account["prompt_tokens"]
    return account  # type: ignore[no-any-return]


def test_prefill_still_answers_right_after_a_lost_read(pair: Pair, secret: bytes) -> None:
    """Decode is killed between the grant and the read: recompute, right answer, and the next turn returns
    again."""
    messages, last = history_of(pair, "kill-after-claim")
    with Middleman(secret, relay_then(pair.decode.kill)) as middleman:
        filed = middleman.take_over(last.filed or {})
        account = recomputes(pair, messages, filed)
    assert account["reason"] in ("read_failed", "deadline")
    pair.decode.restart()
    turn = pair.turn(messages)
    check(pair, turn, messages)
    again = pair.turn([*messages, user("More?")], turn.filed)
    assert again.returned > 0


def test_decode_killed_before_the_claim(pair: Pair) -> None:
    """A handle of an engine that is dead: no reply, recompute within the claim's timeout."""
    messages, last = history_of(pair, "kill-before-claim")
    pair.decode.kill()
    started = time.monotonic()
    account = recomputes(pair, messages, last.filed or {})
    assert account["reason"] == "no_reply"
    assert time.monotonic() - started < CLAIM_TIMEOUT_MS / 1000 + SOON_S
    pair.decode.restart()


def test_decode_restarted_between_turns(pair: Pair) -> None:
    """Same address, same engine id, new process: the old handle is refused, the next turn is whole."""
    messages, last = history_of(pair, "restart")
    pair.decode.restart()
    turn = pair.turn(messages, last.filed)
    check(pair, turn, messages)
    assert (turn.returned, turn.reason) == (0, "wrong_incarnation")
    after = [*messages, {"role": "assistant", "content": turn.text}, user("More?")]
    again = pair.turn(after, turn.filed)
    check(pair, again, after)
    assert again.returned > 0


def test_decode_stopped_during_the_read(pair: Pair, secret: bytes) -> None:
    """Decode sleeps from the grant until long after the deadline: the turn is recomputed at the deadline,
    in other
    blocks, and what lands late changes nothing."""
    messages, last = history_of(pair, "stop-during-read")
    woken = threading.Event()

    def wake() -> None:
        pair.decode.cont()
        woken.set()

    def sleep_on() -> None:
        pair.decode.stop()
        threading.Timer(STOPPED_S, wake).start()

    with Middleman(secret, relay_then(sleep_on)) as middleman:
        filed = middleman.take_over(last.filed or {})
        started = time.monotonic()
        params = pair.prefill_hop(messages, filed)
        took_s = time.monotonic() - started
        account = params["kvloop_turn"]
        assert account["returned_tokens"] == 0
        assert account["reason"] == "deadline"
        assert not woken.is_set(), "the turn waited for decode"
        assert took_s > CLAIM_TERM_MS / 1000 - 1
        assert "still in flight at its claim's deadline" in pair.prefill.log_tail(LOG_LINES)
        assert woken.wait(STOPPED_S + SOON_S)
    for question in ("One?", "Two?"):
        turn = pair.turn([*messages[:-1], user(question)], last.filed)
        check(pair, turn, [*messages[:-1], user(question)])
    assert "late read back" in pair.prefill.log_tail(LOG_LINES), "the late blocks never came home"


def test_control_channel_swallows_everything(pair: Pair, secret: bytes) -> None:
    """A claim that is never answered costs its timeout."""
    messages, last = history_of(pair, "black-hole")
    with Middleman(secret, lambda *_: None) as middleman:
        account = recomputes(pair, messages, middleman.take_over(last.filed or {}))
        assert [type(message) for message in middleman.heard] == [Claim]
    assert account["reason"] == "no_reply"


def test_control_port_that_accepts_and_says_nothing(pair: Pair, secret: bytes) -> None:
    """A TCP peer that is not one of ours."""
    messages, last = history_of(pair, "deaf")
    handle = decode_handle((last.filed or {})["kvloop_handle"], secret)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        from dataclasses import replace

        other = replace(handle, control_port=deaf.getsockname()[1])
        account = recomputes(pair, messages, {"kvloop_handle": encode_handle(other, secret)})
    assert account["reason"] == "no_reply"


def test_grant_that_comes_late_is_given_back(pair: Pair, secret: bytes) -> None:
    """A grant after the timeout is released by the next step, not kept until its deadline."""
    messages, last = history_of(pair, "late-grant")

    def late(message: Message, ask: Callable[[Message], Message]) -> Message | None:
        if isinstance(message, Claim):
            time.sleep(CLAIM_TIMEOUT_MS / 1000 + 0.5)
        return ask(message)

    with Middleman(secret, late) as middleman:
        account = recomputes(pair, messages, middleman.take_over(last.filed or {}))
        assert account["reason"] == "no_reply"
        deadline = time.monotonic() + SOON_S
        while not any(isinstance(message, Release) for message in middleman.heard):
            pair.prefill_hop([user("another step")])
            assert time.monotonic() < deadline, "the late grant was never released"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param(
            lambda text: text[:-4] + ("AAAA" if text[-4:] != "AAAA" else "BBBB"),
            "handle_forged",
            id="tampered",
        ),
        pytest.param(lambda text: text[: len(text) // 4 * 4 - 8], "handle_forged", id="truncated"),
        pytest.param(lambda _: "A" * 5_000, "handle_too_long", id="huge"),
        pytest.param(lambda _: "\u2603" * 20, "handle_malformed", id="not ascii"),
        pytest.param(lambda _: "", "handle_malformed", id="empty"),
        pytest.param(lambda _: {"deeply": ["wrong"]}, "handle_malformed", id="not text"),
    ],
)
def test_handle_that_is_not_ours(pair: Pair, change: Any, reason: str) -> None:
    """A handle that was altered anywhere is worth nothing and costs nothing."""
    messages, last = history_of(pair, "forged")
    account = recomputes(pair, messages, {"kvloop_handle": change((last.filed or {})["kvloop_handle"])})
    assert account["reason"] == reason


def test_handle_from_the_future(pair: Pair, secret: bytes) -> None:
    """A handle of a later version is recognised as such."""
    import msgspec

    from kvloop.core.key import HANDLE_PURPOSE, keyed_digest
    from kvloop.wire.handle import _to_text

    messages, _ = history_of(pair, "future")
    body = msgspec.msgpack.encode([99, "whatever", "comes", "next"])
    text = _to_text(body + keyed_digest(secret, HANDLE_PURPOSE, body))
    assert recomputes(pair, messages, {"kvloop_handle": text})["reason"] == "handle_version"


def test_handle_replayed(pair: Pair) -> None:
    """A handle may be presented any number of times, also after its lease: it is proven each time anew."""
    messages, last = history_of(pair, "replay")
    for question in ("One?", "Two?", "Three?"):
        asked = [*messages[:-1], user(question)]
        turn = pair.turn(asked, last.filed)
        check(pair, turn, asked)
        assert turn.returned > 0


def test_grant_with_foreign_blocks(pair: Pair, secret: bytes) -> None:
    """A peer that grants blocks which it does not have costs the read, not the engine."""
    messages, last = history_of(pair, "hostile-grant")

    def lie(message: Message, ask: Callable[[Message], Message]) -> Message | None:
        answer = ask(message)
        if not isinstance(answer, Granted):
            return answer
        wild = [[(1 << 31) - 1 for _ in group] for group in answer.block_ids]
        return Granted(answer.claim_id, answer.matched_tokens, wild, answer.term_ms, answer.source)

    with Middleman(secret, lie) as middleman:
        account = recomputes(pair, messages, middleman.take_over(last.filed or {}))
    assert account["reason"] == "read_failed"
    turn = pair.turn(messages, last.filed)
    check(pair, turn, messages)
    assert turn.returned > 0


def test_grant_of_more_than_was_asked(pair: Pair, secret: bytes) -> None:
    """More tokens than the prompt has, or blocks that do not fit them, are no grant."""
    messages, last = history_of(pair, "greedy-grant")

    def exaggerate(message: Message, ask: Callable[[Message], Message]) -> Message | None:
        answer = ask(message)
        if not isinstance(answer, Granted):
            return answer
        short = [group[:-1] for group in answer.block_ids]
        return Granted(answer.claim_id, answer.matched_tokens, short, answer.term_ms, answer.source)

    with Middleman(secret, exaggerate) as middleman:
        account = recomputes(pair, messages, middleman.take_over(last.filed or {}))
    assert account["reason"] == "bad_grant"


def test_refusal_is_taken_for_an_answer(pair: Pair, secret: bytes) -> None:
    """A refusal ends the wait at once."""
    messages, last = history_of(pair, "refused")
    with Middleman(secret, lambda *_: Refused("expired")) as middleman:
        assert recomputes(pair, messages, middleman.take_over(last.filed or {}))["reason"] == "expired"


def test_ports_are_free() -> None:
    """The helper that every stack rests on gives distinct ports."""
    assert len(set(free_ports(8, "127.0.0.1"))) == 8
