"""What one router has under way at one engine: no scraped gauge, which would be late, but its own book.

An engine works off prompts in the order of their arrival, so a new one waits for the predicted work of all
that were sent before (a virtual finish time, as in fair queueing). When one ends earlier or later than was
predicted, all behind it move by as much.

What a prompt took cannot be told from its own times where several were computed together. But costs are
linear, so a busy period can be accounted for as a whole: the work of all prompts that ended in it took as
long as it lasted.
"""

from dataclasses import dataclass, field

MAX_PERIOD_JOBS = 8  # an engine that is never idle is accounted for by so many


def pairs_of(tokens: int, before: int) -> int:
    """How many pairs of a token and an earlier one `tokens` behind `before` others make."""
    return tokens * before + tokens * tokens // 2


@dataclass(slots=True)
class Job:
    """A prompt under way. `ends_ns`: when it should be done."""

    tokens: int
    ends_ns: int


@dataclass(frozen=True, slots=True)
class Work:
    """What was computed in a busy period: so many prompts, of so many tokens, each of these behind so many
    others in all (`pairs`), in `took_ns`."""

    jobs: int
    tokens: int
    pairs: int
    took_ns: int


@dataclass(slots=True, eq=False)
class Load:
    """One engine's. `running`: requests of any kind under way; `queued_tokens`: of prompts not seen
    finished; `appended_tokens`: those among them that decode computes by itself."""

    name: str
    running: int = 0
    queued_tokens: int = 0
    appended_tokens: int = 0
    _jobs: int = 0
    _busy_until_ns: int = 0
    _period_ns: int = 0
    _done: list[tuple[int, int]] = field(default_factory=list)

    def wait_ns(self, now_ns: int) -> int:
        """How long a prompt sent now waits before it is its turn."""
        return max(0, self._busy_until_ns - now_ns) if self._jobs else 0

    def begin(self, now_ns: int, tokens: int, takes_ns: int) -> Job:
        """A prompt of `tokens` to compute, predicted to take so long, is sent."""
        if not self._jobs:
            self._period_ns = now_ns
            self._done.clear()
        self._busy_until_ns = now_ns + self.wait_ns(now_ns) + takes_ns
        self._jobs += 1
        self.queued_tokens += tokens
        return Job(tokens, self._busy_until_ns)

    def computed(self, job: Job, now_ns: int, tokens: int, before: int) -> Work | None:
        """It is done: `tokens` were computed behind `before` others. To be called once, or `leave`. The busy
        period's account, if this ends one."""
        self._end(job, now_ns)
        self._done.append((tokens, pairs_of(tokens, before)))
        if self._jobs and len(self._done) < MAX_PERIOD_JOBS:
            return None
        counts, pairs = zip(*self._done, strict=True)
        work = Work(len(counts), sum(counts), sum(pairs), now_ns - self._period_ns)
        self._done.clear()
        self._period_ns = now_ns
        return work

    def leave(self, job: Job, now_ns: int) -> None:
        """It has failed, or nobody can tell when it was done: its period says nothing."""
        self._end(job, min(now_ns, job.ends_ns))
        self._done.clear()
        self._period_ns = now_ns

    def _end(self, job: Job, now_ns: int) -> None:
        self._jobs -= 1
        self.queued_tokens -= job.tokens
        self._busy_until_ns += now_ns - job.ends_ns

    def check_integrity(self) -> None:
        """AssertionError where more has ended than began."""
        assert min(self.running, self.queued_tokens, self.appended_tokens, self._jobs) >= 0
        assert self._jobs or not self.queued_tokens
