"""Recorded sessions against one decode engine's memory, in virtual time, under three ways to keep leases.

The memory is a pool of blocks as vLLM has it: blocks that nobody references are free, and stay what they are
until they are handed out again, the one free for longest first. Turns hold their blocks while they run, and
leave a lease. The lease table, the table of ended leases and the router's keeper are the product's own; only
the pool, the clock and the traffic are made here. A block is `UNIT_TOKENS` tokens, and the same content is
the same block.

    adaptive   the router renews a lease while a return is worth its memory
    fixed      every lease lasts for the TTL, unless a later turn has superseded it
    upstream   every turn's blocks are pinned for the TTL, whatever follows
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count

from kvloop.bench.replay_pool import Pool
from kvloop.bench.trace import UNIT_SEGMENTS, UNIT_TOKENS, TraceSession, TraceTurn
from kvloop.core.chain import DIGEST_BYTES, Chain
from kvloop.core.handle import LeaseRef
from kvloop.core.keeper import Keeper, KeeperTimes, SendRenew
from kvloop.core.lease import ClaimGranted, LeaseTable
from kvloop.core.returns import ReturnModel
from kvloop.core.soft import SoftTable

NS_PER_S = 1_000_000_000
TTL_NS = 480 * NS_PER_S
BREAK_EVEN_NS = 20 * NS_PER_S
CLAIM_TERM_NS = 5 * NS_PER_S
SESSIONS_START_WITHIN_S = 3600.0
LOOKS_PER_CALL = 1000
EARLIER_TURNS = 8
"""Turns of a session that a request may go on from: a session has few branches open at a time."""
_ADDRESS = ("decode", 1)
_MASK = (1 << 64) - 1


class Policy(StrEnum):
    """How leases are kept."""

    ADAPTIVE = "adaptive"
    FIXED = "fixed"
    UPSTREAM = "upstream"


@dataclass(slots=True)
class Outcome:
    """What a replay came to. `held_token_s` counts a block once for every lease that holds it."""

    turns: int = 0
    turns_reusing: int = 0
    reused_tokens: int = 0
    revived_tokens: int = 0
    held_token_s: float = 0.0
    reclaimed: int = 0
    starved: int = 0

    @property
    def held_per_reused(self) -> float:
        """Token-seconds held for each token reused."""
        return self.held_token_s / self.reused_tokens if self.reused_tokens else float("nan")


@dataclass(slots=True)
class _Past:
    lease_id: str
    contents: tuple[int, ...]
    prompt: tuple[int, ...]


@dataclass(slots=True)
class _Running:
    session: int
    turn: TraceTurn
    contents: tuple[int, ...]
    earlier: _Past | None
    holds: bool
    chain: Chain = field(repr=False)


class Replay:
    """One run. `run` may be called once."""

    def __init__(
        self,
        sessions: Sequence[TraceSession],
        policy: Policy,
        pool_tokens: int,
        start_within_s: float = SESSIONS_START_WITHIN_S,
    ) -> None:
        self.outcome = Outcome()
        self._sessions = sessions
        self._start_within_s = start_within_s
        self._policy = policy
        self._pool = Pool(pool_tokens // UNIT_TOKENS)
        self._table = LeaseTable(UNIT_TOKENS, TTL_NS, CLAIM_TERM_NS, max_leases=100_000, max_claims=100_000)
        self._soft = SoftTable(UNIT_TOKENS)
        times = KeeperTimes()
        self._term_ns = TTL_NS if policy is Policy.UPSTREAM else times.term_ns
        model = ReturnModel(TTL_NS, BREAK_EVEN_NS)
        self._keeper = Keeper(model, times, fixed=policy is Policy.FIXED)
        self._past: dict[int, list[_Past]] = {}
        self._running: dict[str, _Running] = {}
        self._fresh = count(1)
        self._events: list[tuple[int, int, str, int, int]] = []
        self._serial = count()

    def run(self, until_s: float | None = None) -> Outcome:
        """Play everything, until the last lease has ended, or what comes before `until_s`."""
        spacing_s = self._start_within_s / max(1, len(self._sessions))
        for number, session in enumerate(self._sessions):
            first_s = session.turns[0].start_s
            for index, turn in enumerate(session.turns):
                self._at(number * spacing_s + turn.start_s - first_s, "start", number, index)
        last_ns = 0
        ends_ns = None if until_s is None else int(until_s * NS_PER_S)
        while self._events and (ends_ns is None or self._events[0][0] < ends_ns):
            last_ns, _, what, number, index = heapq.heappop(self._events)
            self._advance(last_ns)
            if what == "start":
                self._start(last_ns, number, index)
            elif what == "first":
                self._first(last_ns, f"{number}.{index}")
            else:
                self._end(last_ns, f"{number}.{index}")
        ends_ns = last_ns + 2 * TTL_NS if ends_ns is None else ends_ns
        self._advance(ends_ns)
        self.outcome.held_token_s = self._table.held_block_ns(ends_ns) * UNIT_TOKENS / NS_PER_S
        return self.outcome

    def _at(self, time_s: float, what: str, session: int, index: int) -> None:
        event = (int(time_s * NS_PER_S), next(self._serial), what, session, index)
        heapq.heappush(self._events, event)

    def _advance(self, now_ns: int) -> None:
        """Let everything happen that is due before `now_ns`: renewals and drops, then expiries."""
        while (due_ns := self._keeper.next_due_ns()) is not None and due_ns <= now_ns:
            self._settle(due_ns)
            for command in self._keeper.due(due_ns, LOOKS_PER_CALL):
                if isinstance(command, SendRenew):
                    lost = [
                        lease_id
                        for lease_id, term_ns, chance in command.leases
                        if not self._table.renew(lease_id, due_ns, term_ns, chance)
                    ]
                    self._keeper.soft([one for one in lost if self._soft.get(one)], due_ns)
                    self._keeper.gone([one for one in lost if not self._soft.get(one)], due_ns)
                else:
                    for lease_id in command.lease_ids:
                        self._table.drop(lease_id, due_ns, command.is_over)
                        if command.is_over:
                            self._soft.forget(lease_id)
                self._settle(due_ns)
        self._settle(now_ns)

    def _settle(self, now_ns: int) -> None:
        while (due_ns := self._table.next_deadline_ns()) is not None and due_ns <= now_ns:
            self._table.advance(due_ns)
            self._free()
        self._table.advance(now_ns)
        self._free()

    def _free(self) -> None:
        for freed in self._table.take_freed():
            (contents,) = freed.blocks
            self._soft.keep(freed, (tuple(map(self._pool.proof, contents)),))
            self._pool.give_back(contents)

    def _start(self, now_ns: int, session: int, index: int) -> None:
        turn = self._sessions[session].turns[index]
        earlier = self._earlier(session, turn)
        prompt = tuple(mixed(session, unit) for unit in turn.units)
        chain = _chain(prompt)
        if earlier is not None:
            self._keeper.used(earlier.lease_id, now_ns)
            self._reuse(earlier, chain, now_ns)
        answer = tuple(-next(self._fresh) for _ in range(turn.output_tokens // UNIT_TOKENS))
        contents = prompt + answer
        holds = self._make_room(contents, now_ns)
        if holds:
            self._pool.take(contents)
        if earlier is not None:
            self._at(now_ns / NS_PER_S + turn.first_s, "first", session, index)
        self.outcome.turns += 1
        self._running[f"{session}.{index}"] = _Running(session, turn, contents, earlier, holds, chain)
        self._at(now_ns / NS_PER_S + turn.took_s, "end", session, index)

    def _earlier(self, session: int, turn: TraceTurn) -> _Past | None:
        """The turn of the session that shares most with this one, the latest of equals."""
        best, most = None, 0
        for past in reversed(self._past.get(session, [])):
            shared = _shared(past.prompt, turn.units)
            if shared > most:
                best, most = past, shared
        return best

    def _reuse(self, earlier: _Past, wanted: Chain, now_ns: int) -> None:
        lease_id = earlier.lease_id
        revived = False
        if self._table.state(lease_id) is None:
            survived = self._soft.surviving(lease_id, wanted, self._pool.unchanged)
            if survived is None or self._policy is Policy.UPSTREAM:
                return
            chain, (contents,) = survived
            self._pool.take(contents)
            self._soft.forget(lease_id)
            self._table.grant(lease_id, chain, (contents,), now_ns, self._term_ns)
            revived = True
        claim_id = f"claim {next(self._serial)}"
        answer = self._table.claim(lease_id, claim_id, wanted, "prefill", now_ns)
        if isinstance(answer, ClaimGranted):
            self.outcome.turns_reusing += 1
            self.outcome.reused_tokens += answer.matched_tokens
            self.outcome.revived_tokens += answer.matched_tokens if revived else 0
            self._table.release(claim_id, now_ns)

    def _make_room(self, contents: tuple[int, ...], now_ns: int) -> bool:
        missing = self._pool.missing(contents)
        while self._pool.room() < missing:
            victim = self._table.least_worth()
            if victim is None or not self._table.reclaim(victim, now_ns):
                self.outcome.starved += 1
                return False
            self.outcome.reclaimed += 1
            self._free()
        return True

    def _first(self, now_ns: int, key: str) -> None:
        """The answer's first byte: as the router, the turn is through with the lease that it goes on from."""
        earlier = self._running[key].earlier
        if earlier is not None:
            self._keeper.done(earlier.lease_id, now_ns)

    def _end(self, now_ns: int, key: str) -> None:
        running = self._running.pop(key)
        earlier = running.earlier
        if not running.holds:
            return
        lease_id = f"lease {key}"
        chain = _chain(running.contents)
        # The turn's own references become the lease's.
        self._table.grant(lease_id, chain, (running.contents,), now_ns, self._term_ns)
        past = self._past.setdefault(running.session, [])
        past.append(_Past(lease_id, running.contents, running.turn.units))
        del past[:-EARLIER_TURNS]
        if self._policy is Policy.UPSTREAM:
            return
        ref = LeaseRef(lease_id, "1", _ADDRESS, chain.token_count, self._term_ns // 1_000_000)
        self._keeper.filed(ref, "agents", running.turn.ending, now_ns)
        if earlier is not None and _shared(earlier.prompt, running.turn.units) == len(earlier.prompt):
            self._keeper.ended(earlier.lease_id, now_ns)


def mixed(session: int, unit: int) -> int:
    """A content id that no other session has; never negative, as answers' are."""
    return (session << 64) | (unit & _MASK)


def _shared(left: Sequence[int], right: Sequence[int]) -> int:
    length = min(len(left), len(right))
    return next((place for place in range(length) if left[place] != right[place]), length)


def _chain(contents: Sequence[int]) -> Chain:
    """A chain whose digests are made from the contents' ids: equal for equal prefixes, else not."""
    digests = b"".join(
        hash((content, part)).to_bytes(DIGEST_BYTES, "little", signed=True)
        for content in contents
        for part in range(UNIT_SEGMENTS)
    )
    return Chain(bytes(DIGEST_BYTES), digests, b"", len(contents) * UNIT_TOKENS)
