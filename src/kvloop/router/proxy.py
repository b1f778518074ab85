"""A generation request on its way: the turn machine says what to do next, this does it.

Per request there is one task, and per hop one exchange. Everything that changes state (the lineage table,
engines' queues, the turn) changes between awaits. The task is cancelled when the client leaves, and every
exchange is closed on the way out, which aborts a hop that is still under way.
"""

import asyncio
import logging
from functools import partial

from kvloop.core.decision import DECODE, PREFILL
from kvloop.router.backoff import Backoff
from kvloop.router.belief import size_of
from kvloop.router.config import RouterConfig
from kvloop.router.continuation import Continuation
from kvloop.router.conversations import Conversations
from kvloop.router.engine import Engine, useless
from kvloop.router.fleet import Fleet
from kvloop.router.headers import REQUEST_ID, forwarded, hop, request_id, returned
from kvloop.router.metrics import Metrics
from kvloop.router.models import Models
from kvloop.router.opening import Opened, Opening
from kvloop.router.outcome import NS_PER_S, Outcome
from kvloop.router.pool import Exchange
from kvloop.router.relay import StreamRelay
from kvloop.router.request import Request
from kvloop.router.response import Response
from kvloop.router.retain import without_retention
from kvloop.router.run import Run
from kvloop.router.turn import AskDecode, AskPrefill, Failure, GiveUp, Step, Turn
from kvloop.router.upstream import EngineFailureError, Head
from kvloop.wire.answers import read_answer
from kvloop.wire.openai import ALONE, Endpoint, decode_body, prefill_body, read_prefill_answer
from kvloop.wire.refusal import RequestError
from kvloop.wire.report import read_report

logger = logging.getLogger("kvloop.router")


class Proxy:
    """Serves the generation endpoints."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        conversations: Conversations,
        metrics: Metrics,
        opening: Opening,
        models: Models,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._conversations = conversations
        self._metrics = metrics
        self._opening = opening
        self._backoff = Backoff()
        self._loop = asyncio.get_running_loop()
        self._outcome = Outcome(config, fleet, conversations, metrics)
        self._continuation = Continuation(config, fleet, models, metrics, self._outcome, self._steps)
        self.explanations = self._outcome.explanations

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

    def close(self) -> None:
        """No turn comes any more."""
        self._outcome.close()

    async def _serve(self, run: Run) -> None:
        try:
            await self._steps(run)
        except asyncio.CancelledError:
            self._metrics.gone.inc()
            raise
        finally:
            run.progress.close(self._fleet.clock_ns())
            self._outcome.end_use(run)
            self._continuation.forget(run)
        self._metrics.answered(run.turn.route, run.response.status)

    async def _steps(self, run: Run) -> None:
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

    def _run(
        self, identifier: bytes, request: Request, response: Response, opened: Opened, lines: bytes
    ) -> Run:
        generation, lookup = opened.generation, opened.lookup
        match = lookup.match if self._config.return_enabled else None
        self._metrics.looked_up(match.by if match else "none")
        if lookup.gap_ns is not None:
            self._metrics.gap.observe(lookup.gap_ns / NS_PER_S)
        if generation.alone:
            self._metrics.alone.labels(generation.alone).inc()
        size = size_of(generation)
        ask = self._outcome.beliefs.ask(generation, size, match)
        suits = partial(self._opening.suits, opened)
        ways = [] if generation.alone else self._fleet.choose(ask, suits)
        progress = self._fleet.progress(ask)
        return Run(
            request_id=identifier,
            request=request,
            response=response,
            opened=opened,
            size=size,
            believed=ask,
            ways=ways,
            turn=Turn(
                *self._fleet.choosers(progress, suits),
                match.turn.handle if match else None,
                ways[0] if ways else None,
            ),
            progress=progress,
            lines=lines,
            began_ns=self._fleet.clock_ns(),
            use=self._conversations.use(lookup),
            follows=self._continuation.follows(generation),
        )

    async def _prefill(self, run: Run, step: AskPrefill) -> Step | None:
        engine = self._fleet.find(step.engine)
        if engine is None:
            return run.turn.prefill_failed(Failure.UNREACHED)
        body = prefill_body(run.generation, step.handle, run.lookup.salt)
        parts = hop(engine, "POST", run.path, run.lines, body)
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
        run.prefilled_ns = self._fleet.clock_ns()
        run.progress.prefilled(run.report, run.prefilled_ns)
        self._metrics.prefilled(run.report, asked=step.handle is not None)
        return run.turn.prefilled(handover, run.report.returned_tokens if run.report else None)

    async def _decode(self, run: Run, step: AskDecode) -> Step | None:
        engine = self._fleet.find(step.engine)
        if engine is None:
            return run.turn.decode_failed(Failure.UNREACHED)
        handover = without_retention(step.handover) if run.lookup.keep_ns == 0 else step.handover
        body = self._continuation.asked(run, decode_body(run.generation, handover, run.lookup.salt))
        parts = hop(engine, "POST", run.path, run.lines, body)
        run.progress.sent_decode(step.engine, whole=step.handover is ALONE, now_ns=self._fleet.clock_ns())
        try:
            with engine.slot():
                exchange = await engine.ask(parts, self._config.timeouts.idle_timeout_s)
                try:
                    if exchange.head.status < 500:
                        engine.answered()
                    if _is_stream(exchange.head):
                        relay = self._relay(run, engine, exchange)
                        is_whole = await relay.run()
                    else:
                        relay = None
                        answer = await exchange.connection.collect(self._config.limits.max_answer_bytes)
                finally:
                    exchange.connection.close()
        except EngineFailureError as error:
            return run.turn.decode_failed(self._failed(run, engine, error, DECODE))
        if relay is None:
            return self._answer(run, engine, exchange.head, answer)
        if not is_whole:
            engine.erred(self._loop.time())
            if run.rest is None and not (run.follows and await self._continuation.go_on(run, relay)):
                self._metrics.cut.labels("engine").inc()
        self._outcome.over(run)
        return None

    def _relay(self, run: Run, engine: Engine, exchange: Exchange) -> StreamRelay:
        return StreamRelay(
            exchange.connection,
            run.response,
            returned(exchange.head),
            self._continuation.filter(run),
            partial(self._outcome.begins, run),
            partial(self._outcome.computed, run),
            partial(self._outcome.file, run, engine),
            partial(self._opening.keep, run.opened),
            follows=run.follows or run.rest is not None,
        )

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
            self._outcome.file(run, engine, handle, ending)
        self._outcome.begins(run)
        self._outcome.answers(run)
        run.response.send(head.status, returned(head), answer)
        self._outcome.over(run)
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


def _is_stream(head: Head) -> bool:
    return head.status == 200 and head.get(b"content-type").lower().startswith(b"text/event-stream")
