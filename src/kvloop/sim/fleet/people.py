"""The clients: conversations that come, think, come back, change their past, give up, or steal.

A client sends each turn to some router, waits, and tries again where it got an error. It knows what a model
that reads exactly its prompt would answer, and compares. A hostile one sends another tenant's history and
names under its own tenant.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

from kvloop.core.life_table import Ending
from kvloop.core.lineage import Name
from kvloop.sim.answer import STOP_TOKEN, answer_tokens
from kvloop.sim.fleet.around import Around
from kvloop.sim.fleet.chance import Chance
from kvloop.sim.fleet.filing import MODEL, Ask
from kvloop.sim.fleet.history import (
    ASSISTANT,
    SYSTEM,
    USER,
    History,
    Message,
    Talk,
    compacted,
    edited,
    prompt_of,
    prompt_tokens,
    stripped,
)
from kvloop.sim.fleet.plan import MS, Plan
from kvloop.sim.fleet.router import Reply, RouterNode
from kvloop.sim.memory import cell_size
from kvloop.sim.text import TOKEN_BYTES, Text, origin

RETRY_NS = 300 * MS
MAX_HELD = 2000  # finished conversations that others may still fork from, or steal


@dataclass(slots=True, eq=False)
class Turn:
    """A turn that a client has sent. `expected`: the answer's tokens, if nothing is wrong."""

    name: str
    tenant: str
    ask: Ask
    history: History
    seed: int
    expected: bytes
    began_ns: int
    number: int = 0  # of its conversation's
    sent: int = 0
    router: RouterNode | None = None
    has_left: bool = False


class People:
    """All clients of a run. `answered` and `refused` are told of each turn's end."""

    def __init__(
        self,
        around: Around,
        plan: Plan,
        routers: list[RouterNode],
        chance: Chance,
        tell: Callable[[str, Turn, bytes, str], None],
    ) -> None:
        self.around = around
        self.open: dict[str, Turn] = {}
        self.begun = 0
        self.turns = 0
        self.returned_tokens = 0
        self.turns_returning = 0
        self.first_token_ns = array("q")
        self.hears: Callable[[Turn, Reply], None] | None = None  # told of each turn that is answered
        self._plan = plan
        self._routers = routers
        self._chance = chance
        self._tell = tell
        self._cell_tokens = cell_size(plan.block_tokens)
        self._is_over = False
        self._thinking = 0
        self._seen: list[Talk] = []
        self._origins: dict[str, int] = {}

    def open_the_doors(self) -> None:
        """Let conversations arrive, one after the other."""
        if self._is_over or self.begun >= self._plan.conversations:
            return
        self._begin()
        self.around.loop.after(self._chance.waiting(self._plan.arrive_ms * MS), self.open_the_doors)

    def close_the_doors(self) -> None:
        """No further turn is begun; those under way are seen to their end."""
        self._is_over = True

    @property
    def alive(self) -> int:
        """Conversations that wait for an answer, or will come back."""
        return len(self.open) + self._thinking

    @property
    def are_through(self) -> bool:
        """Whether everybody has come, and nobody comes back."""
        return self.begun >= self._plan.conversations and not self.alive

    # A conversation.

    def _begin(self, parent: Talk | None = None) -> None:
        plan, chance = self._plan, self._chance
        self.begun += 1
        if parent is None:
            tenant = f"t{chance.within(1, plan.tenants)}"
            system = Message(SYSTEM, chance.within(1, 2) * 1000 + int(tenant[1:]), plan.prompt_tokens)
            history: History = (system,)
            label = f"n{self.begun}" if chance.permille(600) else ""
        else:
            tenant, history, label = parent.tenant, parent.history, parent.label
        turns = chance.within(1, plan.turns) if chance.permille(800) else 1
        talk = Talk(f"c{self.begun}", tenant, history, label, turns)
        if chance.permille(plan.hostile) and self._seen:
            victim = chance.pick(self._seen)
            talk.history, talk.label, talk.tenant = victim.history, victim.label, f"{tenant}x"
        self._next(talk)

    def _next(self, talk: Talk) -> None:
        """The next turn, on a past that may have been changed."""
        if self._is_over or not talk.turns_left:
            return
        talk.turns_left -= 1
        chance, plan = self._chance, self._plan
        if talk.served and chance.permille(plan.odd_histories):
            talk.history = self._odd(talk)
        message = Message(
            USER, chance.word(), chance.spread(max(1, plan.message_tokens // 4), plan.message_tokens)
        )
        history = (*talk.history, message)
        answer = chance.spread(max(1, plan.answer_tokens // 4), plan.answer_tokens)
        if prompt_tokens(history) + answer + 2 > plan.model_tokens:
            return
        self._send(talk, history, answer)
        if chance.permille(plan.odd_histories // 4) and not self._is_over:
            self._send(talk, history, answer)  # the same turn twice at a time: a retry, a race

    def _odd(self, talk: Talk) -> History:
        chance, history = self._chance, talk.history
        kind = chance.within(0, 6)
        place = chance.within(0, len(history) - 1)
        if kind == 0:
            return edited(history, place, chance.word())
        if kind == 1:
            return compacted(history, min(2, len(history) - 1), chance.word(), self._plan.message_tokens)
        if kind == 2:
            return stripped(history, chance.within(1, 900))
        if kind == 3 and place:
            return history[:place]
        if kind == 4 and self._seen:
            talk.label = chance.pick(self._seen).label
        if kind == 5 and len(history) > 2:
            self._begin(Talk("", talk.tenant, history[:-2], talk.label, 1))
        if kind == 6:
            return (*history[:-1], *history[-2:])
        return history

    def _send(self, talk: Talk, history: History, answer: int) -> None:
        chance = self._chance
        self.turns += 1
        data = prompt_of(history)
        text = Text(data, self._origin(talk.tenant), self._cell_tokens)
        stops = chance.permille(700)
        max_tokens = answer + chance.within(0, 1) if stops else answer
        ending = Ending.LENGTH if not stops else Ending.TOOL_CALLS if chance.permille(600) else Ending.STOP
        units = tuple([message.unit() for message in history])
        self._put(talk, history, text, units, (answer, max_tokens, ending))

    def _put(
        self,
        talk: Talk,
        history: History,
        text: Text,
        units: tuple[bytes, ...],
        answer: tuple[int, int, Ending],
        number: int = 0,
    ) -> None:
        """Send a turn. `answer`: its tokens, how many were allowed, and how it ends."""
        chance, plan = self._chance, self._plan
        tokens, max_tokens, ending = answer
        stops = ending is not Ending.LENGTH
        seed = text.seed()
        said = answer_tokens(seed, 0, tokens)
        ask = Ask(
            tenant=talk.tenant,
            salt=talk.tenant,
            units=units,
            names=(Name("conversation_id", talk.label),) if talk.label else (),
            text=text,
            max_tokens=max_tokens,
            ends_at=tokens if stops else tokens + 1,
            ending=ending,
            stream=chance.permille(500),
            smuggles=chance.permille(plan.hostile // 4),
            keep_ms=chance.pick((0, 2000, 60_000)) if chance.permille(plan.wishes) else None,
        )
        turn = Turn(
            f"{talk.name}.{self.turns}",
            talk.tenant,
            ask,
            history,
            seed,
            said[:-TOKEN_BYTES] + STOP_TOKEN if stops else said,
            self.around.loop.now_ns,
            number,
        )
        self.open[turn.name] = turn
        self._tell("asked", turn, b"", "")
        self._try(talk, turn)
        if chance.permille(plan.leaves):
            self.around.loop.after(chance.spread(1, plan.think_ms) * MS, lambda: self._leave(talk, turn))

    def _try(self, talk: Talk, turn: Turn) -> None:
        if turn.has_left:
            return
        turn.sent += 1
        router = turn.router = self._chance.pick(self._routers)
        name = f"{turn.name}~{turn.sent}"
        router.ask(name, turn.ask, lambda reply: self._hear(talk, turn, name, reply))

    def _hear(self, talk: Talk, turn: Turn, name: str, reply: Reply) -> None:
        if turn.has_left or turn.name not in self.open or name != f"{turn.name}~{turn.sent}":
            return
        if reply.data:
            self._tell("answered", turn, reply.data, reply.why)
        if reply.body:
            self._tell("delivered", turn, reply.body, "")
        if turn.ask.smuggles:
            if not reply.why:
                self._tell("smuggled", turn, b"", reply.why)
            del self.open[turn.name]
            return
        if reply.why:
            self._tell("refused", turn, reply.data, reply.why)
            self.around.loop.after(RETRY_NS, lambda: self._try(talk, turn))
            return
        del self.open[turn.name]
        if reply.turn is not None:
            returned = int(str(reply.turn["returned_tokens"]))
            self.returned_tokens += returned
            self.turns_returning += returned > 0
        if self.hears is not None:
            self.hears(turn, reply)
        if reply.first_ns:
            self.first_token_ns.append(reply.first_ns - turn.began_ns)
        self._go_on(talk, turn)

    def _go_on(self, talk: Talk, turn: Turn) -> None:
        """The answer is there: think, and come back."""
        said = len(turn.expected) // TOKEN_BYTES
        content = said - 1 if turn.expected.endswith(STOP_TOKEN) else said
        talk.history = (*turn.history, Message(ASSISTANT, turn.seed, content))
        talk.served += 1
        if len(self._seen) < MAX_HELD:
            self._seen.append(Talk(talk.name, talk.tenant, talk.history, talk.label, 0))
        longer = 1 if turn.ask.ending is Ending.TOOL_CALLS else 3
        self._think(talk, self._plan.think_ms * longer)

    def _leave(self, talk: Talk, turn: Turn) -> None:
        """Lose interest in a turn."""
        if turn.name not in self.open:
            return
        del self.open[turn.name]
        turn.has_left = True
        if turn.router is not None:
            turn.router.give_up(f"{turn.name}~{turn.sent}")
        self._gave_up(talk, turn)

    def _gave_up(self, talk: Talk, _: Turn) -> None:
        """A turn was left: something else will come."""
        self._think(talk, self._plan.think_ms)

    def _think(self, talk: Talk, mean_ms: int) -> None:
        """Come back after a while."""
        self._come_back(talk, self._chance.waiting(mean_ms * MS))

    def _come_back(self, talk: Talk, after_ns: int) -> None:
        self._thinking += 1

        def come_back() -> None:
            self._thinking -= 1
            self._next(talk)

        self.around.loop.after(after_ns, come_back)

    def _origin(self, salt: str) -> int:
        found = self._origins.get(salt)
        if found is None:
            found = self._origins[salt] = origin(MODEL, salt)
        return found
