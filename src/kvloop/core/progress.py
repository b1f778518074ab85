"""One turn on its way through engines: what it adds to their loads, and what is learned from it.

Told of each step as it happens, it keeps the books of `load` so that each thing is given back exactly once,
and passes on to `cost` what took how long, with the tokens that the engines themselves have counted.
"""

from dataclasses import replace

from kvloop.core.decision import DECODE, PREFILL, Ask, found_at
from kvloop.core.lineage import Prompt
from kvloop.core.load import Job, Load, Work, pairs_of
from kvloop.core.placement import Placement
from kvloop.core.report import TurnReport

_NS_PER_US = 1000


class Progress:
    """One turn. Times are nanoseconds of one monotonic clock. `ask`: as the engines' counts correct it."""

    def __init__(self, placement: Placement, ask: Ask) -> None:
        self.ask = ask
        self._placement = placement
        self._costs = placement.costs
        self._load: Load | None = None
        self._job: Job | None = None
        self._sent_ns = 0
        self._running = 0
        self._handed_by: str | None = None
        self._appended = 0
        self._waited_ns: int | None = None
        self._computed_at: str | None = None
        self._reported: TurnReport | None = None

    @property
    def handed_by(self) -> str:
        """The prefill engine whose work the hop under way goes on from, or nothing."""
        return self._handed_by or ""

    @property
    def prompt(self) -> Prompt:
        """What is filed of the prompt. Whoever appends leaves prefill what it had."""
        ask = self.ask
        if self._computed_at is not None:
            return Prompt(ask.tokens, self._computed_at, ask.tokens)
        return Prompt(ask.tokens, ask.computed_at, ask.local)

    def sent_prefill(self, engine: str, *, with_handle: bool, now_ns: int) -> None:
        """The prompt goes to prefill engine `engine`."""
        load = self._begin(engine, now_ns)
        ask = self.ask
        local = self._costs.local_tokens(engine, ask.local) if engine == ask.computed_at else 0
        known = max(local, ask.held if with_handle else 0)
        tokens = max(1, ask.tokens - known)
        self._job = load.begin(now_ns, tokens, self._costs.compute_ns(PREFILL, engine, tokens, known))

    def prefilled(self, report: TurnReport | None, now_ns: int) -> None:
        """Prefill has answered, with its report if it makes one."""
        assert self._load is not None
        load, job = self._load, self._job
        if job is not None and report is not None:
            self._job = None
            self._learn_prefill(load, job, report, now_ns)
            self.ask = self.ask._replace(tokens=report.prompt_tokens)
        self.close(now_ns)
        self._handed_by = self._computed_at = load.name

    def sent_decode(self, engine: str, *, whole: bool, now_ns: int) -> None:
        """The request goes to decode engine `engine`; `whole`: it computes the prompt itself."""
        load = self._begin(engine, now_ns)
        if not whole:
            return
        self._handed_by = None
        held = found_at(self.ask, engine, self._costs)
        tokens = max(1, self.ask.tokens - held)
        self._job = load.begin(now_ns, tokens, self._costs.compute_ns(DECODE, engine, tokens, held))
        self._appended = tokens
        load.appended_tokens += tokens

    def began(self, now_ns: int) -> None:
        """The first byte of an answer that comes piece by piece is there: its prompt has been computed."""
        self._waited_ns = now_ns - self._sent_ns
        self._end_job(now_ns)

    def reported(self, report: TurnReport | None) -> None:
        """Decode says what it did with the prompt, or does not."""
        self._reported = report
        if report is not None:
            self.ask = self.ask._replace(tokens=report.prompt_tokens)

    def ended(self, now_ns: int) -> None:
        """The answer is whole."""
        load, waited_ns, report = self._load, self._waited_ns, self._reported
        known = load is not None and self._placement.has(load.name)
        if known and load is not None and waited_ns is not None and report is not None:
            computed, before = report.computed_tokens, report.cached_tokens
            if self._handed_by is None:
                work = Work(1, computed, pairs_of(computed, before), waited_ns)
                self._costs.computed(DECODE, load.name, work)
                if load.name == self.ask.holder:
                    self._costs.local_hit(load.name, self.ask.held, report.local_tokens)
            elif report.returned_tokens:
                self._costs.handed_over(
                    self._handed_by, load.name, report.returned_tokens, self._running, waited_ns
                )
        self.close(now_ns)

    def close(self, now_ns: int) -> None:
        """Whatever is under way has ended, or is of no interest any more. May be called again."""
        self._end_job(now_ns)
        load, self._load = self._load, None
        if load is not None:
            load.running -= 1

    def _begin(self, engine: str, now_ns: int) -> Load:
        self.close(now_ns)
        self._load = load = self._placement[engine]
        self._sent_ns, self._waited_ns, self._running = now_ns, None, load.running
        self._reported = None
        load.running += 1
        return load

    def _end_job(self, now_ns: int) -> None:
        job, self._job = self._job, None
        if job is not None and self._load is not None:
            self._load.leave(job, now_ns)
            self._load.appended_tokens -= self._appended
            self._appended = 0

    def _learn_prefill(self, load: Load, job: Job, report: TurnReport, now_ns: int) -> None:
        ask, read_ns = self.ask, report.read_us * _NS_PER_US
        if read_ns >= now_ns - self._sent_ns or not self._placement.has(load.name):
            load.leave(job, now_ns)  # no read takes longer than all; and nothing is learned of who is gone
            return
        work = load.computed(job, now_ns, report.computed_tokens, report.cached_tokens)
        if work is not None and work.jobs > 1:
            self._costs.computed(PREFILL, load.name, work)
        elif work is not None and (read_ns or not report.returned_tokens):  # else who knows how it divides
            self._costs.computed(PREFILL, load.name, replace(work, took_ns=work.took_ns - read_ns))
        if report.returned_tokens and read_ns and ask.holder is not None:
            self._costs.was_read(ask.holder, load.name, report.returned_tokens, read_ns)
        if load.name == ask.computed_at:
            self._costs.local_hit(load.name, ask.local, report.local_tokens)
