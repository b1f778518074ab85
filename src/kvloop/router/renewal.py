"""The heartbeat: what the keeper wants sent goes out over the control channel, and answers come back to it.

One task sleeps until something is due. It works in steps of a bounded number of leases and lets requests go
first between them; what the steps of one round want of one engine is gathered, so that an engine hears once
per interval, however many its leases are. Sealing, sockets and silence are the channel's thread's. An engine
that does not answer gets the next interval's message all the same: its leases end by themselves.

An answer counts only for leases that its very question asked about: no engine can end another's.
"""

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from kvloop.control.address import Address, endpoint_of
from kvloop.control.channel import Outgoing
from kvloop.core.keeper import Keeper, SendDrop, SendRenew
from kvloop.wire.control import MAX_LEASES_PER_MESSAGE, Drop, Dropped, Failed, Message, Renew, Renewed

logger = logging.getLogger("kvloop.router")

STEP_LEASES = 64  # between two turns of the loop: 0.5 ms of CPU, 1.5 where each has another caller
MAX_ENGINES = 256  # as many as the control channel holds connections to
RETRY_S = 1.0  # after a failure of our own
LOG_EVERY_NS = 10_000_000_000  # per engine
_NS_PER_MS = 1_000_000


@dataclass(slots=True)
class EngineTally:
    """One engine's messages: how many were sent, and what came of them.

    open: the questions since `since_ns`, and the leases that each asked about; late: those of the time
    before, which may still be answered. Of older ones nothing is known any more.
    """

    sent: int = 0
    answered: int = 0
    failed: int = 0
    unanswered: int = 0
    since_ns: int = 0
    silent_until_ns: int = 0
    open: dict[int, frozenset[str]] = field(default_factory=dict)
    late: dict[int, frozenset[str]] = field(default_factory=dict)


@dataclass(slots=True)
class _Lost:
    asked: frozenset[str]
    gone: list[str]
    soft: list[str]


class Renewal:
    """Drives one router's keeper, on the running loop.

    `gone`: leases that their engine knows no more, oldest first; bounded as the keeper's leases are.
    """

    def __init__(self, keeper: Keeper, clock_ns: Callable[[], int]) -> None:
        self.keeper = keeper
        self.clock_ns = clock_ns
        self.engines: OrderedDict[Address, EngineTally] = OrderedDict()
        self.gone: OrderedDict[str, None] = OrderedDict()
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()
        self._until_ns = 0  # the task sleeps so long; 0 while it is awake
        self._serial = 0
        self._renewals: dict[Address, list[tuple[str, int, int]]] = {}
        self._drops: dict[tuple[Address, bool], list[str]] = {}
        self._outgoing: list[Outgoing] = []
        self._lost: deque[_Lost] = deque()

    async def run(self, send: Callable[[Address, Message, object], bool]) -> None:
        """Do what is due, for ever. `send(address, message, tag)` is the control channel's."""
        while True:
            try:
                while self.step():
                    await asyncio.sleep(0)
                for asked in self.take_outgoing():
                    if not send(asked.address, asked.message, asked.tag):
                        self._hear(asked.tag, Failed("the control channel takes no more"))
            except Exception:
                logger.exception("renewing leases failed")
                await asyncio.sleep(RETRY_S)
            await self._sleep()

    def step(self) -> bool:
        """One bounded piece of what is due. False where nothing is left, and `take_outgoing` has it all."""
        if self._lost:
            self._take_in(self._lost[0])
            return True
        due_ns, now_ns = self.keeper.next_due_ns(), self.clock_ns()
        if due_ns is None or due_ns > now_ns:
            self._end_round()
            return False
        for command in self.keeper.due(now_ns, STEP_LEASES):
            self._gather(command)
        return True

    def take_outgoing(self) -> list[Outgoing]:
        """The messages of this round, each once."""
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    def nudge(self) -> None:
        """Something may have become due that was not when the task fell asleep."""
        due_ns = self.keeper.next_due_ns()
        if self._until_ns and (self._lost or (due_ns is not None and due_ns < self._until_ns)):
            self._woken.set()

    def on_reply(self, tag: object, message: Message) -> None:
        """The channel's answers, on its thread."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._hear, tag, message)

    def tallies(self) -> Iterator[tuple[str, EngineTally]]:
        """Every engine's messages, by its control address."""
        for address, tally in self.engines.items():
            yield endpoint_of(address).removeprefix("tcp://"), tally

    def check_integrity(self) -> None:
        """AssertionError where the keeper's books or ours do not balance, or a bound does not hold."""
        self.keeper.check_integrity()
        assert len(self.engines) <= MAX_ENGINES
        assert len(self.gone) <= self.keeper.max_leases
        for tally in self.engines.values():
            assert not tally.open.keys() & tally.late.keys(), "a question counts twice"
            assert max([*tally.open, *tally.late], default=0) <= self._serial, "a question that was not asked"
            heard_of = tally.answered + tally.failed
            assert tally.sent >= heard_of + len(tally.open) + len(tally.late), "more answers than questions"
            assert tally.unanswered >= len(tally.late)

    async def _sleep(self) -> None:
        if self._lost:  # they came while nobody listened, after a failure
            return
        self._woken.clear()
        due_ns = self.keeper.next_due_ns()
        delay_s = None if due_ns is None else _whole_ms(due_ns - self.clock_ns()) / 1000
        self._until_ns = 1 << 63 if due_ns is None else due_ns
        try:
            async with asyncio.timeout(delay_s):
                await self._woken.wait()
        except TimeoutError:
            pass
        finally:
            self._until_ns = 0

    def _gather(self, command: SendRenew | SendDrop) -> None:
        if isinstance(command, SendDrop):
            drops = self._drops.setdefault((command.address, command.is_over), [])
            drops += command.lease_ids
            return
        renewals = self._renewals.setdefault(command.address, [])
        renewals += [(lease_id, max(1, ns // _NS_PER_MS), chance) for lease_id, ns, chance in command.leases]
        if len(renewals) > MAX_LEASES_PER_MESSAGE:
            self._renew(command.address, renewals[:MAX_LEASES_PER_MESSAGE])
            del renewals[:MAX_LEASES_PER_MESSAGE]

    def _end_round(self) -> None:
        """Send what was gathered, renewals before the drops that overtook them."""
        renewals, self._renewals = self._renewals, {}
        for address, leases in renewals.items():
            self._renew(address, leases)
        drops, self._drops = self._drops, {}
        for (address, is_over), lease_ids in drops.items():
            for start in range(0, len(lease_ids), MAX_LEASES_PER_MESSAGE):
                part = lease_ids[start : start + MAX_LEASES_PER_MESSAGE]
                self._ask(address, Drop(part, is_over), frozenset())

    def _renew(self, address: Address, leases: list[tuple[str, int, int]]) -> None:
        self._ask(address, Renew(leases), frozenset(lease_id for lease_id, _, _ in leases))

    def _ask(self, address: Address, message: Message, asked: frozenset[str]) -> None:
        tally, now_ns = self._tally(address), self.clock_ns()
        if now_ns - tally.since_ns >= self.keeper.times.interval_ns // 2:
            tally.unanswered += len(tally.open)
            if tally.open:
                self._complain(address, tally, "no answer")
            tally.late, tally.open, tally.since_ns = tally.open, {}, now_ns
        self._serial += 1
        tally.sent += 1
        tally.open[self._serial] = asked
        self._outgoing.append(Outgoing(address, message, (address, self._serial)))

    def _hear(self, tag: object, message: Message) -> None:
        assert isinstance(tag, tuple)
        address, serial = tag
        tally = self.engines.get(address)
        if tally is None:
            return
        asked = tally.open.pop(serial, None)
        if asked is None:
            asked = tally.late.pop(serial, None)
        if asked is None:
            return
        if isinstance(message, Renewed) and asked:
            self._lost.append(_Lost(asked, message.gone, message.soft))
            self.nudge()
        elif not (isinstance(message, Dropped) and not asked):
            tally.failed += 1
            why = message.reason if isinstance(message, Failed) else "an answer to something else"
            self._complain(address, tally, why)
            return
        tally.answered += 1

    def _take_in(self, lost: _Lost) -> None:
        """A step's worth of the leases that an engine says it has lost."""
        ids = lost.gone or lost.soft
        batch = [lease_id for lease_id in ids[-STEP_LEASES:] if lease_id in lost.asked]
        if ids is lost.gone:
            self.keeper.gone(batch, self.clock_ns())
            self.gone.update(dict.fromkeys(batch))
            while len(self.gone) > self.keeper.max_leases:
                self.gone.popitem(last=False)
        else:
            self.keeper.soft(batch, self.clock_ns())
        del ids[-STEP_LEASES:]
        if not lost.gone and not lost.soft:
            self._lost.popleft()

    def _tally(self, address: Address) -> EngineTally:
        tally = self.engines.pop(address, None) or EngineTally()
        self.engines[address] = tally
        if len(self.engines) > MAX_ENGINES:
            self.engines.popitem(last=False)
        return tally

    def _complain(self, address: Address, tally: EngineTally, why: str) -> None:
        now_ns = self.clock_ns()
        if now_ns >= tally.silent_until_ns:
            tally.silent_until_ns = now_ns + LOG_EVERY_NS
            logger.warning("leases are not renewed at %s: %s", endpoint_of(address), why)


def _whole_ms(ns: int) -> int:
    """Rounded up, and one more: a timer that ends early would be set again for the rest, many times."""
    return max(0, ns) // _NS_PER_MS + 2
