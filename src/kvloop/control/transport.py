"""The sockets of the control channel: nobody gets to send a frame without the deployment's secret.

A seal is checked once its frame is there; until then whoever sends it has the receiver hold what there is of
it. So under the seal lies ZeroMQ's own security, CURVE (RFC 26/CurveZMQ): a connection begins with a
handshake that only holders of the secret can go through, for the server's key pair is derived from it, and
its public key is told to nobody. Clients draw their own keys: to know the server's proves the secret.

Before the handshake is over a peer can make us hold one part of a message. So frames travel in parts of
`PART_BYTES`, ZMQ hangs up on a longer one at its length, and the handshake must be over in `HANDSHAKE_MS`.

The seal stays. CURVE does not promise that a server's public key cannot be found out, and says nothing of
when, or by whom of those who hold the secret, a frame was made: authenticity, date and replay are the seal's.
"""

from collections.abc import Sequence

import zmq
from zmq.utils import z85

from kvloop.errors import FrameMalformedError, FrameOversizeError, UserError
from kvloop.wire.seal import MAX_FRAME_BYTES

PART_BYTES = 32 << 10
"""Most messages are one part. Those of a MiB are sooner there in parts than whole: encrypting overlaps with
sending."""
MAX_PARTS = -(-MAX_FRAME_BYTES // PART_BYTES)
MAX_QUEUED_FRAMES = 1000
"""In each socket, each way: to a peer that does not answer, a claim a second for a quarter of an hour."""
HANDSHAKE_MS = 5_000
"""Three round trips and four scalar multiplications, on ZMQ's own thread; ZMQ's 30 s let strangers stay."""
_CURVE_BYTES = 33  # what CURVE puts around each part: command name, nonce, flags, authenticator

Socket = zmq.Socket[bytes]


class Transport:
    """Opens one channel's sockets, in `context`. `secret`: `Seal.transport_secret`."""

    def __init__(self, context: "zmq.Context[Socket]", secret: bytes) -> None:
        """UserError where ZeroMQ was built without CURVE."""
        if not zmq.has("curve"):
            raise UserError(
                "this ZeroMQ was built without CURVE, which the control channel's security rests on: install "
                "pyzmq from its wheel, or libzmq with libsodium"
            )
        self._context = context
        self._server_secret = z85.encode(secret)
        self._server_public = zmq.curve_public(self._server_secret)
        self._client_public, self._client_secret = zmq.curve_keypair()

    def open(self, kind: int) -> Socket:
        """A ROUTER, which serves, or a DEALER, which asks; neither bound nor connected."""
        opened = self._context.socket(kind)
        opened.setsockopt(zmq.IPV6, 1)
        opened.setsockopt(zmq.LINGER, 0)
        opened.setsockopt(zmq.MAXMSGSIZE, PART_BYTES + _CURVE_BYTES)
        opened.setsockopt(zmq.SNDHWM, MAX_QUEUED_FRAMES)
        opened.setsockopt(zmq.RCVHWM, MAX_QUEUED_FRAMES)
        opened.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        if kind == zmq.ROUTER:
            opened.setsockopt(zmq.CURVE_SERVER, 1)
            opened.setsockopt(zmq.CURVE_SECRETKEY, self._server_secret)
        else:
            opened.setsockopt(zmq.CURVE_SERVERKEY, self._server_public)
            opened.setsockopt(zmq.CURVE_PUBLICKEY, self._client_public)
            opened.setsockopt(zmq.CURVE_SECRETKEY, self._client_secret)
        return opened


def cut(frame: bytes) -> list[bytes]:
    """The parts in which a frame travels: all of `PART_BYTES` but the last."""
    return [frame[start : start + PART_BYTES] for start in range(0, max(1, len(frame)), PART_BYTES)]


def joined(parts: Sequence[bytes]) -> bytes:
    """The frame that was cut into these parts. WireError for what `cut` does not make."""
    if len(parts) == 1:
        return parts[0]
    if len(parts) > MAX_PARTS:
        raise FrameOversizeError(f"{len(parts)} parts")
    if not parts or not parts[-1] or any(len(part) != PART_BYTES for part in parts[:-1]):
        raise FrameMalformedError("parts of the wrong size")
    return b"".join(parts)
