"""A stream on its way from decode to a client: every read passed on at once, less the handle.

The answer's head goes out with its first bytes, so until then a decode engine that breaks off can be
replaced; after that the client is told, in an event of its own, and the connection ends. A client that does
not read stops the reading from the engine, and with it the engine.
"""

import asyncio
from collections.abc import Callable

from kvloop.router.response import Headers, Response
from kvloop.router.upstream import EngineConnection, EngineFailureError
from kvloop.wire.sse import HandleFilter


class StreamRelay:
    """The sink between one exchange and one response. `done` tells whether the stream was whole.

    `taken_out`: the endpoint's filter, fresh.
    `on_first` is called before the first byte goes out, `on_handle` with every handle that is taken out and
    how the answer ended, before the client can know that it is over; before that, `on_last` with the object
    that ended it. `done` raises EngineFailureError if not a byte has gone out.
    """

    def __init__(
        self,
        connection: EngineConnection,
        response: Response,
        headers: Headers,
        taken_out: HandleFilter,
        on_first: Callable[[], None],
        on_handle: Callable[[bytes, str], None],
        on_last: Callable[[bytes], None] = lambda _: None,
    ) -> None:
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._connection = connection
        self._response = response
        self._headers = headers
        self._filter = taken_out
        self._on_first = on_first
        self._on_handle = on_handle
        self._on_last = on_last
        self._handle: bytes | None = None
        self._last: bytes | None = None

    async def run(self) -> bool:
        """Take the whole stream. False if it broke off."""
        self._response.on_pause = self._connection.pause
        self._response.on_resume = self._connection.resume
        self._connection.attach(self)
        return await self.done

    def on_body(self, data: bytes, ends: bool) -> None:
        """One read's worth of the stream."""
        if self.done.done():
            return
        self._pass(self._filter.feed(data), ends)
        if self._filter.overlong:
            self._cut("the engine's answer had an event that is too long")

    def on_end(self) -> None:
        """The engine has said everything."""
        if self.done.done():
            return
        self._pass(self._filter.close(), ends=True)
        if not self._response.started:
            self._start()
        self._response.finish()
        self.done.set_result(True)

    def on_lost(self, error: EngineFailureError) -> None:
        """The engine is gone."""
        if self.done.done():
            return
        if self._response.started:
            self._cut(f"the engine broke off its answer ({error.kind})")
        else:
            self.done.set_exception(error)

    def _pass(self, data: bytes, ends: bool) -> None:
        if self._filter.last is not self._last:
            self._last = self._filter.last
            if self._last is not None:
                self._on_last(self._last)
        if self._filter.handle != self._handle:
            self._handle = self._filter.handle
            if self._handle is not None:
                self._on_handle(self._handle, self._filter.ending)
        if data:
            if not self._response.started:
                self._start()
            self._response.write(data, ends=ends)

    def _start(self) -> None:
        self._on_first()
        self._response.start(200, self._headers)

    def _cut(self, why: str) -> None:
        """End with an error event.

        The line break before it ends an event whose blank line is still to come.
        """
        if not self._response.started:
            self._start()
        self._response.write(b"\n" + self._response.shape.event(why))
        self._response.keep_alive = False
        self._response.finish()
        self.done.set_result(False)
