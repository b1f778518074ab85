"""From recorded lengths, identities and times to conversations.

Each format comes to the same rows, `Asked`: a prompt has its first tokens in common with an earlier one's
(and that one's answer), and begins at some time. From these come messages (`messages.py`) and the order of
things: a turn comes after the one that the recording names, else after the one whose answer it has in it, and
one that leaves another in the middle, after what that came after. It waits as long as it did in the
recording, from that answer's end on.

Where a recording does not say how long an answer took, it is estimated; a wait that comes out negative is 0.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvloop.bench.workload.messages import first, going_on
from kvloop.bench.workload.options import RecordingOptions
from kvloop.bench.workload.turns import Answer, Conversation, Message, Turn, Workload
from kvloop.errors import UserError

FIRST_TOKEN_S = 2.34
TOKEN_S = 0.0163
"""Medians of the 1,016 requests in `bench/traces` for which both times are recorded."""
MAX_MESSAGES = 10_000_000
"""In all prompts of a workload, at eight bytes each where they are shared: 80 MB."""


def took_s(answer_tokens: int) -> float:
    """How long an answer of so many tokens takes, where nobody wrote it down."""
    return FIRST_TOKEN_S + answer_tokens * TOKEN_S


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. `like`: the number of the turn with which its first `shared_tokens` are in common; these
    count on through that turn's answer. `follows`: the turn whose answer it waited for, where that is known.
    `beginning`: stretches with names that hold beyond this conversation. `kind`: what it brings."""

    start_s: float
    took_s: float
    prompt_tokens: int
    answer_tokens: int
    like: int | None = None
    shared_tokens: int = 0
    follows: int | None = None
    kind: str = "user"
    beginning: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Recorded:
    """A conversation's requests in order of start."""

    name: str
    asked: Sequence[Asked]
    tenant: str = ""


def workload(name: str, source: str, found: Iterable[Recorded], options: RecordingOptions) -> Workload:
    """What was recorded, changed as `options` say. UserError where nothing is left of it, or too much."""
    fitting = []
    total = 0
    for one in found:
        total += 1
        asked = within(one.asked, options)
        if asked:
            fitting.append(Recorded(one.name, asked, one.tenant))
    if not fitting:
        raise UserError(f"{source}: of {total} conversations none is left{options.words()}")
    taken = [fitting[number] for number in options.share_of(len(fitting))]
    begin_s = min(one.asked[0].start_s for one in taken)
    names, budget = Names(), Budget(source)
    conversations = []
    for one in taken:
        line = _Line(names.distinct(one.name), one.asked, options)
        for request in one.asked:
            budget.spend(line.put(request))
        start_s = (one.asked[0].start_s - begin_s) * options.time_scale
        conversations.append(Conversation(line.name, tuple(line.turns), start_s, one.tenant))
    conversations.sort(key=lambda one: one.start_s)
    return Workload(
        name, f"{source}: {len(taken)} of {total} conversations{options.words()}", tuple(conversations)
    )


class Budget:
    """The messages that a workload may have. A history comes back with every turn, so that their number grows
    with the square of a conversation's turns, which a small file can have many of."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._left = MAX_MESSAGES

    def spend(self, messages: int) -> None:
        """So many more. UserError when there are too many."""
        self._left -= messages
        if self._left < 0:
            raise UserError(f"{self._source}: more than {MAX_MESSAGES} messages; take fewer conversations")


class Names:
    """Makes names differ: texts are made up by them."""

    def __init__(self) -> None:
        self._taken: dict[str, int] = {}

    def distinct(self, name: str) -> str:
        """`name`, or where that was given before, `name` with a number."""
        own = name
        while own in self._taken:
            self._taken[name] += 1
            own = f"{name}#{self._taken[name]}"
        self._taken[own] = 1
        return own


def within(asked: Sequence[Asked], options: RecordingOptions) -> Sequence[Asked]:
    """The turns before the first whose prompt is too long."""
    for number, one in enumerate(asked):
        if not options.fits(options.tokens(one.prompt_tokens)):
            return asked[:number]
    return asked


class _Line:
    """A conversation while its turns are put in."""

    def __init__(self, name: str, recorded: Sequence[Asked], options: RecordingOptions) -> None:
        self.name = name
        self._recorded = recorded
        self._options = options
        self.turns: list[Turn] = []
        self._prompts: list[int] = []
        self._answers: list[int] = []
        self._gone_on: set[int] = set()  # turns whose answer is in a later prompt

    def put(self, asked: Asked) -> int:
        """Add a turn. How many messages it has."""
        number = len(self.turns)
        prompt, messages = self._messages(asked, number)
        after = self._after(asked, messages)
        wait_s = self._wait_s(asked, after) * self._options.time_scale
        kind = self._kind(asked, messages)
        self._prompts.append(prompt)
        self._answers.append(max(1, self._options.tokens(asked.answer_tokens)))
        self.turns.append(Turn(messages, self._answers[-1], after, wait_s, kind))
        return len(messages)

    def _messages(self, asked: Asked, number: int) -> tuple[int, tuple[Message, ...]]:
        """The prompt's length, and it."""
        prompt = self._options.tokens(asked.prompt_tokens)
        name = f"{self.name}/{number}"
        like = asked.like
        if like is None:
            return prompt, first(name, prompt, self._beginning(asked))
        before = self._recorded[like]
        to_answer = before.prompt_tokens + before.answer_tokens
        shared = self._options.tokens(asked.shared_tokens)
        if to_answer <= asked.shared_tokens and to_answer < asked.prompt_tokens:
            shared = self._prompts[like] + self._answers[like]
            prompt = max(prompt, shared + 1)  # what is new stays, however short it is when scaled
        elif asked.shared_tokens >= before.prompt_tokens:
            shared = self._prompts[like]
        return prompt, going_on(self.turns[like].messages, like, self._answers, shared, prompt, name)

    def _beginning(self, asked: Asked) -> tuple[tuple[str, int], ...]:
        """Its named stretches, scaled by where they begin and end."""
        stretches, end, scaled_end = [], 0, 0
        for name, tokens in asked.beginning:
            end += tokens
            scaled = self._options.tokens(end) - scaled_end
            if scaled:
                stretches.append((name, scaled))
            scaled_end += scaled
        return tuple(stretches)

    def _after(self, asked: Asked, messages: Sequence[Message]) -> int | None:
        """The turn that it comes after: one by whose end every answer in `messages` is there."""
        needed = next((one.turn for one in reversed(messages) if isinstance(one, Answer)), None)
        if asked.follows is not None and self._has(asked.follows, needed):
            return asked.follows
        if asked.like is None or needed == asked.like:
            return needed
        like_after = self.turns[asked.like].after
        return like_after if self._has(like_after, needed) else needed

    def _has(self, turn: int | None, needed: int | None) -> bool:
        """Whether `needed` is answered when `turn` is."""
        if needed is None:
            return True
        while turn is not None and turn > needed:
            turn = self.turns[turn].after
        return turn == needed

    def _wait_s(self, asked: Asked, after: int | None) -> float:
        before = self._recorded[after or 0]
        end_s = before.start_s + (0.0 if after is None else before.took_s)
        return max(0.0, asked.start_s - end_s)

    def _kind(self, asked: Asked, messages: Sequence[Message]) -> str:
        if asked.like is None:
            return asked.kind
        before = self.turns[asked.like].messages
        if len(messages) == len(before) and messages == before:
            return "retry"
        if messages[: len(before)] != before:
            return "edit"
        kind = "fork" if asked.like in self._gone_on else asked.kind
        self._gone_on.add(asked.like)
        return kind
