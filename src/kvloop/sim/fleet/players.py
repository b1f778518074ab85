"""Clients that play recorded sessions: as many turns, as long, as far apart, with the same blocks.

The seed draws who begins when, whose he is, and what the format does not have. A turn begins as long after
the one before it ended here as it did in the recording. Answers are the simulated model's own, of the
recorded length; what they contained was not recorded, so they do not come back in later prompts.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from kvloop.sim.fleet.around import Around
from kvloop.sim.fleet.chance import Chance
from kvloop.sim.fleet.history import Talk
from kvloop.sim.fleet.people import MAX_HELD, People, Turn
from kvloop.sim.fleet.plan import Plan
from kvloop.sim.fleet.recorded import BLOCK_TOKENS, RecordedSession, RecordedTurn, longest_tokens
from kvloop.sim.fleet.router import RouterNode
from kvloop.sim.text import TOKEN_BYTES, Text

STRETCH_BLOCKS = 8  # a unit of the router's lineage, 512 tokens: prompts have no messages here
UNIT_BYTES = 16
SPARE_TOKENS = 64
LEAST_BLOCK_TOKENS = 512


@dataclass(slots=True, eq=False)
class _Played:
    """A session that is played: `content` decides what blocks hold; the last prompt's blocks, and text."""

    session: RecordedSession
    content: int
    blocks: "array[int]" = field(default_factory=lambda: array("I"))
    text: Text | None = None


class Players(People):
    """All clients of a run."""

    def __init__(
        self,
        around: Around,
        plan: Plan,
        routers: list[RouterNode],
        chance: Chance,
        tell: Callable[[str, Turn, bytes, str], None],
        sessions: Sequence[RecordedSession],
    ) -> None:
        super().__init__(around, plan, routers, chance, tell)
        self._sessions = sessions
        self._ahead: list[RecordedSession] = []
        self._played: dict[str, _Played] = {}
        self._begun: list[tuple[str, _Played]] = []

    def open_the_doors(self) -> None:
        """Let conversations come when they did in the recording, or where that is not known as plans say."""
        if any(session.start_ns is None for session in self._sessions):
            super().open_the_doors()
            return
        starts = [(session.start_ns or 0, place) for place, session in enumerate(self._sessions)]
        starts.sort()
        self._ahead = [self._sessions[place] for _, place in reversed(starts)]
        for start_ns, _ in starts:
            self.around.loop.after(start_ns, self._begin)

    def _begin(self, _: Talk | None = None) -> None:
        """The next of the sessions, in an order that is drawn anew when all have been played."""
        plan, chance = self._plan, self._chance
        self.begun += 1
        if not self._ahead:
            left = list(self._sessions)
            while left:
                self._ahead.append(left.pop(chance.within(0, len(left) - 1)))
        played = _Played(self._ahead.pop(), self.begun)
        tenant = f"t{chance.within(1, plan.tenants)}"
        label = f"n{self.begun}" if chance.permille(600) else ""
        if chance.permille(plan.hostile) and self._begun:
            label, victim = chance.pick(self._begun)
            played, tenant = _Played(victim.session, victim.content), f"{tenant}x"
        talk = Talk(f"c{self.begun}", tenant, (), label, len(played.session.turns))
        if len(self._begun) < MAX_HELD:
            self._begun.append((label, _Played(played.session, played.content)))
        self._played[talk.name] = played
        self._next(talk)

    def _next(self, talk: Talk) -> None:
        """The next turn as it was recorded."""
        if self._is_over or not talk.turns_left:
            return
        played = self._played[talk.name]
        turns = played.session.turns
        number = len(turns) - talk.turns_left
        talk.turns_left -= 1
        turn, seed = turns[number], played.content
        self.turns += 1
        text = played.text = self._text(talk, played, turn, number)
        units = tuple(units_of(seed, played.blocks))
        if talk.turns_left and turns[number + 1].overlaps:
            self._come_back(talk, turns[number + 1].after_ns)
        answer = turn.answer_tokens
        self._put(talk, (), text, units, (answer, answer, turn.ending), number)

    def _text(self, talk: Talk, played: _Played, turn: RecordedTurn, number: int) -> Text:
        """The prompt: what it shares with the one before is not computed again."""
        blocks, shared = turn.blocks(), 0
        if played.text is None:
            text = Text(b"", self._origin(talk.tenant), self._cell_tokens)
        else:
            shared = _shared(played.blocks, blocks)
            text = played.text.prefix(shared * BLOCK_TOKENS)
        text.append(b"".join([content_of(played.content, block) for block in blocks[shared:]]))
        rest = turn.prompt_tokens - len(blocks) * BLOCK_TOKENS
        text.append(_drawn(b"rest %d %d" % (played.content, number), rest))
        played.blocks = blocks
        return text

    def _go_on(self, talk: Talk, turn: Turn) -> None:
        talk.served += 1
        self._gave_up(talk, turn)

    def _gave_up(self, talk: Talk, turn: Turn) -> None:
        """The turn after this one is due, unless it has begun."""
        turns = self._played[talk.name].session.turns
        after = turn.number + 1
        if after < len(turns) and not turns[after].overlaps:
            self._come_back(talk, turns[after].after_ns)
        elif not talk.turns_left:
            self._played[talk.name].text = None  # nobody asks for it any more


def fitted(plan: Plan, sessions: Sequence[RecordedSession]) -> Plan:
    """A drawn plan for full-sized sessions: engines that hold the longest, times that suit minutes."""
    longest = longest_tokens(sessions) + SPARE_TOKENS
    block_tokens = max(LEAST_BLOCK_TOKENS, 16 * plan.block_tokens)
    needed, drawn = -(-longest // block_tokens), -(-plan.model_tokens // plan.block_tokens)
    return replace(
        plan,
        block_tokens=block_tokens,
        prefill_blocks=needed * max(1, plan.prefill_blocks // drawn),
        decode_blocks=needed * max(1, plan.decode_blocks // drawn),
        batch_tokens=max(8192, 8 * plan.batch_tokens),
        token_us=max(1, plan.token_us // 100),
        block_us=max(1, plan.block_us // 4),
        bulk_steps=64,
        lease_term_ms=16 * plan.lease_term_ms,
        lease_ttl_ms=16 * plan.lease_ttl_ms,
        renew_ms=16 * plan.renew_ms,
        claim_timeout_ms=5 * plan.claim_timeout_ms,
        claim_term_ms=5 * plan.claim_term_ms,
        claim_margin_ms=5 * plan.claim_margin_ms,
        think_ms=20 * plan.think_ms,
        arrive_ms=20 * plan.arrive_ms,
        crash_ms=20 * plan.crash_ms,
        stop_ms=20 * plan.stop_ms,
        cut_ms=20 * plan.cut_ms,
        router_crash_ms=20 * plan.router_crash_ms,
        wall_step_ms=20 * plan.wall_step_ms,
        reset_ms=20 * plan.reset_ms,
        safety_ms=60 * plan.safety_ms,
        settle_ms=5 * plan.settle_ms,
        calm_ms=5 * plan.calm_ms,
        model_tokens=longest,
    )


def content_of(content: int, block: int) -> bytes:
    """What a block of a session holds: the same name, the same tokens."""
    return _drawn(b"block %d %d" % (content, block), BLOCK_TOKENS)


def units_of(content: int, blocks: "array[int]") -> Iterator[bytes]:
    """What a router knows a prompt by: whole stretches. The last block may be a message's end, which goes on
    otherwise the next time: it stays out."""
    for start in range(0, max(1, (len(blocks) - 1) // STRETCH_BLOCKS * STRETCH_BLOCKS), STRETCH_BLOCKS):
        named = content.to_bytes(8) + blocks[start : start + STRETCH_BLOCKS].tobytes()
        yield hashlib.blake2b(named, digest_size=UNIT_BYTES).digest()


def _drawn(what: bytes, tokens: int) -> bytes:
    return hashlib.shake_128(what).digest(TOKEN_BYTES * tokens)


def _shared(left: "array[int]", right: "array[int]") -> int:
    length = min(len(left), len(right))
    if left[:length] == right[:length]:
        return length
    return next(place for place in range(length) if left[place] != right[place])
