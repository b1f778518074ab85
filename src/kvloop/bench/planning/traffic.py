"""The traffic that is planned for: recorded conversations, as many of them as can be played in a while.

A whole log is seldom needed: what is asked for is a share, a percentile, a mean. So conversations are taken
evenly out of the recording until playing them would take too long. They still begin at the recording's rate,
over a shorter time: fewer of a rate would be less load than there was.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec.structs import replace as replace_struct

from kvloop.bench.workload.as_recorded import to_recorded
from kvloop.bench.workload.options import RecordingOptions
from kvloop.bench.workload.read import AGENT, read_workload
from kvloop.bench.workload.said import estimated_tokens
from kvloop.bench.workload.turns import Answer, Conversation, MadeUp, Message, Said, Turn, Workload
from kvloop.errors import UserError
from kvloop.sim.fleet.recorded import RecordedSession, longest_tokens

S_PER_HOUR = 3600
TURN_US, TOKEN_US, ANSWER_TOKEN_US = 1_500, 0.25, 10
"""What simulating a turn, a token of its prompt and one of its answer takes, measured on one core."""
RUN_US = 9_000_000
QUICK_PARTS = 8  # a quick plan plays one part in so many of that
MIN_PER_HOUR, MAX_PER_HOUR = 1e-3, 1e7


@dataclass(frozen=True, slots=True)
class Asked:
    """What to read, and how much of it. `conversations` None: as many as are played in a while."""

    path: Path
    workload: str
    scale: float = 1.0
    max_prompt_tokens: int | None = None
    conversations: int | None = None
    per_hour: float | None = None
    seed: int = 1
    is_quick: bool = False


@dataclass(frozen=True, slots=True)
class Traffic:
    """Sessions to play. `recorded`: the conversations that there were, of `recorded_turns`; `per_hour`: how
    many of them begin, drawn where there is no `has_starts`. `span_s`: of the recording, from the first
    conversation's beginning to the last one's. `has_gaps`: how long people
    and tools took is recorded. `estimates_lengths`: of some texts only the bytes are known.
    """

    sessions: tuple[RecordedSession, ...]
    workload: str
    source: str
    recorded: int
    recorded_turns: int
    has_starts: bool
    has_gaps: bool
    per_hour: float
    span_s: float
    estimates_lengths: bool
    asked: Asked

    @property
    def turns(self) -> int:
        """Of all sessions."""
        return sum(len(one.turns) for one in self.sessions)

    @property
    def prompt_tokens(self) -> int:
        """Of all turns."""
        return sum(turn.prompt_tokens for one in self.sessions for turn in one.turns)

    @property
    def answer_tokens(self) -> int:
        """Of all turns."""
        return sum(turn.answer_tokens for one in self.sessions for turn in one.turns)

    @property
    def longest_tokens(self) -> int:
        """Prompt and answer of the longest turn."""
        return longest_tokens(self.sessions)

    @property
    def lasts_s(self) -> float:
        """From the first conversation's beginning to the last one's, as they are played."""
        return (len(self.sessions) - 1) / self.per_hour * S_PER_HOUR


def read_traffic(asked: Asked) -> Traffic:
    """The file's conversations, or a part of them. UserError says what cannot be."""
    if asked.workload == AGENT:
        raise UserError("a plan is made from a recording: --workload takes its format, or auto")
    if asked.per_hour is not None and not MIN_PER_HOUR <= asked.per_hour <= MAX_PER_HOUR:
        raise UserError(f"--conversations-per-hour {asked.per_hour:g} is out of range")
    options = RecordingOptions(scale=asked.scale, max_prompt_tokens=asked.max_prompt_tokens, seed=asked.seed)
    workload = read_workload(asked.workload, asked.path, options)
    taken = _taken(workload.conversations, asked)
    span_s = workload.conversations[-1].start_s
    has_starts = asked.per_hour is None and span_s > 0
    count = len(workload.conversations)
    per_hour = asked.per_hour or (S_PER_HOUR * (count - 1) / span_s if has_starts else float(count))
    sessions = to_recorded(replace(workload, conversations=tuple(taken)))
    share = len(taken) / count
    return Traffic(
        sessions=tuple(_placed(sessions, share, has_starts=has_starts)),
        workload=workload.name,
        source=workload.source,
        recorded=count,
        recorded_turns=workload.turns,
        has_starts=has_starts,
        has_gaps=any(turn.wait_s for one in workload.conversations for turn in one.turns),
        per_hour=min(per_hour, MAX_PER_HOUR),
        span_s=span_s,
        estimates_lengths=_has_texts(workload),
        asked=asked,
    )


def _taken(conversations: Sequence[Conversation], asked: Asked) -> list[Conversation]:
    """Those that are played, evenly out of all."""
    count, wanted = len(conversations), asked.conversations
    if wanted is None:
        parts = QUICK_PARTS if asked.is_quick else 1
        takes_us = sum(_takes_us(one) for one in conversations)
        wanted = max(1, int(count * RUN_US / parts / max(takes_us, 1)))
    if wanted < 1:
        raise UserError(f"--conversations {wanted} is no traffic")
    wanted = min(wanted, count)
    return [conversations[number * count // wanted] for number in range(wanted)]


def _takes_us(conversation: Conversation) -> float:
    """What simulating a conversation takes, roughly."""
    turns = conversation.turns
    prompts = sum(_length(message, turns) for turn in turns for message in turn.messages)
    answers = sum(turn.answer_tokens for turn in turns)
    return len(turns) * TURN_US + prompts * TOKEN_US + answers * ANSWER_TOKEN_US


def _length(message: Message, turns: Sequence[Turn]) -> int:
    if isinstance(message, MadeUp):
        return message.tokens
    if isinstance(message, Answer):
        return turns[message.turn].answer_tokens
    return estimated_tokens(message.text)


def _placed(
    sessions: Sequence[RecordedSession], share: float, *, has_starts: bool
) -> Iterator[RecordedSession]:
    """With their starts moved together as far as sessions were left out, or without any."""
    first_ns = min((one.start_ns or 0 for one in sessions), default=0)
    for one in sessions:
        start_ns = round(((one.start_ns or 0) - first_ns) * share) if has_starts else None
        yield replace_struct(one, start_ns=start_ns)


def _has_texts(workload: Workload) -> bool:
    messages = (said for one in workload.conversations for turn in one.turns for said in turn.messages)
    return any(isinstance(said, Said) for said in messages)
