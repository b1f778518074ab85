"""Whoever reaches a control port without the secret: nothing of theirs is kept, heard or waited for."""

import socket
import time
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from kvloop.control import handshake, peers, transport
from kvloop.control.channel import ControlChannel
from kvloop.control.transport import MAX_PARTS, PART_BYTES, Socket, Transport, cut, joined
from kvloop.errors import UserError, WireError
from kvloop.wire.control import MAX_LEASES_PER_MESSAGE, Claim, Drop, Message, Release, Released, Renew
from kvloop.wire.seal import MAX_FRAME_BYTES, Seal
from tests.control.peer import KEY, WAIT_S, Open
from tests.control.stranger import ATTACKS, MIB, attacked, greeting

OTHER_KEY = bytes(32)
CONNECTIONS = 40
GROWTH_BYTES = 16 * MIB
"""Forty unfinished parts and ZMQ's buffers are 4 MiB; without CURVE half a second brings in hundreds."""


def resident_bytes() -> int:
    """What this process holds of the machine's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def stranger() -> ControlChannel:
    """A party with another secret that only asks, on its way."""
    channel = ControlChannel(None, Seal(OTHER_KEY, "stranger"), on_reply=lambda *_: None)
    channel.start()
    return channel


@pytest.mark.parametrize("kind", ATTACKS)
def test_what_strangers_send_is_neither_kept_nor_heard(opened: Open, kind: str) -> None:
    """They send all they can for a while: the memory stays, and whoever has the secret is served."""
    prefill, decode = opened("prefill"), opened("decode")
    assert prefill.ask(decode.address) == Released(True)
    before, most, asked = resident_bytes(), 0, 1
    until_s = time.monotonic() + 0.5
    with attacked(decode.address, kind, connections=CONNECTIONS, for_s=0.5) as sent:
        while not most or time.monotonic() < until_s:
            assert prefill.ask(decode.address) == Released(True)
            asked += 1
            most = max(1, most, resident_bytes() - before)
    assert len(sent) >= CONNECTIONS
    assert max(sent), "nothing was sent"
    assert most < GROWTH_BYTES
    assert decode.asked == [Release("there")] * asked
    assert decode.channel.frames_dropped().keys() <= {"handshake"}


def test_who_does_not_finish_the_handshake_is_hung_up_on(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections that say nothing do not add up."""
    monkeypatch.setattr(transport, "HANDSHAKE_MS", 50)
    decode = opened("decode")
    for said in (b"", greeting(b"CURVE"), greeting(b"CURVE") + b"\x04\xc8\x05HELLO"):
        with socket.create_connection(decode.address, WAIT_S) as one:
            one.sendall(said)
            while one.recv(1000):
                pass


def test_stop_is_quick_under_attack(opened: Open) -> None:
    """Events of strangers' connections come all the while, and hold nothing up."""
    decode = opened("decode")
    with attacked(decode.address, "a hello of nobody", connections=4, for_s=0.5):
        time.sleep(0.2)
        decode.channel.stop()
    assert not decode.channel._thread.is_alive()
    assert decode.channel._context.closed


def test_another_secret_is_no_answer_and_one_line_in_the_log(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either side names the port and what to look at, however often it is tried in ten seconds."""
    lines: list[str] = []
    monkeypatch.setattr(handshake.logger, "warning", lambda text, *args: lines.append(text % args))
    decode = opened("decode")
    asking = stranger()
    try:
        for seen in (1, 2):
            before = decode.channel.frames_dropped().get("handshake", 0)
            assert asking.send(decode.address, Release("there"), "tag")
            deadline_s = time.monotonic() + WAIT_S
            while (
                decode.channel.frames_dropped().get("handshake", 0) < before + 3 or len(lines) < 2 * seen
            ) and time.monotonic() < deadline_s:
                time.sleep(0.001)
            assert asking.frames_dropped()["handshake"] >= 2
            assert len(lines) == 2 * seen
            for failures in (asking._failures, decode.channel._failures):
                failures._silent_until_s = 0.0
    finally:
        asking.stop()
    assert decode.asked == []
    port = decode.address[1]
    assert sorted(lines[:2]) == [
        f"somebody without this deployment's secret connected to the control port tcp://127.0.0.1:{port}",
        f"the control port tcp://127.0.0.1:{port} refuses connections: has it the same secret?",
    ]


def test_one_that_is_cut_off_in_the_handshake_raises_no_alarm(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that restarts hangs up, too; it is counted, and ZMQ connects again."""
    lines: list[str] = []
    monkeypatch.setattr(handshake.logger, "warning", lambda text, *args: lines.append(text % args))
    prefill = opened("prefill")
    with socket.create_server(("127.0.0.1", 0)) as restarting:
        address = restarting.getsockname()
        assert prefill.channel.send(address, Release("there"), "tag")
        restarting.accept()[0].close()
        deadline_s = time.monotonic() + WAIT_S
        while not prefill.channel.frames_dropped() and time.monotonic() < deadline_s:
            time.sleep(0.001)
    opened("decode", port=address[1])
    assert prefill.replies.get(timeout=WAIT_S) == ("tag", Released(True))
    assert lines == []


def test_a_connection_that_zmq_gives_up_is_opened_anew(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of an older version, replaced at the same address by one of ours, is asked again."""
    monkeypatch.setattr(peers, "MEND_S", 0.05)
    prefill = opened("prefill")
    with socket.create_server(("127.0.0.1", 0)) as old:
        address = old.getsockname()
        assert prefill.channel.send(address, Release("lost"))
        connection, _ = old.accept()
        connection.settimeout(WAIT_S)
        connection.sendall(greeting(b"NULL"))
        while connection.recv(1000):
            pass
    connection.close()
    deadline_s = time.monotonic() + WAIT_S
    while not prefill.channel.frames_dropped() and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert prefill.channel.frames_dropped() == {"handshake": 1}
    decode = opened("decode", port=address[1])
    time.sleep(0.1)
    assert prefill.ask(decode.address) == Released(True)


def test_without_curve_no_channel_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator is told what to install; nothing works half."""
    monkeypatch.setattr(zmq, "has", lambda _: False)
    with pytest.raises(UserError, match="without CURVE"):
        stranger()


def test_the_server_s_key_is_that_of_the_secret() -> None:
    """The same on every machine, in every version; another one for another secret."""
    with zmq.Context() as context:
        made: zmq.Context[Socket] = context
        publics = [
            Transport(made, Seal(key, "a").transport_secret())._server_public for key in (KEY, OTHER_KEY)
        ]
    assert publics[0] == b"=[/PRHLXgu)jEoN2[<OzQ[{w2Cx16C+DXw)6zYfW"
    assert publics[1] != publics[0]


LARGEST: list[Message] = [
    Claim("l" * 128, "i" * 128, bytes(16), bytes(1 << 20), bytes(16), 1 << 22),
    Drop(["l" * 128] * MAX_LEASES_PER_MESSAGE),
    Renew([("l" * 128, 86_400_000, 1000)] * MAX_LEASES_PER_MESSAGE),
]


@pytest.mark.parametrize("message", LARGEST, ids=lambda message: type(message).__name__)
def test_the_largest_questions_arrive(opened: Open, message: Message) -> None:
    """In as many parts as it takes."""
    prefill, decode = opened("prefill"), opened("decode")
    assert prefill.channel.send(decode.address, message, "tag")
    assert prefill.replies.get(timeout=WAIT_S) == ("tag", Released(False))
    assert decode.asked == [message]


SIZES = st.one_of(
    st.integers(0, 3 * PART_BYTES),
    st.builds(lambda parts, more: max(0, parts * PART_BYTES + more), st.integers(0, 5), st.integers(-2, 2)),
)


@given(SIZES)
def test_a_frame_comes_out_as_it_was_cut(size: int) -> None:
    """Whole parts, then the rest; every part counts."""
    frame = bytes(index % 251 for index in range(256)) * (size // 256 + 1)
    parts = cut(frame[:size])
    assert joined(parts) == frame[:size]
    assert all(0 < len(part) <= PART_BYTES for part in parts) or parts == [b""]


@pytest.mark.parametrize(
    "parts",
    [[], [b"", b"a"], [b"a", b"b"], [bytes(PART_BYTES), b""], [*cut(bytes(MAX_FRAME_BYTES)), b"more"]],
    ids=["none", "an empty one", "short ones", "an empty rest", "too many"],
)
def test_parts_that_cut_does_not_make_are_refused(parts: list[bytes]) -> None:
    """There is one way to send a frame."""
    with pytest.raises(WireError):
        joined(parts)
    assert len(cut(bytes(MAX_FRAME_BYTES))) == MAX_PARTS
