"""A generation request on its way: the turn machine says what to do next, this does it.

Per request there is one task, and per hop one exchange. Everything that changes state (the lineage table,
engines' queues, the turn) changes between awaits. The task is cancelled when the client leaves, and every
exchange is closed on the way out, which aborts a hop that is still under way.
"""

import asyncio
import logging
from dataclasses import dataclass, field
from functools import partial

from kvloop.router.config import RouterConfig
from kvloop.router.conversations import Conversations, Lookup
from kvloop.router.engine import Engine
from kvloop.router.fleet import Fleet
from kvloop.router.headers import REQUEST_ID, forwarded, hop, request_id, returned
from kvloop.router.leases import LeaseUse
from kvloop.router.metrics import Metrics
from kvloop.router.relay import StreamRelay
from kvloop.router.request import Request
from kvloop.router.response import Response
from kvloop.router.retain import without_retention
from kvloop.router.turn import AskDecode, AskPrefill, Failure, GiveUp, Step, Turn
from kvloop.router.upstream import EngineFailureError, Head
from kvloop.wire.ending import ending_of_answer
from kvloop.wire.openai import (
    Endpoint,
    Generation,
    RequestError,
    decode_body,
    prefill_body,
    read_generation,
    read_prefill_answer,
    take_handle,
)
from kvloop.wire.report import TurnReport, read_report

logger = logging.getLogger("kvloop.router")

_NS_PER_S = 1_000_000_000


@dataclass(slots=True)
class _Run:
    """One request while it is served."""

    request: Request
    response: Response
    generation: Generation
    lookup: Lookup
    turn: Turn
    lines: bytes
    began_s: float
    use: LeaseUse | None
    report: TurnReport | None = None
    refused: tuple[Head, bytes] | None = field(default=None)
    why: str = ""


class Proxy:
    """Serves the generation endpoints."""

    def __init__(
        self, config: RouterConfig, fleet: Fleet, conversations: Conversations, metrics: Metrics
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._conversations = conversations
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()

    async def generate(self, endpoint: Endpoint, request: Request, response: Response) -> None:
        """Answer one request, whatever it takes."""
        identifier = request_id(request)
        response.headers.append((REQUEST_ID, identifier))
        try:
            generation = read_generation(endpoint, request.body)
            lookup = self._conversations.look_up(request, generation)
        except RequestError as error:
            response.send_error(error.status, str(error), error.param, error.code)
            return
        run = self._run(request, response, generation, lookup, forwarded(request, identifier))
        try:
            step: Step | None = run.turn.start()
            while step is not None:
                if isinstance(step, AskPrefill):
                    step = await self._prefill(run, step)
                elif isinstance(step, AskDecode):
                    step = await self._decode(run, step)
                else:
                    self._give_up(run, step)
                    step = None
        except asyncio.CancelledError:
            self._metrics.gone.inc()
            raise
        finally:
            self._end_use(run)
        self._metrics.answered(run.turn.route, response.status)

    def _run(
        self, request: Request, response: Response, generation: Generation, lookup: Lookup, lines: bytes
    ) -> _Run:
        match = lookup.match if self._config.return_enabled else None
        self._metrics.found.labels(match.by if match else "none").inc()
        if lookup.gap_ns is not None:
            self._metrics.gap.observe(lookup.gap_ns / _NS_PER_S)
        if generation.alone:
            self._metrics.alone.labels(generation.alone).inc()
        preferred = match.turn.engine if match else None
        turn = Turn(
            self._fleet.choose_prefill,
            partial(self._fleet.choose_decode, preferred),
            match.turn.handle if match else None,
            alone=generation.alone is not None,
        )
        use = self._conversations.use(lookup)
        return _Run(request, response, generation, lookup, turn, lines, self._loop.time(), use)

    async def _prefill(self, run: _Run, step: AskPrefill) -> Step | None:
        engine = self._fleet.prefill[step.engine]
        body = prefill_body(run.generation, step.handle, run.lookup.salt)
        parts = hop(engine, "POST", run.request.path, run.lines, body)
        try:
            with engine.slot():
                head, answer = await engine.fetch(
                    parts, self._config.limits.max_answer_bytes, self._config.prefill_timeout_s
                )
        except EngineFailureError as error:
            return run.turn.prefill_failed(self._failed(run, engine, error))
        engine.answered()
        if 400 <= head.status < 500:
            again = run.turn.prefill_refused()
            if again is None:
                run.response.send(head.status, returned(head), answer)
            else:
                self._failed(run, engine, EngineFailureError(_status_kind(head.status), Failure.ANSWERED))
            return again
        handover = read_prefill_answer(answer) if head.status == 200 else None
        if handover is None:
            self._failed(run, engine, EngineFailureError(_status_kind(head.status), Failure.ANSWERED))
            return run.turn.prefill_failed(Failure.ANSWERED)
        run.report = read_report(handover, step.handle is not None)
        self._count(run.report, asked=step.handle is not None)
        return run.turn.prefilled(handover, run.report.returned_tokens if run.report else None)

    async def _decode(self, run: _Run, step: AskDecode) -> Step | None:
        engine = self._fleet.decode[step.engine]
        handover = without_retention(step.handover) if run.lookup.keep_ns == 0 else step.handover
        body = decode_body(run.generation, handover, run.lookup.salt)
        parts = hop(engine, "POST", run.request.path, run.lines, body)
        try:
            with engine.slot():
                exchange = await engine.ask(parts, self._config.timeouts.idle_timeout_s)
                try:
                    engine.answered()
                    if exchange.head.status == 200 and exchange.head.get(b"content-type").lower().startswith(
                        b"text/event-stream"
                    ):
                        relay = StreamRelay(
                            exchange.connection,
                            run.response,
                            returned(exchange.head),
                            self._config.limits.max_event_bytes,
                            partial(self._before_first_byte, run),
                            partial(self._file, run, engine),
                        )
                        if not await relay.run():
                            self._metrics.cut.labels("engine").inc()
                        return None
                    answer = await exchange.connection.collect(self._config.limits.max_answer_bytes)
                finally:
                    exchange.connection.close()
        except EngineFailureError as error:
            self._failed(run, engine, error)
            return run.turn.decode_failed()
        return self._answer(run, engine, exchange.head, answer)

    def _answer(self, run: _Run, engine: Engine, head: Head, answer: bytes) -> Step | None:
        if head.status >= 500:
            self._failed(run, engine, EngineFailureError(_status_kind(head.status), Failure.ANSWERED))
            run.refused = (head, answer)
            return run.turn.decode_failed()
        answer, handle = take_handle(answer)
        if handle is not None:
            self._file(run, engine, handle, ending_of_answer(answer))
        self._before_first_byte(run)
        run.response.send(head.status, returned(head), answer)
        return None

    def _give_up(self, run: _Run, step: GiveUp) -> None:
        if run.refused is not None:
            head, answer = run.refused
            run.response.send(head.status, returned(head), answer)
        else:
            status = 504 if run.why == "timeout" else 502
            run.response.send_error(status, f"{step.message} ({run.why})" if run.why else step.message)

    def _failed(self, run: _Run, engine: Engine, error: EngineFailureError) -> Failure:
        run.why = error.kind
        if error.failure is Failure.UNREACHED or error.kind == "timeout":
            engine.failed(self._loop.time())
        self._metrics.fallbacks.labels(engine.role, error.kind).inc()
        if engine.worth_a_line(self._loop.time()):
            logger.warning("%s engine %s: %s", engine.role, engine.url, error)
        return error.failure

    def _before_first_byte(self, run: _Run) -> None:
        self._end_use(run)  # decode computes, so it has all that it could take over
        route = run.turn.route
        self._metrics.first_byte[route].observe(self._loop.time() - run.began_s)
        run.response.headers.append((b"x-kvloop-route", route.encode()))
        if run.report is not None and route is not route.DECODE:
            run.response.headers.append((b"x-kvloop-reused-tokens", b"%d" % run.report.returned_tokens))
            run.response.headers.append((b"x-kvloop-cached-tokens", b"%d" % run.report.cached_tokens))

    # What an answer leaves behind does not hold it up. The loop writes what is under way, then runs what was
    # to be called soon, in that order, and only then reads again: who has an answer's last byte finds its
    # turn filed.

    def _end_use(self, run: _Run) -> None:
        """The request needs nothing any more of what decode kept; said once, the first time."""
        if run.use is not None:
            self._loop.call_soon(run.use.end)
            run.use = None

    def _file(self, run: _Run, engine: Engine, handle: bytes, ending: str) -> None:
        if self._config.return_enabled:
            self._loop.call_soon(self._file_now, run.lookup, handle, engine.url, ending)

    def _file_now(self, lookup: Lookup, handle: bytes, engine: str, ending: str) -> None:
        if self._conversations.file(lookup, handle, engine, ending):
            self._metrics.filed.inc()

    def _count(self, report: TurnReport | None, asked: bool) -> None:
        if report is None:
            return
        for source, tokens in (
            ("local", report.local_tokens),
            ("returned", report.returned_tokens),
            ("computed", report.computed_tokens),
        ):
            self._metrics.tokens.labels(source).inc(tokens)
        if asked and not report.returned_tokens:
            self._metrics.missed(report.reason)


def _status_kind(status: int) -> str:
    return f"status_{status // 100}xx" if status != 200 else "no_handover"
