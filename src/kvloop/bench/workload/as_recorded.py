"""Any workload in the types of the fleet simulation, so that it can be played there.

The simulation knows prompts as rows of blocks with names: two prompts of a session have in common what their
rows begin with. So each prompt is laid out as stretches, whole blocks are named by what they hold and what
was before them, and a run of blocks within one stretch is one step. Message boundaries, which a chat template
makes tokens of, are left out. Sessions share nothing there: what conversations have in common is lost.

Texts that are known count as their estimated tokens. A turn's end is estimated where the order of a
conversation's branches depends on it.
"""

from collections.abc import Iterator

from kvloop.bench.workload.recording import took_s
from kvloop.bench.workload.said import estimated_tokens
from kvloop.bench.workload.turns import Answer, Conversation, MadeUp, Message, Workload
from kvloop.core.chain import MAX_CHAIN_TOKENS
from kvloop.core.life_table import Ending
from kvloop.errors import UserError
from kvloop.sim.fleet.recorded import BLOCK_TOKENS, NS_PER_S, RecordedSession, RecordedTurn

MAX_NAMES = 1 << 32
Stretch = tuple[str, int]
Piece = tuple[str, int, int]  # of a block: stretch, where it begins in it, tokens


def to_recorded(workload: Workload) -> list[RecordedSession]:
    """Its conversations as recorded sessions, with their starts where these differ. UserError for a prompt
    that no engine holds."""
    has_starts = any(one.start_s for one in workload.conversations)
    return [
        RecordedSession(one.name, tuple(_turns(one)), round(one.start_s * NS_PER_S) if has_starts else None)
        for one in workload.conversations
    ]


def _turns(conversation: Conversation) -> Iterator[RecordedTurn]:
    names = _Names()
    starts_s, ends_s = _times(conversation)
    order = sorted(range(len(conversation.turns)), key=lambda number: starts_s[number])
    brings_tools = {turn.after for turn in conversation.turns if turn.kind == "tool"}
    before: int | None = None
    for number in order:
        turn = conversation.turns[number]
        stretches = [_stretch(message, conversation) for message in turn.messages]
        tokens = sum(length for stretch in stretches for _, length in stretch)
        if not 0 < tokens <= MAX_CHAIN_TOKENS:
            raise UserError(f"conversation {conversation.name}: no engine holds a prompt of {tokens} tokens")
        after_s, overlaps = 0.0, False
        if before is not None:
            after_s = turn.wait_s if turn.after == before else starts_s[number] - ends_s[before]
            overlaps = after_s < 0
            if overlaps:
                after_s = starts_s[number] - starts_s[before]
        runs = tuple(names.runs(stretch for message in stretches for stretch in message))
        ending = Ending.TOOL_CALLS if number in brings_tools else Ending.STOP
        yield RecordedTurn(tokens, turn.answer_tokens, ending, runs, round(after_s * NS_PER_S), overlaps)
        before = number


def _times(conversation: Conversation) -> tuple[list[float], list[float]]:
    """When each turn begins and when it is answered, from the conversation's start."""
    starts_s: list[float] = []
    ends_s: list[float] = []
    for turn in conversation.turns:
        starts_s.append(turn.wait_s + (0.0 if turn.after is None else ends_s[turn.after]))
        ends_s.append(starts_s[-1] + took_s(turn.answer_tokens))
    return starts_s, ends_s


def _stretch(message: Message, conversation: Conversation) -> tuple[Stretch, ...]:
    """A message as stretches, by names of one kind each."""
    if isinstance(message, MadeUp):
        return tuple((f"made up {name}", tokens) for name, tokens in message.stretches if tokens)
    if isinstance(message, Answer):
        return ((f"answer {message.turn}", conversation.turns[message.turn].answer_tokens),)
    return ((f"said {message.text}", estimated_tokens(message.text)),)


class _Names:
    """The names of a session's blocks: a block is what it holds, behind what it follows."""

    def __init__(self) -> None:
        self._next = 1
        self._runs: dict[tuple[int, str, int], tuple[int, int]] = {}
        self._mixed: dict[tuple[int, tuple[Piece, ...]], int] = {}

    def runs(self, stretches: Iterator[Stretch]) -> list[tuple[int, int]]:
        """The whole blocks of a prompt."""
        runs: list[tuple[int, int]] = []
        before, pieces, filled = 0, [], 0  # the block before, and what the one that is being filled holds
        for name, length in stretches:
            at = 0
            while at < length:
                if not filled and length - at >= BLOCK_TOKENS:
                    blocks = (length - at) // BLOCK_TOKENS
                    runs += self._within(before, name, at, blocks)
                    before = runs[-1][0] + runs[-1][1] - 1
                    at += blocks * BLOCK_TOKENS
                    continue
                taken = min(length - at, BLOCK_TOKENS - filled)
                pieces.append((name, at, taken))
                at, filled = at + taken, filled + taken
                if filled == BLOCK_TOKENS:
                    before = self._of(before, tuple(pieces))
                    runs.append((before, 1))
                    pieces, filled = [], 0
        return runs

    def _within(self, before: int, name: str, at: int, blocks: int) -> Iterator[tuple[int, int]]:
        """Blocks in a row that one stretch fills."""
        while blocks:
            first, known = self._runs.get((before, name, at), (0, 0))
            if not known:
                first, known = self._new(blocks), blocks
                self._runs[before, name, at] = first, known
            taken = min(known, blocks)
            yield first, taken
            before, at, blocks = first + taken - 1, at + taken * BLOCK_TOKENS, blocks - taken

    def _of(self, before: int, pieces: tuple[Piece, ...]) -> int:
        if (before, pieces) not in self._mixed:
            self._mixed[before, pieces] = self._new(1)
        return self._mixed[before, pieces]

    def _new(self, blocks: int) -> int:
        first = self._next
        self._next += blocks
        if self._next > MAX_NAMES:
            raise UserError("a conversation has more blocks than have names")
        return first
