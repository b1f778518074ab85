"""The messages of a prompt of which only lengths are known, and how much of it an earlier one has as well.

A prompt that goes on from another one's end is that one's messages, then the answer, then what is new: its
message boundaries fall where chat clients put them, and a router that compares message by message finds what
it would have found. A prompt that leaves the earlier one in its middle (history that was edited, a fork)
keeps the messages up to there; the one that it tears ends in a new stretch. New stretches have names of their
own, so two prompts have in common what the recording says and no more.

An answer comes back whole or not at all, for nobody can say where within it a recording went another way:
there, up to one answer less is in common than was.

Users and assistants take turns, and a user has the first word and the last, as chat templates want it.
"""

from collections.abc import Sequence

from kvloop.bench.workload.turns import Answer, MadeUp, Message


def first(name: str, prompt_tokens: int, beginning: Sequence[tuple[str, int]] = ()) -> tuple[Message, ...]:
    """A prompt that goes on from none. `beginning`: stretches whose names have a meaning beyond this one."""
    known = sum(tokens for _, tokens in beginning)
    rest = ((name, prompt_tokens - known),) if prompt_tokens > known else ()
    return (MadeUp("user", (*beginning, *rest)),)


def going_on(
    before: Sequence[Message], number: int, answers: Sequence[int], shared: int, prompt_tokens: int, name: str
) -> tuple[Message, ...]:
    """A prompt that has its first `shared` tokens in common with turn `number`, whose messages are `before`,
    and with its answer. `answers`: the lengths of answers, by turn. `name`: of the new stretches."""
    messages = (*before, Answer(number))
    kept, is_torn, followed_by = _kept(messages, answers, min(shared, prompt_tokens))
    rest = prompt_tokens - _tokens(kept, answers)
    if not rest and _is_assistant(kept[-1]):
        kept, is_torn, followed_by = _kept(messages, answers, prompt_tokens - 1)
        rest = prompt_tokens - _tokens(kept, answers)
    if not rest:
        return tuple(kept)
    if kept and not is_torn and not _is_assistant(kept[-1]) and rest > 1:
        instead = min(followed_by, rest // 2)
        kept.append(MadeUp("assistant", ((f"{name}/answer", instead),)))
        rest -= instead
    new = (name, rest)
    last = kept[-1] if kept else None
    if isinstance(last, MadeUp) and not _is_assistant(last):
        kept[-1] = MadeUp("user", (*last.stretches, new))
    else:
        kept.append(MadeUp("user", (new,)))
    return tuple(kept)


def _kept(
    messages: Sequence[Message], answers: Sequence[int], shared: int
) -> tuple[list[Message], bool, int]:
    """The messages within the first `shared` tokens, whether the last is a part of one, and the length of the
    one after them."""
    kept: list[Message] = []
    for message in messages:
        length = _length(message, answers)
        if length > shared:
            if not isinstance(message, MadeUp) or not shared:
                return kept, False, length
            return [*kept, MadeUp(message.role, cut(message.stretches, shared))], True, 0
        kept.append(message)
        shared -= length
    return kept, False, 0


def cut(stretches: Sequence[tuple[str, int]], tokens: int) -> tuple[tuple[str, int], ...]:
    """Their first `tokens` tokens."""
    parts = []
    for name, length in stretches:
        if not tokens:
            break
        parts.append((name, min(length, tokens)))
        tokens -= parts[-1][1]
    return tuple(parts)


def _length(message: Message, answers: Sequence[int]) -> int:
    if isinstance(message, Answer):
        return answers[message.turn]
    assert isinstance(message, MadeUp), "what is recorded by its length has no text"
    return message.tokens


def _tokens(messages: Sequence[Message], answers: Sequence[int]) -> int:
    return sum(_length(message, answers) for message in messages)


def _is_assistant(message: Message) -> bool:
    return isinstance(message, Answer) or message.role == "assistant"
