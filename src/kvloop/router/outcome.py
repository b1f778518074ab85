"""What a turn leaves behind: what is counted and learned of it, and the handle that is filed.

None of it holds the answer up. The loop writes what is under way, then runs what was to be called soon, in
that order, and only then reads again: who has an answer's last byte finds its turn filed.
"""

import asyncio
from pathlib import Path

from kvloop.core.decision import Route
from kvloop.router.belief import Beliefs
from kvloop.router.config import RouterConfig
from kvloop.router.conversations import Conversations
from kvloop.router.engine import Engine
from kvloop.router.explain import Explanations
from kvloop.router.fleet import Fleet
from kvloop.router.metrics import Metrics
from kvloop.router.run import Run
from kvloop.router.turn_log import TurnLog
from kvloop.wire.report import read_report

NS_PER_S = 1_000_000_000


class Outcome:
    """Told of each turn as its answer begins, brings a handle, and ends."""

    def __init__(
        self, config: RouterConfig, fleet: Fleet, conversations: Conversations, metrics: Metrics
    ) -> None:
        self.beliefs = Beliefs()
        self.explanations = Explanations(config.choice.explain_log_every)
        self._return_enabled = config.return_enabled
        self._fleet = fleet
        self._conversations = conversations
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        log = config.turn_log
        self._turn_log = None if log is None else TurnLog(Path(log), fleet.clock_ns)

    def close(self) -> None:
        """No turn comes any more."""
        if self._turn_log is not None:
            self._turn_log.close()

    def computed(self, run: Run) -> None:
        """A stream is about to say its first word: its prompt has been computed."""
        run.first_ns = self._fleet.clock_ns()
        run.progress.began(run.first_ns)
        self.answers(run)

    def answers(self, run: Run) -> None:
        """An answer is there, or the first of it."""
        self.end_use(run)  # decode computes, so it has all that it could take over
        if run.rest is None:
            taken_s = (self._fleet.clock_ns() - run.began_ns) / NS_PER_S
            self._metrics.first_byte[run.turn.route].observe(taken_s)

    def begins(self, run: Run) -> None:
        """The head of an answer is about to go out."""
        if run.rest is not None:
            return
        route = run.turn.route
        run.response.headers.append((b"x-kvloop-route", route.encode()))
        if run.report is not None and route is not route.DECODE:
            run.response.headers.append((b"x-kvloop-reused-tokens", b"%d" % run.report.returned_tokens))
            run.response.headers.append((b"x-kvloop-cached-tokens", b"%d" % run.report.cached_tokens))

    def over(self, run: Run) -> None:
        """The answer is whole, or as whole as it gets: what is to be learned from it."""
        run.progress.ended(self._fleet.clock_ns())
        if run.rest is not None:
            return
        if (counted := run.report or run.decoded) is not None:
            self.beliefs.counted(run.size, counted)
        if (way := run.way) is not None and run.turn.route is way.route and run.first_ns:
            took_ns = run.first_ns - run.began_ns
            self._fleet.placement.costs.came(way.route, way.parts.ttft_ns, took_ns)
            self._metrics.error[way.route].observe(abs(way.expected_ns - took_ns) / took_ns)
        self.explanations.add(run)
        if self._turn_log is not None:
            self._turn_log.add(run)

    def end_use(self, run: Run) -> None:
        """The request needs nothing any more of what decode kept; said once, the first time."""
        if run.use is not None:
            self._loop.call_soon(run.use.end)
            run.use = None
        run.let_go()

    def file(self, run: Run, engine: Engine, handle: bytes, ending: str) -> None:
        """An answer has brought a handle."""
        run.decoded = read_report(handle, run.turn.route is not Route.APPEND, len(run.generation.raw))
        run.progress.reported(run.decoded)
        run.ending = ending
        if self._turn_log is not None:
            run.kept_tokens = self._conversations.kept_tokens(handle)
        if self._return_enabled:
            self._loop.call_soon(self._file_now, run, handle, engine.name, ending)

    def _file_now(self, run: Run, handle: bytes, engine: str, ending: str) -> None:
        lookup, prompt = run.lookup, run.progress.prompt
        if self._conversations.file(lookup, handle, engine, ending, prompt, run.opened.response_id):
            self._metrics.filed.inc()
