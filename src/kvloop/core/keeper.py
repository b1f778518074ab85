"""Which leases a router renews, and for how long: as long as a return is worth the memory.

A lease lasts one term and no longer by itself, so a router that is dead or cut off frees everything within
one term (Gray and Cheriton, Leases, SOSP 1989), and several may renew the same one. This machine knows every
lease that its router has filed. Each has a *wait* while its conversation is away, from which `ReturnModel`
learns, and a *horizon* at which it is let go: the model's, or the client's own wish. A lease that was let go
stays known until the TTL since its last use: what returns after all is learned from, too, and its blocks may
still be there.

`due` says what to send. Renewals fall due on ticks that all leases share, so that an engine gets one message
for all of its leases; drops are gathered for a second. Nothing here waits for an answer: a renewal that was
lost is repeated on the next tick, and a term lasts several.
"""

from collections.abc import Iterable

from kvloop.core.drops import Drops
from kvloop.core.handle import LeaseRef
from kvloop.core.keeper_state import (
    AWAY,
    FINAL,
    HELD,
    Entry,
    KeeperCounts,
    KeeperTimes,
    KeptEvent,
    KeptState,
    SendDrop,
    SendRenew,
)
from kvloop.core.kept import KeptLeases
from kvloop.core.returns import PERMILLE, Ending, ReturnModel
from kvloop.core.slot_deadlines import SlotDeadlines

__all__ = ["Ending", "Keeper", "KeeperCounts", "KeeperTimes", "LeaseRef", "SendDrop", "SendRenew"]

MAX_LEASES = 100_000  # as many as one decode engine holds
_NS_PER_MS = 1_000_000


class Keeper:
    """All leases that one router has filed. Times are nanoseconds of one monotonic clock."""

    def __init__(
        self, model: ReturnModel, times: KeeperTimes, *, fixed: bool = False, max_leases: int = MAX_LEASES
    ) -> None:
        """`fixed`: keep every lease for the TTL, whatever the model says. A client's wish still counts."""
        if max_leases <= 0:
            raise ValueError("the bound must be positive")
        self.model = model
        self.times = times
        self.fixed = fixed
        self.max_leases = max_leases
        self.counts = KeeperCounts()
        self._entries = KeptLeases()
        self._held = 0
        self._due = SlotDeadlines()  # by the entries' rows
        self._drops = Drops(max_leases, times.drop_every_ns)

    def __len__(self) -> int:
        """Leases that are known, let go or not."""
        return len(self._entries)

    @property
    def held(self) -> int:
        """Leases that are renewed."""
        return self._held

    def filed(
        self, ref: LeaseRef, caller: str, ending: Ending, now_ns: int, keep_ns: int | None = None
    ) -> None:
        """A turn has ended and left this lease. `keep_ns`: the client's wish, 0 to let go at once."""
        self._leave(ref.lease_id, now_ns)
        self._drops.take_back(ref.lease_id)
        wish_ns = None if keep_ns is None else now_ns + min(keep_ns, self.times.ttl_ns)
        deadline_ns = now_ns + ref.term_ms * _NS_PER_MS
        renew_ns = self.times.next_renewal_ns(now_ns, deadline_ns)
        lease_id, _, address, _, term_ms = ref
        entry = Entry(lease_id, address, term_ms, caller, ending, now_ns, deadline_ns, wish_ns, renew_ns)
        self._entries.add(entry)
        self._held += 1
        self.counts.filed += 1
        self._plan(entry, now_ns, self._keep_until(entry, now_ns))
        if len(self._entries) > self.max_leases:
            self.counts.evicted += 1
            self._leave(self._entries.least_recently_used(), now_ns)

    def used(self, lease_id: str, now_ns: int, returns: bool = True) -> None:
        """A turn that goes on from this lease has begun and may claim it. Each `used` has its `done`.

        `returns`: it goes on from all of the lease's turn, and the wait is over. Else it shares a part only
        (a system prompt, a history that forked off), and the wait goes on.
        """
        entry = self._entries.get(lease_id)
        if entry is None:
            return
        if returns and entry.waits:
            self.model.returned(entry.caller, entry.ending, entry.seen_ns, entry.age_ns(now_ns))
            self.counts.returned += 1
            entry.waits = False
        is_kept_back = self._drops.take_back(lease_id)
        if entry.state is KeptState.LET_GO and not is_kept_back:  # the claim may bring it back, for a term
            entry.deadline_ns = now_ns + entry.term_ms * _NS_PER_MS
        renew_ns = self.times.next_renewal_ns(now_ns, entry.deadline_ns)
        entry.renew_ns = min(entry.renew_ns, renew_ns) if entry.renew_ns > now_ns else renew_ns
        self._move(entry, KeptEvent.USE)
        entry.in_flight += 1
        if not entry.waits:
            entry.since_ns = max(entry.since_ns, now_ns)
        self._entries.was_used(entry.row)
        self._entries.put(entry)
        self._due.set(entry.row, entry.renew_ns)

    def done(self, lease_id: str, now_ns: int) -> None:
        """That turn needs the lease no more: decode has begun to answer it, so it has what it could take from
        the lease; or it has failed. The sooner it is said, the less memory is held for nothing."""
        entry = self._entries.get(lease_id)
        if entry is None or not entry.in_flight:
            return
        entry.in_flight -= 1
        if entry.in_flight:
            self._entries.put(entry)
            return
        if not entry.waits:
            entry.waits = True
            entry.since_ns = max(entry.since_ns, now_ns)
            entry.seen_ns = 0
            entry.ending = Ending.AGAIN
        self._move(entry, KeptEvent.DONE)
        if not self._is_over(entry, now_ns):
            self._plan(entry, now_ns, self._keep_until(entry, now_ns))

    def keep(self, lease_id: str, keep_ns: int, now_ns: int) -> bool:
        """Somebody wants this lease kept so long from now. False if it is not renewed any more."""
        entry = self._entries.get(lease_id)
        if entry is None or entry.state not in HELD:
            return False
        entry.wish_until_ns = now_ns + min(keep_ns, self.times.ttl_ns)
        self._plan(entry, now_ns, self._keep_until(entry, now_ns))
        return True

    def ended(self, lease_id: str, now_ns: int) -> None:
        """Nothing leads to this lease any more: over as soon as no turn in flight may claim it."""
        entry = self._entries.get(lease_id)
        if entry is None or entry.state is KeptState.ENDING:
            return
        self.counts.superseded += 1
        self._broken_off(entry, now_ns)
        self._move(entry, KeptEvent.END)
        if not self._is_over(entry, now_ns):
            self._entries.put(entry)

    def gone(self, lease_ids: Iterable[str], now_ns: int) -> None:
        """Their engine knows these leases no more."""
        for lease_id in lease_ids:
            self.counts.lost += lease_id in self._entries
            self._leave(lease_id, now_ns)

    def soft(self, lease_ids: Iterable[str], now_ns: int) -> None:
        """Their engine holds these leases no more, but their handles may still be good for something."""
        for lease_id in lease_ids:
            entry = self._entries.get(lease_id)
            if entry is not None and entry.state is KeptState.WAITING:
                self.counts.lost += 1
                self._move(entry, KeptEvent.LOSE)
                self._plan(entry, now_ns, self._keep_until(entry, now_ns))

    def next_due_ns(self) -> int | None:
        """When `due` will next have something to do, or None."""
        looks_ns, drops_ns = self._due.next_ns(), self._drops.next_due_ns()
        if looks_ns is None or drops_ns is None:
            return drops_ns if looks_ns is None else looks_ns
        return min(looks_ns, drops_ns)

    def due(self, now_ns: int, limit: int) -> list[SendRenew | SendDrop]:
        """What to send now, after looking at `limit` leases at most. While `next_due_ns` is past: again."""
        renewals: dict[tuple[str, int], list[tuple[str, int, int]]] = {}
        for _ in range(limit):
            row = self._due.pop_due(now_ns)
            if not row:
                break
            entry = self._entries[row]
            if (renewal := self._look_at(entry, now_ns)) is not None:
                renewals.setdefault(entry.address, []).append(renewal)
        drops = self._drops.due(now_ns, limit)
        self.counts.dropped += sum([len(drop.lease_ids) for drop in drops])
        return [*(SendRenew(address, tuple(leases)) for address, leases in renewals.items()), *drops]

    def check_integrity(self) -> None:
        """AssertionError where the keeper contradicts itself."""
        self.model.check_integrity()
        self._due.check_integrity()
        assert len(self._entries) <= self.max_leases
        self._entries.check_integrity()
        entries = list(self._entries)
        assert self._held == sum(entry.state in HELD for entry in entries)
        for entry in entries:
            entry.check_integrity()
            assert entry.row in self._due or entry.in_flight, "a lease that nobody will look at again"
            assert entry.lease_id not in self._drops or entry.state is KeptState.LET_GO, "dropped, and held"
        assert len(self._due) == sum(entry.row in self._due for entry in entries), "a deadline of nobody's"
        assert len(self._drops) <= self.max_leases

    def _look_at(self, entry: Entry, now_ns: int) -> tuple[str, int, int] | None:
        """What has become of a lease; the renewal that it needs, or None."""
        age_ns = entry.age_ns(now_ns)
        if entry.state in AWAY:
            self.model.waited(entry.caller, entry.ending, entry.seen_ns, age_ns)
            entry.seen_ns = max(entry.seen_ns, age_ns)
            if age_ns >= self.times.ttl_ns:
                self.counts.expired += 1
                self._move(entry, KeptEvent.FORGET)
                self._forget(entry)
                return None
        until_ns = self._keep_until(entry, now_ns)
        renewal = None
        if entry.state in HELD and until_ns > now_ns >= entry.renew_ns:
            if entry.deadline_ns < until_ns:
                term_ns = min(self.times.term_ns, entry.since_ns + self.times.ttl_ns - now_ns)
                entry.deadline_ns = max(entry.deadline_ns, now_ns + term_ns)
                self.counts.renewed += 1
                renewal = (entry.lease_id, term_ns, self._chance(entry, age_ns, now_ns))
            entry.renew_ns = self.times.next_renewal_ns(now_ns, entry.deadline_ns)
        self._plan(entry, now_ns, until_ns)
        return renewal

    def _plan(self, entry: Entry, now_ns: int, until_ns: int) -> None:
        """Let a lease go if that is best, say when to look at it again, and keep what has changed of it."""
        end_ns = entry.since_ns + self.times.ttl_ns
        if entry.state is KeptState.WAITING and until_ns <= now_ns:
            self.counts.let_go += 1
            self._move(entry, KeptEvent.LET_GO)
            self._drop(entry, now_ns)
        if entry.state is KeptState.LET_GO:
            again_ns = now_ns + max(entry.age_ns(now_ns), self.times.interval_ns)
            self._due.set(entry.row, min(again_ns, end_ns))
        elif entry.state is KeptState.WAITING:
            renew_ns = max(now_ns + 1, entry.renew_ns) if entry.deadline_ns < until_ns else until_ns
            self._due.set(entry.row, min(renew_ns, until_ns, end_ns))
        elif until_ns > now_ns:
            self._due.set(entry.row, max(now_ns + 1, entry.renew_ns))
        self._entries.put(entry)

    def _keep_until(self, entry: Entry, now_ns: int) -> int:
        """When to let a lease go, or to stop renewing one that is in use; `now_ns` or before: now."""
        if entry.wish_until_ns is not None and not entry.in_flight:
            return entry.wish_until_ns
        if entry.in_flight or self.fixed:
            return entry.since_ns + self.times.ttl_ns
        keep_ns = self.model.keep_until(entry.caller, entry.ending, entry.age_ns(now_ns))
        return entry.since_ns + min(keep_ns, self.times.ttl_ns)

    def _chance(self, entry: Entry, age_ns: int, now_ns: int) -> int:
        if entry.in_flight or (entry.wish_until_ns is not None and entry.wish_until_ns > now_ns):
            return PERMILLE
        return self.model.chance(entry.caller, entry.ending, age_ns, self.times.ttl_ns)

    def _drop(self, entry: Entry, now_ns: int, is_over: bool = False) -> None:
        """Tell decode; not of a lease that has expired there by itself, unless it is over for good."""
        if entry.deadline_ns <= now_ns and not is_over:
            return
        self._drops.add(entry, now_ns, is_over)

    def _is_over(self, entry: Entry, now_ns: int) -> bool:
        if entry.state not in FINAL:
            return False
        self._drop(entry, now_ns, is_over=True)
        self._forget(entry)
        return True

    def _broken_off(self, entry: Entry, now_ns: int) -> None:
        if entry.waits:
            self.model.broken_off(entry.caller, entry.ending, entry.seen_ns, entry.age_ns(now_ns))
            entry.waits = False

    def _leave(self, lease_id: str, now_ns: int) -> None:
        """Forget a lease, if it is known, as what it waited for will not be seen."""
        entry = self._entries.get(lease_id)
        if entry is None:
            return
        self._broken_off(entry, now_ns)
        self._move(entry, KeptEvent.FORGET)
        self._forget(entry)

    def _move(self, entry: Entry, event: KeptEvent) -> None:
        was_held = entry.state in HELD
        entry.move(event)
        self._held += (entry.state in HELD) - was_held

    def _forget(self, entry: Entry) -> None:
        self._entries.remove(entry)
        self._due.discard(entry.row)
