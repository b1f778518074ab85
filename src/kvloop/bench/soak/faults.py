"""What goes wrong in a soak, one thing at a time with calm between: drawn from a seed, done by a thread.

Which engine it is depends on the moment: the one with the most under way, where something is to be hurt.

Each fault has a window, from just before it is done until the engine answers again and a moment more.
An error is explained where the request was under way in some window; outside of all, there must be none. The
next fault waits until the router uses the engine again, so that there is always somebody to go to.
"""

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvloop.bench.soak.stack import READY_S, EngineProcess, Stack, wait_for

BUSY_S = 1.0  # to wait for an engine that has something under way
MOMENT_S = 0.5  # what the router finds out on its next hop


class Fault(StrEnum):
    """The kinds."""

    KILL_DECODE = "decode killed"
    KILL_PREFILL = "prefill killed"
    STOP_DECODE = "decode stands still"
    STOP_PREFILL = "prefill stands still"
    REFUSE = "decode ends: connections refused"
    DRAIN = "decode drained by order"
    NO_PREFILL = "every prefill killed"


@dataclass(frozen=True, slots=True)
class Pace:
    """How long calm and trouble last, in wall seconds, each drawn between the two."""

    calm_s: tuple[float, float] = (2.0, 6.0)
    trouble_s: tuple[float, float] = (0.5, 3.0)


@dataclass(frozen=True, slots=True)
class Window:
    """When a fault may be felt, on the monotonic clock."""

    fault: Fault
    begin_s: float
    end_s: float


def drawn(seed: int, pace: Pace) -> Iterator[tuple[Fault, int, float, float]]:
    """Kind, which engine, calm before it and how long it lasts: without end, every kind once a round."""
    chance = random.Random(f"faults {seed}")
    while True:
        for fault in chance.sample(list(Fault), len(Fault)):
            yield (
                fault,
                chance.randrange(1 << 16),
                chance.uniform(*pace.calm_s),
                chance.uniform(*pace.trouble_s),
            )


@dataclass
class Trouble:
    """Does the faults, on a thread of its own, until it is told to stop; then everything is well again."""

    stack: Stack
    seed: int
    pace: Pace
    windows: list[Window] = field(default_factory=list)
    failure: BaseException | None = None

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._open: tuple[Fault, float] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def begin(self) -> None:
        """From now on things go wrong."""
        self._thread.start()

    def end(self) -> None:
        """No more; returns when all engines are back."""
        self._stop.set()
        self._thread.join()

    def explains(self, began_s: float, ended_s: float) -> Fault | None:
        """The fault in whose window a request was under way."""
        for window in self.windows:
            if window.begin_s <= ended_s and began_s <= window.end_s:
                return window.fault
        return None

    def share(self, began_s: float, ended_s: float) -> float:
        """How much of the time was in windows."""
        within = [min(one.end_s, ended_s) - max(one.begin_s, began_s) for one in self.windows]
        return sum(max(0.0, seconds) for seconds in within) / (ended_s - began_s)

    def _run(self) -> None:
        try:
            for fault, number, calm_s, lasts_s in drawn(self.seed, self.pace):
                if self._stop.wait(calm_s):
                    return
                self._do(fault, number, lasts_s)
        except BaseException as error:
            self.failure = error

    def _do(self, fault: Fault, number: int, lasts_s: float) -> None:
        prefill, decode = self.stack.of("prefill"), self.stack.of("decode")
        one_prefill, one_decode = self._busiest(prefill, number), self._busiest(decode, number)
        acts: dict[Fault, tuple[Sequence[EngineProcess], Callable[[EngineProcess], None]]] = {
            Fault.KILL_DECODE: ([one_decode], _kill),
            Fault.KILL_PREFILL: ([one_prefill], _kill),
            Fault.NO_PREFILL: (prefill, _kill),
            Fault.STOP_DECODE: ([one_decode], _freeze),
            Fault.STOP_PREFILL: ([one_prefill], _freeze),
            Fault.REFUSE: ([one_decode], _finish),
            Fault.DRAIN: ([one_decode], lambda engine: self.stack.order("drain", engine)),
        }
        hurt, act = acts[fault]
        began_s = time.monotonic()
        for engine in hurt:
            act(engine)
        self._stop.wait(lasts_s)
        for engine in hurt:
            self._mend(fault, engine)
        wait_for(lambda: all(engine.answers() for engine in hurt), f"{fault}: it does not come up again")
        self.windows.append(Window(fault, began_s, time.monotonic() + MOMENT_S))
        urls = {engine.url for engine in hurt}
        wait_for(lambda: urls <= self.stack.in_service(), f"{fault}: the router does not use it again")

    def _busiest(self, engines: Sequence[EngineProcess], number: int) -> EngineProcess:
        """The engine that it will hurt most; the drawn one where none has anything under way."""
        deadline_s = time.monotonic() + BUSY_S
        drawn_one = engines[number % len(engines)]
        while True:
            under_way = self.stack.under_way()
            busiest = max([drawn_one, *engines], key=lambda engine: under_way.get(engine.url, 0))
            if under_way.get(busiest.url) or time.monotonic() > deadline_s:
                return busiest

    def _mend(self, fault: Fault, engine: EngineProcess) -> None:
        if fault in (Fault.STOP_DECODE, Fault.STOP_PREFILL):
            assert engine.process is not None
            engine.process.signal(signal.SIGCONT)
        elif fault is Fault.DRAIN:
            self.stack.order("undrain", engine)
        else:
            engine.start()


def _kill(engine: EngineProcess) -> None:
    assert engine.process is not None
    engine.process.signal(signal.SIGKILL)
    engine.process.wait(READY_S)


def _freeze(engine: EngineProcess) -> None:
    assert engine.process is not None
    engine.process.signal(signal.SIGSTOP)


def _finish(engine: EngineProcess) -> None:
    assert engine.process is not None
    engine.process.stop()
