"""What is to be asked, wherever it comes from: conversations as trees of turns.

A turn names its whole prompt, message by message, for clients of chat APIs resend everything. Three kinds
of message say what is known of one: its text; or, for recordings that keep lengths and identities only,
stretches of text to be made up, where the same name always stands for the same text; or that it is the answer
to an earlier turn, as the endpoint gave it. A turn is due `wait_s` after the turn that it comes after was
answered, so a conversation that forks is a tree, and one that does not, a line.
"""

from dataclasses import dataclass

from kvloop.errors import UserError


@dataclass(frozen=True, slots=True)
class Said:
    """A message whose text is known."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class MadeUp:
    """A message of which only lengths and identities are known: stretches of `(name, tokens)`, in order."""

    role: str
    stretches: tuple[tuple[str, int], ...]

    @property
    def tokens(self) -> int:
        """Its length."""
        return sum(tokens for _, tokens in self.stretches)


@dataclass(frozen=True, slots=True)
class Answer:
    """The assistant's message that answered an earlier turn of the conversation, by its number."""

    turn: int


Message = Said | MadeUp | Answer


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. `after`: the number of the turn that has to be answered first, None for the conversation's
    start. `kind` is what came before it, for tables: `user`, `tool`, `fork`, `retry`, ..."""

    messages: tuple[Message, ...]
    answer_tokens: int
    after: int | None = None
    wait_s: float = 0.0
    kind: str = "user"


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns in an order in which each comes after those that it names; `start_s` counts from the workload's
    start."""

    name: str
    turns: tuple[Turn, ...]
    start_s: float = 0.0
    tenant: str = ""

    def __post_init__(self) -> None:
        """Raises `UserError` for a turn that needs an answer which is not there before it."""
        for number, turn in enumerate(self.turns):
            needed = [said.turn for said in turn.messages if isinstance(said, Answer)]
            needed += [] if turn.after is None else [turn.after]
            if any(not 0 <= other < number for other in needed):
                raise UserError(f"conversation {self.name}, turn {number}: it comes before what it needs")


@dataclass(frozen=True, slots=True)
class Workload:
    """Conversations in order of start. `name` says the kind, `source` in a line where they are from."""

    name: str
    source: str
    conversations: tuple[Conversation, ...]

    @property
    def turns(self) -> int:
        """How many requests it is."""
        return sum(len(one.turns) for one in self.conversations)


def planned_tokens(conversation: Conversation, number: int) -> int | None:
    """A prompt's length as planned, without what a chat template adds; None where texts are known and lengths
    are not."""
    total = 0
    for message in conversation.turns[number].messages:
        if isinstance(message, Said):
            return None
        total += (
            message.tokens if isinstance(message, MadeUp) else conversation.turns[message.turn].answer_tokens
        )
    return total
