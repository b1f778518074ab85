"""What a router remembers of turns, and how it keeps their leases: `core`'s lineage and keeper at work.

The calls are those of the router's own shell, in the same order; no rule stands here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from msgspec import Struct

from kvloop.core.belief import believed
from kvloop.core.decision import Ask as Believed
from kvloop.core.handle import LeaseRef
from kvloop.core.keeper import Keeper, KeeperTimes, SendDrop
from kvloop.core.life_table import Ending
from kvloop.core.lineage import CONTENT, FiledTurn, LineageTable, Match, Name, Prompt, content_keys, name_key
from kvloop.core.returns import ReturnModel
from kvloop.errors import HandleError
from kvloop.sim.fleet.around import Around, Correspondent, Frame
from kvloop.sim.fleet.clocks import Clocks
from kvloop.sim.fleet.plan import MS, Plan
from kvloop.sim.text import Text
from kvloop.wire.control import Drop, Message, Renew, Renewed
from kvloop.wire.handle import decode_handle

STEP_LEASES = 64
MIN_STEPS = 100  # each lease is due once at a time, and a step takes 64 of them
MAX_GONE = 100_000
MAX_KEYS, MAX_BYTES = 400_000, 128 << 20  # the router's own bounds
MODEL = "sim"


class Ask(Struct, frozen=True):
    """A client's turn as a router sees it.

    `units`: a digest for each message. `salt`: the tenant's, for the engines' caches. `keep_ms`: the client's
    wish, 0 for nothing to be kept. `stream`: what has come of the answer has reached the client. `smuggles`:
    it brings block metadata along.
    """

    tenant: str
    salt: str
    units: tuple[bytes, ...]
    names: tuple[Name, ...]
    text: Text
    max_tokens: int
    ends_at: int
    ending: Ending
    stream: bool = False
    smuggles: bool = False
    keep_ms: int | None = None


class Found(Struct, frozen=True):
    """A turn's keys, and the turn that it goes on from."""

    content: list[bytes]
    names: list[tuple[Name, bytes]]
    match: Match | None


class LeaseUse:
    """One request's time with the lease that it found: `end` tells the keeper once, the first time."""

    def __init__(self, done: Callable[[], None]) -> None:
        self._done: Callable[[], None] | None = done

    def end(self) -> None:
        """The request claims nothing any more."""
        done, self._done = self._done, None
        if done is not None:
            done()


class Filing:
    """One router process's memory."""

    def __init__(self, around: Around, name: str, plan: Plan, link: Correspondent, clocks: Clocks) -> None:
        self._around = around
        self._name = name
        self._link = link
        self._clocks = clocks
        self._ttl_ns = plan.lease_ttl_ms * MS
        self.lineage = LineageTable(MAX_KEYS, MAX_BYTES)
        times = KeeperTimes(plan.renew_ms * MS, plan.lease_term_ms * MS, self._ttl_ns)
        model = ReturnModel(self._ttl_ns, self._ttl_ns // plan.break_even_parts)
        self.keeper = Keeper(model, times, fixed=plan.fixed_leases)
        self._pinned = plan.pinned_leases or not plan.returns
        self._returns = plan.returns
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._wakes_ns = -1
        self._is_over = False

    def close(self) -> None:
        """The process has died."""
        self._is_over = True

    def look_up(self, ask: Ask) -> Found:
        """The turn that a request goes on from."""
        key, now_ns = self._around.key, self._now_ns()
        content = content_keys(key, [ask.tenant.encode(), ask.salt.encode()], ask.units)
        names = [(one, name_key(key, ask.tenant, MODEL, one)) for one in ask.names]
        match = self.lineage.find(content, names, now_ns)
        self._end([])
        if match is not None:
            for checker in self._around.checkers:
                checker.found(ask, match)
        lease = None if match is None else match.turn.lease
        return Found(content, names, None if lease and lease.lease_id in self._gone else match)

    def use(self, found: Found) -> LeaseUse:
        """The request may claim what it found from now on, until this ends."""
        match = found.match
        if match is None or match.turn.lease is None:
            return LeaseUse(lambda: None)
        lease_id = match.turn.lease.lease_id
        self.keeper.used(lease_id, self._now_ns(), _is_return(match))
        self._plan_to_wake()

        def done() -> None:
            self.keeper.done(lease_id, self._now_ns())
            self._plan_to_wake()

        return LeaseUse(done)

    def believe(self, ask: Ask, found: Found) -> Believed:
        """A turn in tokens. A client's text is tokens already; what an edited history shares is a guess."""
        match = found.match

        def before(depth: int) -> int:
            assert match is not None
            return match.turn.held_tokens * depth // max(1, match.turn.depth)

        found_it = believed(match, len(ask.text), before, None)
        return found_it if self._returns else found_it._replace(can_return=False)

    def file(self, ask: Ask, found: Found, handle: str, engine: str, prompt: Prompt) -> None:
        """A turn has ended and left a handle."""
        if ask.keep_ms == 0:
            return
        now_ns = self._now_ns()
        try:
            lease: LeaseRef | None = LeaseRef.of(decode_handle(handle, self._around.key))
        except HandleError:
            lease = None
        names, depth = tuple(name for name, _ in found.names), len(found.content)
        expires_ns = now_ns + self._ttl_ns
        turn = FiledTurn(handle.encode(), engine, ask.tenant, depth, expires_ns, names, lease, prompt)
        if lease is not None and not self._pinned:
            keep_ns = None if ask.keep_ms is None else ask.keep_ms * MS
            self.keeper.filed(lease, ask.tenant, ask.ending, now_ns, keep_ns)
        self._end(self.lineage.file(turn, found.content, [key for _, key in found.names], now_ns))

    def check_integrity(self) -> None:
        """AssertionError where it contradicts itself."""
        self.lineage.check_integrity()
        self.keeper.check_integrity()

    def _now_ns(self) -> int:
        return self._clocks.monotonic_ns(self._around.loop.now_ns)

    def _end(self, superseded: Sequence[FiledTurn]) -> None:
        for turn in (*superseded, *self.lineage.take_dropped()):
            if turn.lease is not None:
                self._gone.pop(turn.lease.lease_id, None)
                self.keeper.ended(turn.lease.lease_id, self._now_ns())
        self._plan_to_wake()

    def _plan_to_wake(self) -> None:
        due_ns = self.keeper.next_due_ns()
        if due_ns is None:
            return
        true_ns = max(self._clocks.true_ns(due_ns), self._around.loop.now_ns)
        if self._wakes_ns < self._around.loop.now_ns or true_ns < self._wakes_ns:
            self._wakes_ns = true_ns
            self._around.loop.at(true_ns, self._wake)

    def _wake(self) -> None:
        if self._is_over or self._around.loop.now_ns < self._wakes_ns:
            return
        self._wakes_ns = -1
        try:
            self._keep()
        except Exception as error:  # whatever the code under test raises is a finding
            self._around.failed(self._name, error)
        self._plan_to_wake()

    def _keep(self) -> None:
        """Send what is due: one message per engine, renewals before drops."""
        renewals: dict[str, list[tuple[str, int, int]]] = {}
        drops: dict[tuple[str, bool], list[str]] = {}
        steps_left = MIN_STEPS + len(self.keeper) // STEP_LEASES * 4
        while (due_ns := self.keeper.next_due_ns()) is not None and due_ns <= self._now_ns():
            steps_left -= 1
            if not steps_left:
                raise RuntimeError("the keeper is never through with what is due")
            for command in self.keeper.due(self._now_ns(), STEP_LEASES):
                if isinstance(command, SendDrop):
                    over = drops.setdefault((command.address[0], command.is_over), [])
                    over += command.lease_ids
                else:
                    renewed = renewals.setdefault(command.address[0], [])
                    renewed += [
                        (one, max(1, term_ns // MS), chance) for one, term_ns, chance in command.leases
                    ]
        for engine, leases in renewals.items():
            self._send(engine, Renew(leases), frozenset(lease_id for lease_id, _, _ in leases))
        for (engine, is_over), lease_ids in drops.items():
            self._send(engine, Drop(lease_ids, is_over), frozenset())

    def _send(self, engine: str, message: Message, asked: frozenset[str]) -> None:
        self._around.note(self._name, "sends", type(message).__name__, engine)

        def hear(frame: Frame) -> None:
            answer = None if self._is_over else self._link.taken(frame)
            if answer is not None and isinstance(answer[1], Renewed):
                self._lost(answer[1], asked)

        self._link.ask(engine, message, asked or "dropped", hear)

    def _lost(self, answer: Renewed, asked: frozenset[str]) -> None:
        now_ns = self._now_ns()
        gone = [lease_id for lease_id in answer.gone if lease_id in asked]
        self.keeper.gone(gone, now_ns)
        self._gone.update(dict.fromkeys(gone))
        while len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)
        self.keeper.soft([lease_id for lease_id in answer.soft if lease_id in asked], now_ns)
        self._plan_to_wake()


def _is_return(match: Match) -> bool:
    """Whether a request goes on from all of the turn that it found."""
    return match.by != CONTENT or match.depth >= match.turn.depth
