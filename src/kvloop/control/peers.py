"""Whom a channel asks: one DEALER for each peer's address, opened when it is first asked.

Peers are bounded, and an idle one is hung up on. A connection that broke off is ZMQ's to mend; where it is
still not back a moment later, the socket is opened anew for the next question (see `handshake`). What was
queued in it is lost then: old questions to somebody who is not there.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from kvloop.control.address import Address, endpoint_of
from kvloop.control.handshake import CLOSED, LEFT, OPENED, REFUSED, SURE_AFTER, Failures, Monitor
from kvloop.control.transport import Socket, Transport

MAX_PEERS = 256
"""DEALER sockets kept open; the longest unused goes first. More prefill-decode pairs than any fleet's
engine has; with their monitors three quarters of the sockets that a ZMQ context gives out."""
PEER_IDLE_S = 600.0
"""An engine that was not asked for longer than any lease lasts has nothing to tell. If it is no more, its
socket would try to reconnect ten times a second for ever."""
MEND_S = 1.0
"""Ten attempts of ZMQ's to connect again."""

Hear = Callable[[Socket], None]


@dataclass(slots=True)
class _Peer:
    address: Address
    socket: Socket
    monitor: Monitor
    used_s: float = 0.0
    down_since_s: float | None = None
    hung_up: int = 0

    def close(self) -> None:
        self.monitor.close()
        self.socket.close()


class Peers:
    """One channel's peers, for its thread. `watch(socket, hear)` has `hear(socket)` called when there is
    something to read, `unwatch` ends it; `hear` reads answers."""

    def __init__(
        self,
        transport: Transport,
        failures: Failures,
        *,
        watch: Callable[[Socket, Hear], None],
        unwatch: Callable[[Socket], None],
        hear: Hear,
    ) -> None:
        self._transport = transport
        self._failures = failures
        self._watch = watch
        self._unwatch = unwatch
        self._hear = hear
        self._peers: OrderedDict[Address, _Peer] = OrderedDict()  # the longest unused first

    def __len__(self) -> int:
        return len(self._peers)

    def addresses(self) -> list[Address]:
        """Whose sockets are open, the longest unused first."""
        return list(self._peers)

    def socket(self, address: Address) -> Socket:
        """The socket to `address`, used now. ZMQError where there can be none."""
        now_s = time.monotonic()
        peer = self._peers.pop(address, None)
        if peer is not None and peer.down_since_s is not None and now_s - peer.down_since_s > MEND_S:
            self._close(peer)
            peer = None
        if peer is None:
            peer = self._open(address)
            if len(self._peers) >= MAX_PEERS:
                self._close_oldest()
        peer.used_s = now_s
        self._peers[address] = peer
        return peer.socket

    def close_idle(self) -> int | None:
        """Close the connections that were idle for too long; milliseconds until there are more, if any."""
        now_s = time.monotonic()
        while self._peers:
            left_s = next(iter(self._peers.values())).used_s + PEER_IDLE_S - now_s
            if left_s > 0:
                return int(left_s * 1000) + 1
            self._close_oldest()
        return None

    def _open(self, address: Address) -> _Peer:
        opened = self._transport.open(zmq.DEALER)
        try:
            peer = _Peer(address, opened, Monitor(opened, REFUSED | LEFT | OPENED | CLOSED))
            opened.connect(endpoint_of(address))
        except zmq.ZMQError:
            opened.close()
            raise
        self._watch(opened, self._hear)
        self._watch(peer.monitor.socket, lambda _: self._hear_events(peer))
        return peer

    def _hear_events(self, peer: _Peer) -> None:
        for event in peer.monitor.take():
            if event == OPENED:
                peer.down_since_s, peer.hung_up = None, 0
            elif event == CLOSED:
                peer.down_since_s = peer.down_since_s or time.monotonic()
            else:
                peer.hung_up += 1 if event == LEFT else SURE_AFTER
                self._failures.server(endpoint_of(peer.address), peer.hung_up)

    def _close_oldest(self) -> None:
        _, oldest = self._peers.popitem(last=False)
        self._close(oldest)

    def _close(self, peer: _Peer) -> None:
        self._unwatch(peer.socket)
        self._unwatch(peer.monitor.socket)
        peer.close()
