"""The bench's party on the control channel: it asks as prefill does, and hears what prefill asks."""

import os
import time

import zmq

from kvloop.bench.control import ControlClient, Middleman
from kvloop.control.channel import ControlChannel
from kvloop.control.transport import Socket, Transport
from kvloop.core.handle import Handle
from kvloop.local.ports import free_ports
from kvloop.wire.control import Claim, Message, Refused, Stat, StatReply
from kvloop.wire.handle import decode_handle, encode_handle
from kvloop.wire.seal import NONCE_BYTES, Seal

KEY = bytes(range(32))
HANDLE = Handle(1, "d0", "inc", "lease", "127.0.0.1", 5570, 1, 1, 1, 100, 480_000)
CLAIM = Claim("lease", "inc", bytes(16), bytes(16), b"", 64)


def serve(message: Message, _: object) -> Message:
    """A decode engine that refuses claims."""
    if isinstance(message, Stat):
        return StatReply("d0", "inc", {"leases": 20})
    return Refused("unknown_lease")


def test_a_client_is_answered_and_timed() -> None:
    """Its frames open at a real control channel, and the answer comes with the time that it took."""
    port = free_ports(1)[0]
    channel = ControlChannel(
        ("127.0.0.1", port), Seal(KEY, "d0"), serve=serve, on_reply=lambda _tag, _message: None
    )
    channel.start()
    try:
        with ControlClient(KEY, "127.0.0.1", port) as client:
            stat = client.ask(Stat())
            answer, took_ms = client.timed_ask(CLAIM)
    finally:
        channel.stop()
    assert isinstance(stat, StatReply)
    assert stat.counters == {"leases": 20}
    assert answer == Refused("unknown_lease")
    assert 0 < took_ms < 5_000


def test_a_claim_is_overheard_and_refused() -> None:
    """The handle that names the middleman brings it the claim; whoever asked goes on at once."""
    filed = {"kvloop_handle": encode_handle(HANDLE, KEY)}
    seal = Seal(KEY, "prefill")
    context: zmq.Context[Socket] = zmq.Context()
    asking = Transport(context, seal.transport_secret()).open(zmq.DEALER)
    with Middleman(KEY, lambda *_: Refused("bench")) as middleman, asking as socket:
        named = decode_handle(middleman.take_over(filed)["kvloop_handle"], KEY)
        assert (named.lease_id, named.engine_id) == (HANDLE.lease_id, HANDLE.engine_id)
        socket.connect(f"tcp://{named.control_host}:{named.control_port}")
        now_ms = time.time_ns() // 1_000_000
        socket.send(seal.seal(CLAIM, now_ms, os.urandom(NONCE_BYTES)))
        assert socket.poll(5_000)
        answer = seal.open(socket.recv(), now_ms).message
        assert middleman.claim() == CLAIM
    context.term()
    assert answer == Refused("bench")
