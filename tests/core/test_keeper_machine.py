"""Under any schedule decode engines that hear a keeper hold what they should, and nothing for longer."""

from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvloop.core.handle import LeaseRef
from kvloop.core.keeper import Ending, Keeper, KeeperTimes, SendDrop, SendRenew
from kvloop.core.keeper_state import Entry
from kvloop.core.returns import ReturnModel
from tests.reach import run_machine_until_reached

MS = 1_000_000
TIMES = KeeperTimes(interval_ns=4 * MS, term_ns=12 * MS, ttl_ns=40 * MS, drop_every_ns=MS)
HORIZONS = {"never": 0, "short": 6 * MS, "long": 21 * MS, "ever": TIMES.ttl_ns}
MAX_LEASES = 6
MUST_REACH = {
    "renewed",
    "dropped",
    "over",
    "expired at decode",
    "evicted",
    "used",
    "used after it was let go",
}
MUST_REACH |= {
    "used twice at once",
    "ended in flight",
    "returned",
    "broken off",
    "waited out",
    "used in part",
}
MUST_REACH |= {"no room among the drops", "a wish", "gone", "soft", "a message lost", "several in a message"}


class Told(ReturnModel):
    """A model that keeps what it is told of each caller, and whose opinion is in the caller's name."""

    def __init__(self) -> None:
        super().__init__(TIMES.ttl_ns)
        self.told: dict[str, list[tuple[str, int, int]]] = {}

    def waited(self, caller: str, ending: Ending, from_ns: int, to_ns: int) -> None:
        """A piece of a wait."""
        self.told.setdefault(f"{caller} {ending}", []).append(("waited", from_ns, to_ns))

    def returned(self, caller: str, ending: Ending, from_ns: int, age_ns: int) -> None:
        """The end of a wait."""
        self.told.setdefault(f"{caller} {ending}", []).append(("returned", from_ns, age_ns))

    def broken_off(self, caller: str, ending: Ending, from_ns: int, age_ns: int) -> None:
        """The end of a wait, too."""
        self.told.setdefault(f"{caller} {ending}", []).append(("broken off", from_ns, age_ns))

    def keep_until(self, caller: str, ending: Ending, age_ns: int) -> int:
        """By name."""
        horizon_ns = HORIZONS[caller.split()[0]] if ending is not Ending.AGAIN or "ever" in caller else 0
        return horizon_ns if age_ns < horizon_ns else 0


class Watched(Keeper):
    """A keeper that tells which drops found no room among those that wait to be sent."""

    def __init__(self, model: Told, fixed: bool) -> None:
        super().__init__(model, TIMES, fixed=fixed, max_leases=MAX_LEASES)
        self.pushed_out: set[str] = set()

    def _drop(self, entry: Entry, now_ns: int, is_over: bool = False) -> None:
        before = set(self._drops)
        super()._drop(entry, now_ns, is_over)
        self.pushed_out |= before - set(self._drops)


@dataclass
class Lease:
    """A lease as the test knows it. `deadline_ns`: when it ends on decode, 0 if it has."""

    ref: LeaseRef
    kind: str
    since_ns: int
    deadline_ns: int
    wish_ns: int | None
    used_before: bool = False
    in_flight: int = 0
    partly: bool = True
    over: bool = False
    reliable: bool = True  # nothing that was sent about it was lost, and decode has not taken it
    settled_ns: int = 0  # when the keeper last heard of it
    told_over: int = 0
    caller: str = field(default="")


class KeeperMachine(RuleBasedStateMachine):
    """Drives a keeper with what happens to conversations; decode engines hear what it sends."""

    reached: ClassVar[Counter[str]] = Counter()

    @initialize(fixed=st.booleans())
    def begin(self, fixed: bool) -> None:
        """Nothing is filed."""
        self.now = 0
        self.fixed = fixed
        self.model = Told()
        self.keeper = Watched(self.model, fixed)
        self.leases: dict[str, Lease] = {}
        self.serial = 0

    def known(self) -> list[Lease]:
        """Those that the keeper still follows."""
        return [lease for lease_id, lease in self.leases.items() if lease_id in self.keeper._entries]

    def pick(self, number: int) -> Lease:
        """One of all that ever were, mostly of those that are known."""
        known = self.known()
        return known[number % len(known)] if known else list(self.leases.values())[-1]

    @rule(
        kind=st.sampled_from([*HORIZONS]),
        engine=st.sampled_from("de"),
        wish=st.sampled_from([None, None, None, 0, 3, 30, 1000]),
        term=st.sampled_from([12, 12, 5, 1, 0]),
    )
    def file(self, kind: str, engine: str, wish: int | None, term: int) -> None:
        """A turn has ended."""
        self.serial += 1
        lease_id, caller = f"l{self.serial}", f"{kind} {self.serial}"
        ref = LeaseRef(lease_id, "i", (engine, 1), 100, term)
        before = {lease.ref.lease_id for lease in self.known()}
        wish_ns = None if wish is None else self.now + min(wish * MS, TIMES.ttl_ns)
        lease = Lease(ref, kind, self.now, self.now + term * MS, wish_ns, settled_ns=self.now, caller=caller)
        self.leases[lease_id] = lease
        self.keeper.filed(ref, caller, Ending.STOP, self.now, None if wish is None else wish * MS)
        gone = before - {lease.ref.lease_id for lease in self.known()}
        assert len(gone) == (len(before) == MAX_LEASES)
        self.reached["evicted"] += len(gone)
        self.reached["a wish"] += wish is not None

    @precondition(lambda self: self.leases)
    @rule(number=st.integers(0, 9), whole=st.sampled_from([True, True, False]))
    def use(self, number: int, whole: bool) -> None:
        """A turn begins; a claim on a lease that was let go brings it back."""
        lease = self.pick(number)
        was_known = lease.ref.lease_id in self.keeper._entries
        self.keeper.used(lease.ref.lease_id, self.now, whole)
        if not was_known:
            return
        self.reached["used" if whole else "used in part"] += 1
        self.reached["used twice at once"] += lease.in_flight > 0
        if lease.deadline_ns <= self.now:
            self.reached["used after it was let go"] += 1
            lease.deadline_ns = self.now + lease.ref.term_ms * MS
        lease.in_flight += 1
        lease.partly &= not whole
        if not lease.partly or lease.over:  # nobody waits for it any more
            lease.since_ns = self.now
        lease.settled_ns = self.now

    @precondition(lambda self: any(lease.in_flight for lease in self.known()))
    @rule(number=st.integers(0, 9))
    def finish(self, number: int) -> None:
        """A turn is through with its lease."""
        busy = [lease for lease in self.known() if lease.in_flight]
        lease = busy[number % len(busy)]
        if lease.reliable and lease.deadline_ns <= self.now and lease.ref.term_ms:
            assert self.now >= self.until(lease), "let go in flight"
            lease.reliable = False  # the turn outlasted the TTL, and the lease with it
        self.keeper.done(lease.ref.lease_id, self.now)
        lease.in_flight -= 1
        lease.settled_ns = self.now
        if not lease.in_flight and not lease.partly:
            lease.since_ns, lease.used_before, lease.partly = self.now, True, True

    @precondition(lambda self: self.leases)
    @rule(number=st.integers(0, 9))
    def end(self, number: int) -> None:
        """A later turn supersedes it, or somebody deletes the conversation. Twice is once."""
        lease = self.pick(number)
        was_known = lease.ref.lease_id in self.keeper._entries
        for _ in range(2):
            self.keeper.ended(lease.ref.lease_id, self.now)
        if was_known and not lease.over:
            lease.over, lease.settled_ns = True, self.now
            self.reached["ended in flight"] += lease.in_flight > 0

    @precondition(lambda self: self.leases)
    @rule(number=st.integers(0, 9), soft=st.booleans())
    def take(self, number: int, soft: bool) -> None:
        """Live work takes the lease, and the answer to the next renewal says so."""
        lease = self.pick(number)
        lease.deadline_ns, lease.reliable = 0, False
        if soft:
            self.keeper.soft([lease.ref.lease_id], self.now)
        else:
            self.keeper.gone([lease.ref.lease_id, "never was"], self.now)
        self.reached["soft" if soft else "gone"] += 1

    @rule(steps=st.sampled_from([1, 1, 2, 5, 9, 30, 90]), loses=st.sampled_from([False, False, True]))
    def pass_time(self, steps: int, loses: bool) -> None:
        """The driver sleeps until something is due, works in small pieces, and may outlast the TTL."""
        until = self.now + steps * MS // 2
        while (due_ns := self.keeper.next_due_ns()) is not None and due_ns <= until:
            self.now = max(self.now, due_ns)
            sends = self.keeper.due(self.now, 3)
            self.keeper.check_integrity()
            for send in sends:
                self.hear(send, loses)
        self.now = until

    def hear(self, send: SendRenew | SendDrop, is_lost: bool) -> None:
        """What a decode engine makes of a message; the keeper must never ask for what it may not have."""
        renewals = send.leases if isinstance(send, SendRenew) else [(one, 0, 0) for one in send.lease_ids]
        assert len({lease_id for lease_id, _, _ in renewals}) == len(renewals) > 0
        self.reached["several in a message"] += len(renewals) > 1
        self.reached["a message lost"] += is_lost
        for lease_id, term_ns, chance in renewals:
            lease = self.leases[lease_id]
            assert lease.ref.address == send.address
            if is_lost:
                lease.reliable = False
            if isinstance(send, SendRenew):
                assert 0 < term_ns <= TIMES.term_ns
                assert self.now + term_ns <= lease.since_ns + TIMES.ttl_ns
                assert 0 <= chance <= 1000
                assert not lease.over or lease.in_flight
                assert self.now < self.until(lease), "renewed after its horizon"
                self.reached["renewed"] += 1
                if not is_lost and lease.deadline_ns > self.now:
                    lease.deadline_ns = max(lease.deadline_ns, self.now + term_ns)
                continue
            assert not lease.in_flight, "dropped while a turn may claim it"
            assert send.is_over is lease.over
            assert send.is_over or self.now >= self.until(lease), "let go before its horizon"
            lease.told_over += send.is_over
            self.reached["over" if send.is_over else "dropped"] += 1
            lease.deadline_ns = lease.deadline_ns if is_lost else 0

    def until(self, lease: Lease) -> int:
        """When a lease is to be let go, as things stand."""
        if lease.in_flight:
            return lease.since_ns + TIMES.ttl_ns
        if lease.wish_ns is not None:
            return lease.wish_ns
        if self.fixed:
            return lease.since_ns + TIMES.ttl_ns
        keeps = not lease.used_before or lease.kind == "ever"
        return lease.since_ns + (HORIZONS[lease.kind] if keeps else 0)

    @invariant()
    def decode_holds_what_it_should(self) -> None:
        """For as long as it is worth it, and with reliable messages not a moment longer than drops wait."""
        if not hasattr(self, "keeper"):
            return
        self.keeper.check_integrity()
        self.reached["no room among the drops"] += len(self.keeper.pushed_out)
        for lease_id, lease in self.leases.items():
            is_sent = lease_id not in self.keeper.pushed_out
            lease.reliable &= is_sent
            is_known = lease.ref.lease_id in self.keeper._entries
            until = self.until(lease)
            is_held = lease.deadline_ns > self.now
            lately = self.now < max(until, lease.settled_ns) + 2 * TIMES.drop_every_ns
            if is_known and lease.reliable and self.now < until and not lease.over and lease.ref.term_ms:
                assert is_held, "let go too early"
            if is_known and lease.reliable and not lease.in_flight and not lately:
                assert not is_held, "held for nothing"
            if lease.over and not lease.in_flight and not lately:
                assert lease.told_over == 1 or not is_sent
            assert lease.told_over <= 1
            self.reached["expired at decode"] += not is_held and lease.reliable and not lease.told_over

    @invariant()
    def each_wait_is_told_once(self) -> None:
        """What the model hears of a wait is in order, without gaps, and has one end."""
        if not hasattr(self, "keeper"):
            return
        for told in self.model.told.values():
            at_ns = 0
            for what, from_ns, to_ns in told:
                assert from_ns == at_ns, "a gap in what was seen of a wait, or an overlap"
                assert to_ns >= from_ns
                at_ns = to_ns if what == "waited" else 0
                self.reached[what] += what != "waited"
                self.reached["waited out"] += what == "waited" and to_ns >= TIMES.ttl_ns


def test_decode_holds_what_it_should_under_any_schedule() -> None:
    """Whatever happens to conversations, and the schedules reach everything there is to reach."""
    schedules = settings(deadline=None, max_examples=200, stateful_step_count=40)
    run_machine_until_reached(KeeperMachine, schedules, KeeperMachine.reached, MUST_REACH)
