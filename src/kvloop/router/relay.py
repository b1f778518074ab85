"""A stream on its way from decode to a client: every read passed on at once, less the handle.

The answer's head goes out with its first bytes, so until then a decode engine that breaks off can be
replaced; after that another one goes on with the answer where that can be (`router.continuation`), or the
client is told, in an event of its own, and the connection ends. A client that does not read stops the reading
from the engine, and with it the engine.
"""

import asyncio
from collections.abc import Callable

from kvloop.router.response import Headers, Response
from kvloop.router.turn import Failure
from kvloop.router.upstream import EngineConnection, EngineFailureError
from kvloop.wire.sse import HandleFilter


class StreamRelay:
    """The sink between one exchange and one response. `done` tells whether the stream was whole.

    `taken_out`: the endpoint's filter, fresh. `follows`: an answer that breaks off may be gone on with, so
    that nothing is said about it: `why` then says what happened.
    `on_first` is called before the first byte goes out, `on_said` before the first of the answer itself, for
    an API may announce one while its prompt is computed. `on_handle` is called with every handle that is
    taken out and how the answer ended, before the client can know that it is over; before that, `on_last`
    with the object that ended it. `done` raises EngineFailureError if not a byte has gone out.
    """

    def __init__(
        self,
        connection: EngineConnection,
        response: Response,
        headers: Headers,
        taken_out: HandleFilter,
        on_first: Callable[[], None],
        on_said: Callable[[], None],
        on_handle: Callable[[bytes, str], None],
        on_last: Callable[[bytes], None] = lambda _: None,
        *,
        follows: bool = False,
    ) -> None:
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.why: str | None = None
        self._follows = follows
        self._connection = connection
        self._response = response
        self._headers = headers
        self._filter = taken_out
        self._on_first = on_first
        self._on_said = on_said
        self._said = False
        self._on_handle = on_handle
        self._on_last = on_last
        self._handle: bytes | None = None
        self._last: bytes | None = None

    async def run(self) -> bool:
        """Take the whole stream. False if it broke off."""
        self._connection.attach(self)
        if not self.done.done():
            self._response.paced_by(self._connection.pause, self._connection.resume)
        return await self.done

    def cut(self, why: str) -> None:
        """End the answer with an error event.

        The line breaks before it end a line, and an event, of which the end was still to come.
        """
        if not self._response.started:
            self._start()
        self._response.write(b"\n\n" + self._response.shape.event(why))
        self._response.keep_alive = False
        self._response.finish()

    def on_body(self, data: bytes, ends: bool) -> None:
        """One read's worth of the stream."""
        if self.done.done():
            return
        self._pass(self._filter.feed(data), ends)
        if self._filter.failed is not None:
            self._break(EngineFailureError(self._filter.failed, Failure.BROKEN))
        elif self._filter.overlong:
            self._breaks("the engine's answer had an event that is too long")

    def on_end(self) -> None:
        """The engine has said everything."""
        if self.done.done():
            return
        self._pass(self._filter.close(), ends=True)
        if self._filter.failed is not None or not self._filter.whole:
            self._break(EngineFailureError(self._filter.failed or "ended", Failure.BROKEN))
            return
        if not self._response.started:
            self._start()
        self._response.finish()
        self.done.set_result(True)

    def on_lost(self, error: EngineFailureError) -> None:
        """The engine is gone."""
        if not self.done.done():
            self._break(error)

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
            if not self._said and self._filter.says:
                self._said = True
                self._on_said()
            self._response.write(data, ends=ends)

    def _start(self) -> None:
        self._on_first()
        self._response.start(200, self._headers)

    def _break(self, error: EngineFailureError) -> None:
        if self._response.started:
            self._breaks(f"the engine broke off its answer ({error.kind})")
        else:
            self.done.set_exception(error)

    def _breaks(self, why: str) -> None:
        self.why = why
        if not self._follows:
            self.cut(why)
        self.done.set_result(False)
