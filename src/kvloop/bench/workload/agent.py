"""A synthetic agent's traffic: a long system prompt with tools, then turns that come back with little more.

What a turn brings is a tool's result or what a person says next; the answer before it comes back with it, and
everything that was said before. Lengths and gaps are lognormal, fitted to two published or measured
percentiles each (`distributions.py`). "Measured" is, of the 150 recorded sessions in `bench/traces`, over
8,284 requests outside of subagents; they are one product's, so what is measured is a plausible agent and no
more than that.

Everything follows from the seed, and each conversation from the seed and its own number, so that asking for
more conversations changes none of those there were.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvloop.bench.workload.distributions import Distribution, Exponential, Lognormal, Uniform
from kvloop.bench.workload.turns import Answer, Conversation, MadeUp, Message, Turn, Workload
from kvloop.core.chain import MAX_CHAIN_TOKENS
from kvloop.errors import UserError

MAX_TURNS = 2000
"""Of one conversation; the longest recorded one has some hundreds."""
MAX_CONVERSATIONS = 1_000_000


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """What is drawn, from where. `scale` divides every length; then come the caps."""

    seed: int = 0
    conversations: int = 20

    # Published: 38 turns (median of these sessions), 43 (AgentX), 33 (Codex on SWE-bench-Pro). Spread: p90
    # 138.
    turns: Distribution = field(default=Lognormal(38, 0.99, MAX_TURNS))
    # Measured: none of the 150. The share that is to have one turn only, whatever `turns` says.
    single_share: float = 0.0

    # Measured: p10 11,988, median 15,167, p90 16,051 tokens of system prompt and tools.
    system_tokens: Distribution = field(default=Lognormal(15_167, 0.1))
    # Chosen: how many different agents there are. Those who use the same one share its system prompt.
    agents: int = 2
    # Measured: what comes after a person, median 309, p90 2,675 tokens beyond the answer before it.
    user_tokens: Distribution = field(default=Lognormal(309, 1.68))
    # Measured: what comes after a tool, median 381, p90 3,545. Published: +2,242 a turn on average (Codex).
    tool_tokens: Distribution = field(default=Lognormal(381, 1.74))
    # Published: 211 output tokens (median), 444 (AgentX). Measured: p90 858.
    answer_tokens: Distribution = field(default=Lognormal(211, 1.09))
    # Measured: 85 % of the turns after the first bring a tool's result.
    tool_share: float = 0.85

    # Measured: from an answer to what a person says next, median 16 s, p90 485 s.
    think_s: Distribution = field(default=Lognormal(16, 2.66, 3600))
    # Published: gap median 5.2 s, p99 81 s (Codex on SWE-bench-Pro, whose turns are tools').
    tool_s: Distribution = field(default=Lognormal(5.2, 1.18, 3600))

    # Chosen: in 69 of 150 recorded sessions the history goes back, but not always with both lines going on.
    fork_share: float = 0.1
    # Chosen: where a fork leaves the line, as a part of its turns.
    fork_at: Distribution = field(default=Uniform(0.2, 0.8))

    # Chosen: a test of what is reused, and no agent's habit. Turns before which something said earlier is
    # changed, at its own length.
    edit_share: float = 0.0

    # Chosen: conversations begin as a Poisson process does.
    start_gap_s: Distribution = field(default=Exponential(5.0))
    tenants: int = 1

    scale: float = 1.0
    time_scale: float = 1.0
    max_prompt_tokens: int = MAX_CHAIN_TOKENS
    max_answer_tokens: int = MAX_CHAIN_TOKENS

    def __post_init__(self) -> None:
        """UserError that names what cannot be."""
        for name in ("single_share", "tool_share", "fork_share", "edit_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"agent workload: {name} is a share, from 0 to 1")
        for name in ("conversations", "agents", "tenants"):
            if not 1 <= getattr(self, name) <= MAX_CONVERSATIONS:
                raise UserError(f"agent workload: {name} is to be from 1 to {MAX_CONVERSATIONS}")
        for name, least in (("max_prompt_tokens", 2), ("max_answer_tokens", 1)):
            if not least <= getattr(self, name) <= MAX_CHAIN_TOKENS:
                raise UserError(f"agent workload: {name} is to be from {least} to {MAX_CHAIN_TOKENS}")
        if not 0.001 <= self.scale <= MAX_CHAIN_TOKENS or not 0 <= self.time_scale <= 1000:
            raise UserError("agent workload: scale or time_scale is out of range")


def made_up(options: AgentOptions) -> Workload:
    """The workload that these options describe."""
    arrivals = random.Random(f"{options.seed}/arrivals")
    start_s = 0.0
    conversations = []
    for number in range(options.conversations):
        conversations.append(_Agent(options, number, start_s * options.time_scale).conversation())
        start_s += options.start_gap_s.draw(arrivals)
    return Workload("agent", f"made up, seed {options.seed}", tuple(conversations))


class _Agent:
    """One conversation while it is drawn."""

    def __init__(self, options: AgentOptions, number: int, start_s: float) -> None:
        self._options = options
        self._name = f"agent-{number}"
        self._start_s = start_s
        self._chance = random.Random(f"{options.seed}/{self._name}")
        self._turns: list[Turn] = []
        self._prompts: list[int] = []  # tokens

    def conversation(self) -> Conversation:
        options, chance = self._options, self._chance
        tenant = f"tenant-{chance.randrange(options.tenants)}" if options.tenants > 1 else ""
        agent = chance.randrange(options.agents)
        is_single = chance.random() < options.single_share
        wanted = 1 if is_single else max(1, min(MAX_TURNS, round(options.turns.draw(chance))))
        system = self._system(agent)
        user = min(self._tokens(options.user_tokens), options.max_prompt_tokens - system.tokens)
        self._put((system, self._message(user)), None, 0.0, "user")
        self._go_on(0, wanted - 1)
        line = len(self._turns)
        if chance.random() < options.fork_share and line > 1:
            self._fork(max(1, min(line - 1, int(options.fork_at.draw(chance) * line))), line)
        return Conversation(self._name, tuple(self._turns), self._start_s, tenant)

    def _system(self, agent: int) -> MadeUp:
        name = f"agent/system-{agent}"
        drawn = self._options.system_tokens.draw(random.Random(f"{self._options.seed}/{name}"))
        most = self._options.max_prompt_tokens - 1
        return MadeUp("system", ((name, max(1, min(most, int(drawn / self._options.scale)))),))

    def _go_on(self, after: int, turns: int) -> None:
        """Up to `turns` more, each after the one before."""
        options, chance = self._options, self._chance
        for _ in range(turns):
            is_tool = chance.random() < options.tool_share
            tokens = self._tokens(options.tool_tokens if is_tool else options.user_tokens)
            wait_s = (options.tool_s if is_tool else options.think_s).draw(chance)
            before = self._turns[after]
            edits = options.edit_share > 0 and chance.random() < options.edit_share
            history = self._edited(before.messages) if edits else before.messages
            messages = (*history, Answer(after), self._message(tokens))
            if self._prompts[after] + before.answer_tokens + tokens > options.max_prompt_tokens:
                return
            self._put(messages, after, wait_s, "edit" if edits else "tool" if is_tool else "user")
            after = len(self._turns) - 1

    def _edited(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """With other words in one of the users' messages."""
        places = [place for place, one in enumerate(messages) if isinstance(one, MadeUp) and place]
        place = self._chance.choice(places)
        changed = messages[place]
        assert isinstance(changed, MadeUp)
        other = MadeUp(changed.role, ((f"{self._name}/{len(self._turns)}/edit", changed.tokens),))
        return (*messages[:place], other, *messages[place + 1 :])

    def _fork(self, at: int, line: int) -> None:
        """Another last message for turn `at`, and as many turns after it as the line has left."""
        left = self._turns[at]
        tokens = self._tokens(self._options.user_tokens)
        wait_s = self._options.think_s.draw(self._chance)
        messages = (*left.messages[:-1], self._message(tokens))
        before = at - 1  # of a line, each is after the one before
        if self._prompts[before] + self._turns[before].answer_tokens + tokens <= (
            self._options.max_prompt_tokens
        ):
            self._put(messages, before, wait_s, "fork")
            self._go_on(len(self._turns) - 1, line - at - 1)

    def _put(self, messages: tuple[Message, ...], after: int | None, wait_s: float, kind: str) -> None:
        options = self._options
        answer = min(self._tokens(options.answer_tokens), options.max_answer_tokens)
        self._prompts.append(sum(self._lengths(messages)))
        self._turns.append(Turn(messages, answer, after, wait_s * options.time_scale, kind))

    def _lengths(self, messages: tuple[Message, ...]) -> Iterator[int]:
        for message in messages:
            if isinstance(message, MadeUp):
                yield message.tokens
            elif isinstance(message, Answer):
                yield self._turns[message.turn].answer_tokens

    def _message(self, tokens: int) -> MadeUp:
        """New text. Tools' results are users' messages: few chat templates take them without a call."""
        return MadeUp("user", ((f"{self._name}/{len(self._turns)}", tokens),))

    def _tokens(self, distribution: Distribution) -> int:
        drawn = distribution.draw(self._chance) / self._options.scale
        return max(1, min(MAX_CHAIN_TOKENS, int(drawn)))
