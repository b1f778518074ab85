"""An answer that broke off in the middle, gone on with by another engine.

What decode had said is known by its tokens (`wire.ledger`), so the rest is a request of its own: those tokens
after the prompt's, sent the way that any request goes, through prefill and decode, with the same headers, the
same tenant's salt and the same model. Its answer is written to the end of the client's (`wire.continued`).
An engine that dies over the rest is followed by one more; then, as for every answer that cannot be gone on
with, the client is told.

An answer that is followed costs memory, of which all of them together have a share: beyond it an answer is
not followed, and ends as it would have.
"""

from collections.abc import Awaitable, Callable, Collection

from kvloop.core.decision import Ask
from kvloop.router.config import RouterConfig
from kvloop.router.fleet import Fleet
from kvloop.router.metrics import Metrics
from kvloop.router.models import Models
from kvloop.router.opening import Opened
from kvloop.router.outcome import Outcome
from kvloop.router.relay import StreamRelay
from kvloop.router.response import RestOfAnswer
from kvloop.router.run import Run
from kvloop.router.turn import Turn
from kvloop.wire.answers import stream_filter
from kvloop.wire.continuable import has_media, why_not
from kvloop.wire.continued import PATH, RestFilter, end_of, rest_of
from kvloop.wire.ledger import Ledger
from kvloop.wire.members import spliced
from kvloop.wire.openai import Endpoint, Generation, read_generation
from kvloop.wire.refusal import RequestError
from kvloop.wire.sse import HandleFilter
from kvloop.wire.token_ids import ASKED, TokenIdsFilter, asks_for_ids

MAX_RESTS = 2  # engines that are asked to go on with one answer
MAX_ID_BYTES = 8  # of a prompt's ids, which come in one event, for each byte of the request that it came from

Serve = Callable[[Run], Awaitable[None]]


class Continuation:
    """Follows answers, and has them gone on with. `serve` sends a run through its steps."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        models: Models,
        metrics: Metrics,
        outcome: Outcome,
        serve: Serve,
    ) -> None:
        self._enabled = config.continue_streams
        self._max_event_bytes = config.limits.max_event_bytes
        self._left_bytes = config.limits.max_continuation_bytes
        self._fleet = fleet
        self._models = models
        self._metrics = metrics
        self._outcome = outcome
        self._serve = serve

    def follows(self, generation: Generation) -> bool:
        """Whether decode is asked for the tokens of its answer to this request."""
        fits = len(generation.raw) * MAX_ID_BYTES <= self._max_event_bytes
        return self._enabled and fits and why_not(generation) is None

    def asked(self, run: Run, body: bytes) -> bytes:
        """The decode hop's body as it is sent."""
        if not run.follows or asks_for_ids(run.generation):
            return body
        return spliced(body, ASKED, b"true")

    def filter(self, run: Run) -> HandleFilter:
        """What a stream of decode's goes through, fresh."""
        if run.rest is not None:
            first = run.opened.continues or run.generation
            return RestFilter(self._max_event_bytes, run.rest, first.endpoint, keep=asks_for_ids(first))
        if not run.follows:
            return stream_filter(run.generation.endpoint, self._max_event_bytes, run.opened.previous_id)
        self.forget(run)
        run.ledger = Ledger(self._charge)
        return TokenIdsFilter(self._max_event_bytes, run.ledger, keep=asks_for_ids(run.generation))

    def forget(self, run: Run) -> None:
        """Its answer is over."""
        if run.ledger is not None:
            run.ledger.close()
            run.ledger = None

    async def go_on(self, run: Run, relay: StreamRelay) -> bool:
        """Have a broken answer gone on with to its end. False if it could not be, and the client was told."""
        ledger = run.ledger
        assert ledger is not None
        run.progress.close(self._fleet.clock_ns())
        outcome = "unknown"
        for asked in range(MAX_RESTS + 1):
            ledger.settle()
            if ledger.lost or ledger.head is None or not ledger.prompt or has_media(run.generation):
                break
            if ledger.open_event:
                run.response.write(b"\n")
                ledger.open_event = False
            if ledger.finish is not None or ledger.done:
                run.response.write(end_of(ledger, run.generation))
                run.response.finish()
                self._count("continued" if asked else "ended")
                return True
            if asked == MAX_RESTS:
                break
            child = self._child(run, ledger)
            if child is None:
                break
            outcome = "failed"
            try:
                await self._serve(child)
            finally:
                run.turn.asked += child.turn.asked
                child.progress.close(self._fleet.clock_ns())
                self._outcome.end_use(child)
            if child.response.finished:
                self._count("continued")
                return True
            if not child.response.started:
                break
        self._count(outcome)
        relay.cut(relay.why or "the engine broke off its answer")
        return False

    def _child(self, run: Run, ledger: Ledger) -> Run | None:
        """The run of the rest; None where it cannot be asked for."""
        max_model_len = self._models.max_model_len(run.generation.model)
        body = rest_of(run.generation, ledger, max_model_len)
        if body is None:
            return None
        try:
            generation = read_generation(Endpoint.COMPLETIONS, body)
        except RequestError:
            return None
        dead = {name for role, name in run.turn.asked if role == "decode"}
        ask = Ask(ledger.prompt_tokens + ledger.tokens)
        progress = self._fleet.progress(ask)

        def suits(name: str) -> bool:
            return self._models.serves(name, generation.model)

        choose_prefill, choose_living = self._fleet.choosers(progress, suits)

        def choose_decode(prefill: str | None, excluded: Collection[str], last_resort: bool) -> str | None:
            engine = choose_living(prefill, excluded, last_resort)
            if engine is None and last_resort:  # it may have been the connection that broke
                engine = choose_living(prefill, set(excluded) - dead, True)
            return engine

        ways = self._fleet.choose(ask, suits)
        return Run(
            request_id=run.request_id,
            request=run.request,
            response=RestOfAnswer(run.response),
            opened=Opened(generation, run.lookup, continues=run.generation),
            size=run.size,
            believed=ask,
            ways=ways,
            turn=Turn(choose_prefill, choose_decode, None, ways[0] if ways else None, dead),
            progress=progress,
            lines=run.lines,
            began_ns=self._fleet.clock_ns(),
            use=None,
            path=PATH,
            rest=ledger,
        )

    def _charge(self, size_bytes: int) -> bool:
        if size_bytes > self._left_bytes:
            return False
        self._left_bytes -= size_bytes
        return True

    def _count(self, outcome: str) -> None:
        self._metrics.continued.labels(outcome).inc()
