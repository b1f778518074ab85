"""How simulated engines in different processes read each other's memory: NIXL's part, over TCP.

A frame is its length (u32, big-endian) and a msgpack array. A question is [number, "read", incarnation,
request id or nil, block ids] or [number, "done", request id]; a read is answered by [number, cells or nil],
nil where the incarnation is another, or the handover is over. Like NIXL's it trusts whoever reaches it, and
asks no lease for leave.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec

from kvloop.sim.request import Address

MAX_FRAME_BYTES = 64 << 20  # a million cells of a number's nine bytes, seven times
MAX_PEERS = 256  # as many as the control channel keeps
_LENGTH_BYTES = 4

Read = Callable[[str, str | None, tuple[int, ...]], list[int] | None]


class _Frames(asyncio.Protocol):
    """Frames over one connection."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._buffer[:_LENGTH_BYTES])
            if end > MAX_FRAME_BYTES:
                self.close()
                return
            if len(self._buffer) < end:
                return
            frame = bytes(self._buffer[_LENGTH_BYTES:end])
            del self._buffer[:end]
            try:
                self.take(msgspec.msgpack.decode(frame))
            except (msgspec.MsgspecError, ValueError, TypeError):
                self.close()
                return

    def put(self, value: list[Any]) -> None:
        frame = msgspec.msgpack.encode(value)
        if self.transport is not None:
            self.transport.write(len(frame).to_bytes(_LENGTH_BYTES) + frame)

    def take(self, value: Any) -> None:
        raise NotImplementedError

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class _Asked(_Frames):
    """A peer that reads here."""

    def __init__(self, read: Read, done: Callable[[str], None]) -> None:
        super().__init__()
        self._read = read
        self._done = done

    def take(self, value: Any) -> None:
        match value:
            case [number, "read", str(incarnation), request_id, list(blocks)]:
                self.put([number, self._read(incarnation, request_id, tuple(blocks))])
            case [_, "done", str(request_id)]:
                self._done(request_id)
            case _:
                self.close()


class _Asking(_Frames):
    """A connection to a peer that is read."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._asked = 0

    async def ask(self, *question: Any) -> list[int] | None:
        """A question and its answer; None when the connection is lost before it comes."""
        self._asked += 1
        waiting = self._waiting[self._asked] = asyncio.get_running_loop().create_future()
        self.put([self._asked, *question])
        cells = await waiting
        return cells if isinstance(cells, list) else None

    def tell(self, *message: Any) -> None:
        """A message that has no answer."""
        self.put([0, *message])

    def take(self, value: Any) -> None:
        number, answer = value
        waiting = self._waiting.pop(number, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def connection_lost(self, _: Exception | None) -> None:
        self.transport = None
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            if not answer.done():
                answer.set_result(None)


class SideChannel:
    """One engine's side channel: serves reads of its memory, and reads others'."""

    def __init__(self, address: Address, read: Read, done: Callable[[str], None]) -> None:
        self._address = address
        self._serve = lambda: _Asked(read, done)
        self._server: asyncio.Server | None = None
        self._peers: OrderedDict[Address, _Asking] = OrderedDict()

    async def start(self) -> None:
        """Listen. OSError where that cannot be."""
        self._server = await asyncio.get_running_loop().create_server(self._serve, *self._address)

    async def read(
        self, address: Address, incarnation: str, request_id: str | None, blocks: tuple[int, ...]
    ) -> list[int] | None:
        """What a peer's blocks hold now; None where it cannot be said."""
        peer = await self._peer(address)
        return None if peer is None else await peer.ask("read", incarnation, request_id, blocks)

    async def done(self, address: Address, request_id: str) -> None:
        """Tell a peer that a handover of its is not needed any more."""
        peer = await self._peer(address)
        if peer is not None:
            peer.tell("done", request_id)

    def close(self) -> None:
        """Close everything."""
        if self._server is not None:
            self._server.close()
        for peer in self._peers.values():
            peer.close()

    async def _peer(self, address: Address) -> _Asking | None:
        peer = self._peers.get(address)
        if peer is None or peer.transport is None:
            try:
                _, peer = await asyncio.get_running_loop().create_connection(_Asking, *address)
            except OSError:
                return None
            self._peers[address] = peer
            while len(self._peers) > MAX_PEERS:
                self._peers.popitem(last=False)[1].close()
        self._peers.move_to_end(address)
        return peer
