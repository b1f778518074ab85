"""What becomes of connections: ZMQ sets them up behind our back, and says so only to who listens.

A peer of another secret is seen by its failing handshake alone: to its asker it is silent, as one that is
gone. So each socket's events are listened to, failures are counted, and one line in `LOG_EVERY_S` names the
likely cause. Who listens sees another thing, too. ZMQ connects again what breaks off, but not where the
peer's bytes made no sense: such a connection is over for good, and its socket has to be made anew.
"""

import logging
import struct
import time
from collections.abc import Callable

import zmq

from kvloop.control.transport import Socket

logger = logging.getLogger("vllm.kvloop.control")

LOG_EVERY_S = 10.0
SURE_AFTER = 3
"""Whoever restarts, or is cut off, hangs up once; ZMQ tries again every 0.1 s."""
MAX_EVENTS_AT_ONCE = 100
"""Strangers make as many as they like; questions are heard in between."""

REFUSED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
LEFT = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
"""The other end hung up, or said nothing: so a server turns clients away, and so does a port scan end."""
OPENED = zmq.EVENT_HANDSHAKE_SUCCEEDED
CLOSED = zmq.EVENT_DISCONNECTED

_EVENT = struct.Struct("=HI")


class Monitor:
    """Listens to one socket's connections. For the thread whose the socket is."""

    def __init__(self, watched: Socket, events: int) -> None:
        self._watched = watched
        self.socket: Socket = watched.get_monitor_socket(events)

    def take(self) -> list[int]:
        """What has happened since the last call, or the first part of it."""
        events: list[int] = []
        while len(events) < MAX_EVENTS_AT_ONCE:
            try:
                event, _ = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            events.append(_EVENT.unpack(event)[0])
        return events

    def close(self) -> None:
        """Stop to listen; the socket itself stays open."""
        self._watched.disable_monitor()
        self.socket.close(linger=0)


class Failures:
    """Reports handshakes that failed. `count` is called for each."""

    def __init__(self, count: Callable[[], None]) -> None:
        self._count = count
        self._silent_until_s = 0.0

    def client(self, endpoint: str) -> None:
        """Somebody who asked us, at our `endpoint`, is none of ours."""
        self._report("somebody without this deployment's secret connected to the control port %s", endpoint)

    def server(self, endpoint: str, times: int) -> None:
        """Whom we asked, at `endpoint`, is none of ours, or takes us for none of theirs, if it has hung up so
        many times in a row."""
        what = "the control port %s refuses connections: has it the same secret?"
        self._report(what if times >= SURE_AFTER else None, endpoint)

    def _report(self, what: str | None, endpoint: str) -> None:
        self._count()
        now_s = time.monotonic()
        if what is not None and now_s >= self._silent_until_s:
            self._silent_until_s = now_s + LOG_EVERY_S
            logger.warning(what, endpoint)
