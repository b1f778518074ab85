"""One engine: its connections, what it has in flight, and whether it is worth trying.

Health has two sources. Passive: what becomes of requests moves a circuit breaker (`core.breaker`). Active:
probes (`router.health`) take an engine out, or bring it back, after so many in a row (`core.probing`). An
engine that has left the fleet finishes what it has: the requests in flight, and the decode engines that still
have to read what it computed; then its connections are closed.
"""

import asyncio
import ssl
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from kvloop.core.breaker import Breaker, BreakerRules, BreakerState
from kvloop.core.probing import ProbeEvent, ProbeGate, ProbeState
from kvloop.core.slow_start import share_permille
from kvloop.router.pool import OUT_OF_FILES, Exchange, Pool
from kvloop.router.target import Role, Target
from kvloop.router.turn import Failure
from kvloop.router.upstream import EngineFailureError, Head

LOG_EVERY_S = 10.0  # per engine
_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class EngineRules:
    """What all engines are treated by. `authorization`: the header's value that engines ask for, if any."""

    connect_timeout_s: float = 5.0
    breaker: BreakerRules = field(default_factory=BreakerRules)
    fall: int = 3
    rise: int = 2
    slow_start_s: float = 0.0
    authorization: bytes | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = None


class Slot:
    """One request in flight at an engine, while the block lasts."""

    __slots__ = ("_engine", "_trial")

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._trial = 0

    def __enter__(self) -> None:
        self._trial = self._engine.began()

    def __exit__(self, *_: object) -> None:
        self._engine.ended(self._trial)


class Engine:
    """One vLLM server, or one data-parallel rank of it."""

    def __init__(
        self, url: str, role: str, connect_timeout_s: float = 5.0, *, rank: int | None = None
    ) -> None:
        """One that is treated by the default rules."""
        target = Target(url.rstrip("/"), Role(role), rank)
        self._init(target, EngineRules(connect_timeout_s=connect_timeout_s))

    @classmethod
    def of(cls, target: Target, rules: EngineRules) -> "Engine":
        """The engine that a target describes."""
        engine = cls.__new__(cls)
        engine._init(target, rules)
        return engine

    def _init(self, target: Target, rules: EngineRules) -> None:
        parts = urlsplit(target.url)
        self.target = target
        self.name = target.name
        self.url = target.url
        self.in_flight = 0
        self.held = 0  # requests elsewhere that still need what it computed
        self.leaving = False
        self.on_idle: Callable[[Engine], None] | None = None
        self.authority = parts.netloc.encode()
        self.lines = b""
        self.authorize(rules.authorization)
        self.breaker = Breaker(rules.breaker)
        self.probes = ProbeGate(rules.fall, rules.rise)
        self.incarnation: str | None = None
        self._slow_start_ns = int(rules.slow_start_s * _NS_PER_S)
        self._since_ns = -self._slow_start_ns
        self._silent_until_s = 0.0
        host = parts.hostname or ""
        tls = None
        if parts.scheme == "https":
            tls = rules.tls or ssl.create_default_context(), target.server_name or host
        port = parts.port or (443 if tls else 80)
        self._pool = Pool(host, port, rules.connect_timeout_s, tls)

    def authorize(self, authorization: bytes | None) -> None:
        """What it gets as `Authorization` from now on, None for what the client sent."""
        rank = self.target.rank
        lines = b"" if rank is None else b"x-data-parallel-rank: %d\r\n" % rank
        self.lines = lines if authorization is None else lines + b"authorization: %b\r\n" % authorization

    @property
    def role(self) -> Role:
        """What it may be asked for."""
        return self.target.role

    def available(self, now_s: float) -> bool:
        """Whether it is worth trying: the probes find it, and the breaker lets a request through."""
        if self.probes.state is ProbeState.DOWN:
            return False
        return self.breaker.state is BreakerState.CLOSED or self.breaker.allows(_ns(now_s))

    @property
    def grown_s(self) -> float:
        """When its slow start is over, or was."""
        return (self._since_ns + self._slow_start_ns) / _NS_PER_S

    def share_permille(self, now_s: float) -> int:
        """Its share of what an engine of its weight can take."""
        return share_permille(_ns(now_s) - self._since_ns, self._slow_start_ns)

    def is_new(self, now_s: float) -> None:
        """From now on it is given more and more, until it counts as any other."""
        self._since_ns = _ns(now_s)

    def worth_a_line(self, now_s: float) -> bool:
        """Whether a failure should be logged: not every one of an outage is."""
        due = now_s >= self._silent_until_s
        if due:
            self._silent_until_s = now_s + LOG_EVERY_S
        return due

    def failed(self, now_s: float) -> None:
        """It could not be reached, or did not answer in time."""
        self.breaker.failed(_ns(now_s), trips=True)

    def erred(self, now_s: float) -> None:
        """It broke off, or answered with a server's error: that may be the request's own fault."""
        self.breaker.failed(_ns(now_s), trips=False)

    def hop_failed(self, error: EngineFailureError, now_s: float) -> None:
        """A hop to it did not work out, in one way or the other, or in one that says nothing about it."""
        if error.kind == OUT_OF_FILES:
            return
        if error.failure is Failure.UNREACHED or error.kind == "timeout":
            self.failed(now_s)
        elif error.failure is Failure.BROKEN or error.kind == "status_5xx":
            self.erred(now_s)

    def answered(self) -> None:
        """It did answer."""
        self.breaker.succeeded()

    def probed(self, passed: bool, now_s: float) -> ProbeEvent | None:
        """What came of a probe. One that finds an engine again forgets why requests had failed."""
        event = self.probes.heard(passed)
        if event is ProbeEvent.RISE:
            self.breaker.succeeded()
            self.is_new(now_s)
        return event

    def slot(self) -> "Slot":
        """One request in flight, while the block lasts."""
        return Slot(self)

    def began(self) -> int:
        """A request is on its way: the number of the breaker's trial that it is, 0 for none."""
        self.in_flight += 1
        if self.breaker.state is BreakerState.CLOSED:
            return 0
        return self.breaker.begin(_ns(asyncio.get_running_loop().time()))

    def ended(self, trial: int) -> None:
        """It is over, whatever became of it. Once for each that began."""
        self.in_flight -= 1
        if trial:
            self.breaker.ended(trial)
        if self.leaving:
            self._check_idle()

    def hold(self) -> None:
        """Another engine is going to read what this one has computed. To be let go once."""
        self.held += 1

    def let_go(self) -> None:
        """It has read it, or never will."""
        self.held -= 1
        if self.leaving:
            self._check_idle()

    def ask(self, parts: Sequence[bytes], timeout_s: float) -> Coroutine[Any, Any, Exchange]:
        """Send a request, return when the answer's head is there.

        EngineFailureError if that fails; from then on an exchange is lost that is silent for `timeout_s`.
        """
        return self._pool.ask(parts, timeout_s)

    def fetch(
        self, parts: Sequence[bytes], max_bytes: int, timeout_s: float
    ) -> Coroutine[Any, Any, tuple[Head, bytes]]:
        """Send a request and gather its answer.

        EngineFailureError if that fails, or it is over `max_bytes`, or silent for `timeout_s`.
        """
        return self._pool.fetch(parts, max_bytes, timeout_s)

    def leave(self, on_idle: Callable[["Engine"], None]) -> None:
        """Take nothing new; `on_idle` is called once nothing is left, at once if nothing is."""
        self.leaving, self.on_idle = True, on_idle
        self._pool.retire()
        self._check_idle()

    def stay(self) -> None:
        """Take requests again, after all."""
        self.leaving, self.on_idle = False, None
        self._pool.retire(False)

    def close(self) -> None:
        """Abort every connection."""
        self._pool.close()

    def _check_idle(self) -> None:
        if not self.in_flight and not self.held and self.on_idle is not None:
            on_idle, self.on_idle = self.on_idle, None
            on_idle(self)


def _ns(now_s: float) -> int:
    return int(now_s * _NS_PER_S)


def useless(head: Head) -> EngineFailureError:
    """What is wrong with an answer that is whole and of no use."""
    kind = f"status_{head.status // 100}xx" if head.status != 200 else "no_handover"
    return EngineFailureError(kind, Failure.ANSWERED)
