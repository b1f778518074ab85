"""Whom a channel is connected to, and for how long."""

import time

import pytest

from kvloop.control import channel as control
from kvloop.control import peers
from kvloop.wire.control import Release, Released
from tests.control.peer import WAIT_S, Open
from tests.control.test_channel import nobody


def test_peers_are_bounded(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest unused connection is closed for a new one, and opened again when it is needed."""
    monkeypatch.setattr(peers, "MAX_PEERS", 2)
    prefill = opened("prefill")
    decodes = [opened(f"decode-{number}") for number in range(3)]
    for number, kept in [(0, [0]), (1, [0, 1]), (0, [1, 0]), (2, [0, 2]), (1, [2, 1])]:
        assert prefill.ask(decodes[number].address) == Released(True)
        assert prefill.channel._peers.addresses() == [decodes[peer].address for peer in kept]


def test_who_is_not_asked_for_long_is_hung_up_on(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that is no more would be called back for ever; one that is there is called again when needed."""
    prefill, decode = opened("prefill"), opened("decode")
    assert prefill.ask(decode.address) == Released(True)
    assert prefill.channel._peers.addresses() == [decode.address], "at once is too soon"
    monkeypatch.setattr(peers, "PEER_IDLE_S", 0.05)
    assert prefill.ask(decode.address) == Released(True)
    deadline_s = time.monotonic() + WAIT_S
    while len(prefill.channel._peers) and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert not len(prefill.channel._peers)
    assert prefill.ask(decode.address) == Released(True)


def test_open_questions_are_bounded(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of questions that nobody answers the oldest are forgotten."""
    monkeypatch.setattr(control, "MAX_OPEN_QUESTIONS", 3)
    prefill, decode = opened("prefill"), opened("decode")
    with nobody() as address:
        for number in range(10):
            assert prefill.channel.send(address, Release("there"), number)
    assert prefill.ask(decode.address) == Released(True)
    assert list(prefill.channel._questions.values()) == [8, 9]
