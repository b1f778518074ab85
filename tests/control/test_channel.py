"""The control channel over real sockets on loopback: answers come back, nothing a peer sends or fails to
send stops the thread, and no call of the scheduler's waits for anybody."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

import pytest
import zmq

from kvloop.control import channel as control
from kvloop.control.address import Address, endpoint_of
from kvloop.control.channel import ControlChannel
from kvloop.control.deferred import Answer
from kvloop.control.transport import MAX_QUEUED_FRAMES, PART_BYTES, Socket, Transport, cut
from kvloop.errors import UserError
from kvloop.wire.control import Failed, Message, Release, Released, Stat
from kvloop.wire.seal import MAX_FRAME_BYTES, NONCE_BYTES, Seal
from tests.control.peer import AT_ONCE_S, KEY, WAIT_S, Open, Peer, free_port


@contextmanager
def raw_dealer(address: Address) -> Iterator[Socket]:
    """A ZMQ client that holds the secret, but seals nothing."""
    context: zmq.Context[Socket] = zmq.Context()
    dealer = Transport(context, Seal(KEY, "raw").transport_secret()).open(zmq.DEALER)
    try:
        dealer.connect(endpoint_of(address))
        yield dealer
    finally:
        context.destroy(linger=0)


def has_ipv6() -> bool:
    """Whether this machine has an IPv6 loopback."""
    with suppress(OSError), socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
        probe.bind(("::1", 0))
        return True
    return False


HOSTS = [
    "127.0.0.1",
    "localhost",
    pytest.param("::1", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6 loopback here")),
]


def test_ipv6_literals_stand_in_brackets() -> None:
    """As in a URL; names and IPv4 addresses stand as they are."""
    assert endpoint_of(("fe80::1", 5570)) == "tcp://[fe80::1]:5570"
    assert endpoint_of(("10.0.0.1", 5570)) == "tcp://10.0.0.1:5570"
    assert endpoint_of(("decode-0.svc", 5570)) == "tcp://decode-0.svc:5570"


@pytest.mark.parametrize("host", HOSTS)
def test_an_answer_comes_back_under_its_question_s_tag(opened: Open, host: str) -> None:
    """Over IPv4, IPv6 and a name alike."""
    prefill, decode = opened("prefill"), opened("decode", host)
    assert prefill.ask(decode.address, "there", 1) == Released(True)
    assert prefill.ask(decode.address, "gone", 2) == Released(False)


def test_both_ends_ask_at_once(opened: Open) -> None:
    """An engine that retains and reads serves and asks on the same channel."""
    one, other = opened("one"), opened("other")
    assert one.channel.send(other.address, Release("there"), 1)
    assert other.channel.send(one.address, Release("gone"), 2)
    assert one.replies.get(timeout=WAIT_S) == (1, Released(True))
    assert other.replies.get(timeout=WAIT_S) == (2, Released(False))


def test_a_message_without_a_tag_wants_no_answer(opened: Open) -> None:
    """A release is sent and forgotten; its answer is dropped when it comes."""
    prefill, decode = opened("prefill"), opened("decode")
    assert prefill.channel.send(decode.address, Release("there"))
    assert prefill.ask(decode.address, "gone") == Released(False)
    assert decode.asked == [Release("there"), Release("gone")]
    assert prefill.replies.empty()


def sealed(key: bytes = KEY, now_ms: int | None = None, reply_to: bytes = b"") -> bytes:
    """A release, sealed."""
    sent_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    return Seal(key, "stranger").seal(Release("there"), sent_ms, os.urandom(NONCE_BYTES), reply_to)


BAD_FRAMES: dict[str, Callable[[], list[bytes]]] = {
    "empty": lambda: [b""],
    "garbage": lambda: [os.urandom(200)],
    "another key's": lambda: [sealed(bytes(32))],
    "tampered": lambda: [sealed()[:-1] + b"\x00"],
    "cut off": lambda: [sealed()[:-3]],
    "an hour old": lambda: [sealed(now_ms=time.time_ns() // 1_000_000 - 3_600_000)],
    "an answer to nothing": lambda: [sealed(reply_to=bytes(NONCE_BYTES))],
    "two parts": lambda: [sealed(), b"more"],
    "an empty part more": lambda: [sealed(), b""],
    "oversize": lambda: cut(bytes(MAX_FRAME_BYTES + 1)),
    "an oversize part": lambda: [bytes(PART_BYTES + 1)],
}


@pytest.mark.parametrize("kind", BAD_FRAMES)
def test_a_frame_that_does_not_open_is_dropped(opened: Open, kind: str) -> None:
    """It reaches nobody, gets no answer, and the next question is answered as if nothing had been."""
    prefill, decode = opened("prefill"), opened("decode")
    with raw_dealer(decode.address) as stranger:
        stranger.send_multipart(BAD_FRAMES[kind]())
        assert prefill.ask(decode.address) == Released(True)
        assert not stranger.poll(int(AT_ONCE_S * 1000))
    assert decode.asked == [Release("there")]


def test_an_oversize_part_costs_its_sender_the_connection(opened: Open) -> None:
    """It is not even received: the transport hangs up at its length."""
    decode = opened("decode")
    with raw_dealer(decode.address) as stranger:
        events = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        stranger.send(bytes(PART_BYTES + 1))
        assert events.poll(int(WAIT_S * 1000))
        stranger.disable_monitor()


def test_a_frame_sent_twice_is_answered_once(opened: Open) -> None:
    """Whoever records a frame gains nothing by sending it again."""
    decode = opened("decode")
    frame = sealed()
    with raw_dealer(decode.address) as stranger:
        stranger.send(frame)
        assert stranger.poll(int(WAIT_S * 1000))
        stranger.recv()
        stranger.send(frame)
        assert not stranger.poll(int(AT_ONCE_S * 1000))
    assert decode.asked == [Release("there")]


def test_an_answer_that_was_not_asked_for_reaches_nobody(opened: Open) -> None:
    """A peer that is asked may answer that question, once, and no other."""
    prefill = opened("prefill")
    context: zmq.Context[Socket] = zmq.Context()
    decode = Transport(context, Seal(KEY, "decode").transport_secret()).open(zmq.ROUTER)
    port = decode.bind_to_random_port("tcp://127.0.0.1")
    try:
        assert prefill.channel.send(("127.0.0.1", port), Release("there"), "tag")
        assert decode.poll(int(WAIT_S * 1000))
        identity, question = decode.recv_multipart()
        seal = Seal(KEY, "decode")
        now_ms = time.time_ns() // 1_000_000
        nonce = Seal(KEY, "reader").open(question, now_ms).nonce
        replies: list[tuple[bytes, Message]] = [
            (os.urandom(NONCE_BYTES), Failed("to another question")),
            (b"", Failed("to none")),
            (nonce, Released(True)),
            (nonce, Failed("again")),
        ]
        for reply_to, reply in replies:
            decode.send_multipart((identity, seal.seal(reply, now_ms, os.urandom(NONCE_BYTES), reply_to)))
        decode.send_multipart((identity, os.urandom(90)))
        assert prefill.replies.get(timeout=WAIT_S) == ("tag", Released(True))
        time.sleep(AT_ONCE_S)
        assert prefill.replies.empty()
    finally:
        context.destroy(linger=0)


def test_a_question_that_raises_costs_its_answer_only(opened: Open) -> None:
    """The asker hears that it failed, not why, and the thread goes on."""
    prefill, decode = opened("prefill"), opened("decode")
    good = decode.channel._serve

    def bad(_message: Message, _answer: Answer) -> Message:
        raise RuntimeError("a secret")

    decode.channel._serve = bad
    assert prefill.ask(decode.address) == Failed("internal error")
    decode.channel._serve = good
    assert prefill.ask(decode.address) == Released(True)


def test_an_answer_that_raises_costs_that_answer_only(opened: Open) -> None:
    """The reader's code may fail on one answer; the next one is delivered."""
    prefill, decode = opened("prefill"), opened("decode")
    good = prefill.channel._on_reply
    raised = threading.Event()

    def bad(_tag: object, _message: Message) -> None:
        raised.set()
        raise RuntimeError

    prefill.channel._on_reply = bad
    assert prefill.channel.send(decode.address, Release("there"), 1)
    assert raised.wait(WAIT_S)
    prefill.channel._on_reply = good
    assert prefill.ask(decode.address, tag=2) == Released(True)


@contextmanager
def black_hole() -> Iterator[Address]:
    """A port that accepts connections and never reads from them."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield "127.0.0.1", listener.getsockname()[1]


@contextmanager
def nobody() -> Iterator[Address]:
    """A port that refuses connections."""
    yield "127.0.0.1", free_port()


@pytest.mark.parametrize("peer", [black_hole, nobody])
def test_a_peer_that_does_not_answer_holds_nobody_up(
    opened: Open, peer: Callable[[], AbstractContextManager[Address]]
) -> None:
    """`send` returns at once for more messages than its socket queues; those beyond fail by name, and
    other peers are served."""
    prefill, decode = opened("prefill"), opened("decode")
    with peer() as address:
        for number in range(MAX_QUEUED_FRAMES + 50):
            assert prefill.channel.send(address, Release("there"), number)
        _, message = prefill.replies.get(timeout=WAIT_S)
        assert isinstance(message, Failed)
        assert prefill.ask(decode.address, tag="after") == Released(True)


def test_a_peer_whose_address_is_nonsense_fails_by_name(opened: Open) -> None:
    """The asker hears of it, no socket is left behind, and the thread goes on."""
    prefill, decode = opened("prefill"), opened("decode")
    for host in ("no host", "a/b"):
        assert isinstance(prefill.ask((host, 1)), Failed)
    assert not len(prefill.channel._peers)
    assert prefill.ask(decode.address) == Released(True)


def test_a_stuck_thread_makes_send_refuse_and_not_wait(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far more wake-ups than a pipe holds, and then the bound: the scheduler never waits or raises."""
    monkeypatch.setattr(control, "MAX_OUTGOING_MESSAGES", 5_000)
    prefill, decode = opened("prefill"), opened("decode")
    held = threading.Event()
    stuck = threading.Event()

    def serve(_message: Message, _answer: Answer) -> Message:
        stuck.set()
        held.wait(WAIT_S)
        return Failed("woken")

    prefill.channel._serve = serve
    assert decode.channel.send(prefill.address, Stat(), "tag")
    assert stuck.wait(WAIT_S)
    try:
        sent = [prefill.channel.send(decode.address, Release("there")) for _ in range(6_000)]
    finally:
        held.set()
    assert sent.count(True) == 5_000
    assert not any(sent[5_000:])


def test_stop_is_quick_and_may_be_repeated(opened: Open) -> None:
    """Also with messages waiting for a peer that does not answer; afterwards nothing can be sent."""
    prefill = opened("prefill")
    with black_hole() as address:
        for number in range(100):
            assert prefill.channel.send(address, Release("there"), number)
        time.sleep(AT_ONCE_S)
        prefill.channel.stop()
        prefill.channel.stop()
    assert not prefill.channel._thread.is_alive()
    assert not prefill.channel.send(("127.0.0.1", 1), Release("there"))
    Peer("again", port=prefill.address[1]).channel.stop()


def test_a_channel_that_never_started_can_be_stopped() -> None:
    """An engine that fails while starting leaves no port taken."""
    address = ("127.0.0.1", free_port())
    for _ in range(2):
        channel = ControlChannel(
            address, Seal(KEY, "decode"), serve=lambda *_: Failed(""), on_reply=lambda *_: None
        )
        channel.stop()


def test_stop_gives_a_stuck_thread_up(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's shutdown does not hang because an answer does."""
    monkeypatch.setattr(control, "STOP_TIMEOUT_S", 0.1)
    prefill, decode = opened("prefill"), opened("decode")
    held = threading.Event()
    stuck = threading.Event()

    def serve(_message: Message, _answer: Answer) -> Message:
        stuck.set()
        held.wait(WAIT_S)
        return Failed("woken")

    decode.channel._serve = serve
    assert prefill.channel.send(decode.address, Stat(), "tag")
    assert stuck.wait(WAIT_S)
    decode.channel.stop()
    assert decode.channel._thread.is_alive(), "nothing was stuck"
    held.set()
    decode.channel._thread.join(WAIT_S)
    decode.channel._context.destroy(linger=0)


@pytest.mark.parametrize(
    ("host", "why"), [("127.0.0.1", "in use"), ("no-such-host.invalid", "not known|resolution|service")]
)
def test_an_address_that_cannot_be_had_is_the_operator_s_to_mend(opened: Open, host: str, why: str) -> None:
    """The error names the address, the reason and the two settings."""
    taken = opened("decode")
    with pytest.raises(
        UserError, match=rf"{host}.*({why}).*kvloop_control_host and kvloop_control_port.*--control-port"
    ):
        Peer("another", host, taken.address[1])
