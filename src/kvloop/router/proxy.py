"""A generation request on its way: the turn machine says what to do next, this does it.

Per request there is one task, and per hop one exchange. Everything that changes state (the lineage table,
engines' queues, the turn) changes between awaits. The task is cancelled when the client leaves, and every
exchange is closed on the way out, which aborts a hop that is still under way.
"""

import asyncio
import logging
from collections.abc import Collection
from functools import partial

from kvloop.core.decision import DECODE, PREFILL, Route
from kvloop.router.backoff import Backoff
from kvloop.router.belief import Beliefs, size_of
from kvloop.router.config import RouterConfig
from kvloop.router.conversations import Conversations
from kvloop.router.engine import Engine, useless
from kvloop.router.explain import Explanations
from kvloop.router.fleet import Fleet
from kvloop.router.headers import REQUEST_ID, forwarded, hop, request_id, returned
from kvloop.router.metrics import Metrics
from kvloop.router.opening import Opened, Opening
from kvloop.router.relay import StreamRelay
from kvloop.router.request import Request
from kvloop.router.response import Response
from kvloop.router.retain import without_retention
from kvloop.router.run import Run
from kvloop.router.turn import AskDecode, AskPrefill, Failure, GiveUp, Step, Turn
from kvloop.router.upstream import EngineFailureError, Head
from kvloop.wire.answers import read_answer, stream_filter
from kvloop.wire.openai import ALONE, Endpoint, decode_body, prefill_body, read_prefill_answer
from kvloop.wire.refusal import RequestError
from kvloop.wire.report import read_report

logger = logging.getLogger("kvloop.router")

_NS_PER_S = 1_000_000_000


class Proxy:
    """Serves the generation endpoints."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        conversations: Conversations,
        metrics: Metrics,
        opening: Opening,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._conversations = conversations
        self._metrics = metrics
        self._beliefs = Beliefs()
        self._opening = opening
        self._backoff = Backoff()
        self._loop = asyncio.get_running_loop()
        self.explanations = Explanations(config.choice.explain_log_every)

    async def generate(self, endpoint: Endpoint, request: Request, response: Response) -> None:
        """Answer one request, whatever it takes."""
        identifier = request_id(request)
        response.headers.append((REQUEST_ID, identifier))
        lines = forwarded(request, identifier)
        try:
            opened = await self._opening.open(endpoint, request, self._fleet.decode, lines)
        except RequestError as error:
            response.send_error(error.status, str(error), error.param, error.code)
            return
        try:
            await self._serve(self._run(identifier, request, response, opened, lines))
        finally:
            self._opening.close(opened)

    async def _serve(self, run: Run) -> None:
        try:
            step: Step | None = run.turn.start()
            while step is not None:
                if isinstance(step, AskPrefill):
                    step = await self._prefill(run, step)
                elif isinstance(step, AskDecode):
                    if run.turn.repeats:
                        await self._backoff.pause()
                    step = await self._decode(run, step)
                else:
                    self._give_up(run, step)
                    step = None
        except asyncio.CancelledError:
            self._metrics.gone.inc()
            raise
        finally:
            run.progress.close(self._fleet.clock_ns())
            self._end_use(run)
        self._metrics.answered(run.turn.route, run.response.status)

    def _run(
        self, identifier: bytes, request: Request, response: Response, opened: Opened, lines: bytes
    ) -> Run:
        generation, lookup = opened.generation, opened.lookup
        match = lookup.match if self._config.return_enabled else None
        self._metrics.looked_up(match.by if match else "none")
        if lookup.gap_ns is not None:
            self._metrics.gap.observe(lookup.gap_ns / _NS_PER_S)
        if generation.alone:
            self._metrics.alone.labels(generation.alone).inc()
        size = size_of(generation)
        ask = self._beliefs.ask(generation, size, match)
        suits = partial(self._opening.suits, opened)
        ways = [] if generation.alone else self._fleet.choose(ask, suits)
        progress = self._fleet.progress(ask)

        def choose_prefill(excluded: Collection[str]) -> str | None:
            return self._fleet.choose_prefill(progress.ask, excluded, suits)

        def choose_decode(prefill: str | None, excluded: Collection[str], last_resort: bool) -> str | None:
            return self._fleet.choose_decode(progress.ask, prefill, excluded, last_resort, suits)

        return Run(
            request_id=identifier,
            request=request,
            response=response,
            opened=opened,
            size=size,
            believed=ask,
            ways=ways,
            turn=Turn(
                choose_prefill,
                choose_decode,
                match.turn.handle if match else None,
                ways[0] if ways else None,
            ),
            progress=progress,
            lines=lines,
            began_ns=self._fleet.clock_ns(),
            use=self._conversations.use(lookup),
        )

    async def _prefill(self, run: Run, step: AskPrefill) -> Step | None:
        engine = self._fleet.find(step.engine)
        if engine is None:
            return run.turn.prefill_failed(Failure.UNREACHED)
        body = prefill_body(run.generation, step.handle, run.lookup.salt)
        parts = hop(engine, "POST", run.request.path, run.lines, body)
        run.progress.sent_prefill(
            step.engine, with_handle=step.handle is not None, now_ns=self._fleet.clock_ns()
        )
        try:
            with engine.slot():
                head, answer = await engine.fetch(
                    parts, self._config.limits.max_answer_bytes, self._config.prefill_timeout_s
                )
        except EngineFailureError as error:
            return run.turn.prefill_failed(self._failed(run, engine, error, PREFILL))
        if head.status < 500:
            engine.answered()
        if 400 <= head.status < 500:
            again = run.turn.prefill_refused()
            if again is None:
                run.response.send(head.status, returned(head), answer)
            else:
                self._failed(run, engine, useless(head), PREFILL)
            return again
        handover = read_prefill_answer(answer) if head.status == 200 else None
        if handover is None:
            self._failed(run, engine, useless(head), PREFILL)
            return run.turn.prefill_failed(Failure.ANSWERED)
        run.hold(engine)
        run.report = read_report(handover, step.handle is not None, len(run.generation.raw))
        run.progress.prefilled(run.report, self._fleet.clock_ns())
        self._metrics.prefilled(run.report, asked=step.handle is not None)
        return run.turn.prefilled(handover, run.report.returned_tokens if run.report else None)

    async def _decode(self, run: Run, step: AskDecode) -> Step | None:
        engine = self._fleet.find(step.engine)
        if engine is None:
            return run.turn.decode_failed(Failure.UNREACHED)
        handover = without_retention(step.handover) if run.lookup.keep_ns == 0 else step.handover
        body = decode_body(run.generation, handover, run.lookup.salt)
        parts = hop(engine, "POST", run.request.path, run.lines, body)
        run.progress.sent_decode(step.engine, whole=step.handover is ALONE, now_ns=self._fleet.clock_ns())
        try:
            with engine.slot():
                exchange = await engine.ask(parts, self._config.timeouts.idle_timeout_s)
                try:
                    if exchange.head.status < 500:
                        engine.answered()
                    if exchange.head.status == 200 and exchange.head.get(b"content-type").lower().startswith(
                        b"text/event-stream"
                    ):
                        relay = StreamRelay(
                            exchange.connection,
                            run.response,
                            returned(exchange.head),
                            stream_filter(
                                run.generation.endpoint,
                                self._config.limits.max_event_bytes,
                                run.opened.previous_id,
                            ),
                            partial(self._before_first_event, run),
                            partial(self._file, run, engine),
                            partial(self._opening.keep, run.opened),
                        )
                        if not await relay.run():
                            self._metrics.cut.labels("engine").inc()
                            engine.erred(self._loop.time())
                        self._over(run)
                        return None
                    answer = await exchange.connection.collect(self._config.limits.max_answer_bytes)
                finally:
                    exchange.connection.close()
        except EngineFailureError as error:
            return run.turn.decode_failed(self._failed(run, engine, error, DECODE))
        return self._answer(run, engine, exchange.head, answer)

    def _answer(self, run: Run, engine: Engine, head: Head, answer: bytes) -> Step | None:
        if head.status >= 500:
            self._failed(run, engine, useless(head), DECODE)
            if (handed_by := self._fleet.find(run.progress.handed_by)) is not None:
                handed_by.erred(self._loop.time())  # it may be the handover that is of no use
            run.refused = (head, answer)
            return run.turn.decode_failed(Failure.ANSWERED)
        answer, handle, ending = read_answer(run.generation.endpoint, answer, run.opened.previous_id)
        if head.status == 200:
            self._opening.keep(run.opened, answer)
        if handle is not None:
            self._file(run, engine, handle, ending)
        self._before_first_byte(run)
        run.response.send(head.status, returned(head), answer)
        self._over(run)
        return None

    def _give_up(self, run: Run, step: GiveUp) -> None:
        if run.refused is not None:
            head, answer = run.refused
            run.response.send(head.status, returned(head), answer)
        else:
            status = 504 if run.why == "timeout" else 502
            run.response.send_error(status, f"{step.message} ({run.why})" if run.why else step.message)

    def _failed(self, run: Run, engine: Engine, error: EngineFailureError, role: str) -> Failure:
        run.why = error.kind
        engine.hop_failed(error, self._loop.time())
        self._metrics.fallbacks.labels(role, error.kind).inc()
        if engine.worth_a_line(self._loop.time()):
            logger.warning("%s engine %s: %s", role, engine.name, error)
        return error.failure

    def _before_first_event(self, run: Run) -> None:
        run.progress.began(self._fleet.clock_ns())
        run.first_ns = self._fleet.clock_ns()
        self._before_first_byte(run)

    def _before_first_byte(self, run: Run) -> None:
        self._end_use(run)  # decode computes, so it has all that it could take over
        route = run.turn.route
        self._metrics.first_byte[route].observe((self._fleet.clock_ns() - run.began_ns) / _NS_PER_S)
        run.response.headers.append((b"x-kvloop-route", route.encode()))
        if run.report is not None and route is not route.DECODE:
            run.response.headers.append((b"x-kvloop-reused-tokens", b"%d" % run.report.returned_tokens))
            run.response.headers.append((b"x-kvloop-cached-tokens", b"%d" % run.report.cached_tokens))

    def _over(self, run: Run) -> None:
        """The answer is whole, or as whole as it gets: what is to be learned from it."""
        run.progress.ended(self._fleet.clock_ns())
        if (counted := run.report or run.decoded) is not None:
            self._beliefs.counted(run.size, counted)
        if (way := run.way) is not None and run.turn.route is way.route and run.first_ns:
            took_ns = run.first_ns - run.began_ns
            self._fleet.placement.costs.came(way.route, way.parts.ttft_ns, took_ns)
            self._metrics.error[way.route].observe(abs(way.expected_ns - took_ns) / took_ns)
        self.explanations.add(run)

    # What an answer leaves behind does not hold it up. The loop writes what is under way, then runs what was
    # to be called soon, in that order, and only then reads again: who has an answer's last byte finds its
    # turn filed.

    def _end_use(self, run: Run) -> None:
        """The request needs nothing any more of what decode kept; said once, the first time."""
        if run.use is not None:
            self._loop.call_soon(run.use.end)
            run.use = None
        run.let_go()

    def _file(self, run: Run, engine: Engine, handle: bytes, ending: str) -> None:
        run.decoded = read_report(handle, run.turn.route is not Route.APPEND, len(run.generation.raw))
        run.progress.reported(run.decoded)
        if self._config.return_enabled:
            self._loop.call_soon(self._file_now, run, handle, engine.name, ending)

    def _file_now(self, run: Run, handle: bytes, engine: str, ending: str) -> None:
        lookup, prompt = run.lookup, run.progress.prompt
        if self._conversations.file(lookup, handle, engine, ending, prompt, run.opened.response_id):
            self._metrics.filed.inc()
