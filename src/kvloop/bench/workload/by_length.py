"""Conversations of two turns whose second prompt has a given length: time to first token against prompt
length, with all but a little of the prompt said before.

    prompt(turn 2) = prompt(turn 1) + answer + new

Sizes take turns, so that each is asked throughout a run.
"""

from collections.abc import Sequence

from kvloop.bench.workload.turns import Answer, Conversation, MadeUp, Turn, Workload
from kvloop.core.chain import MAX_CHAIN_TOKENS
from kvloop.errors import UserError

NEW_TOKENS = 115
ANSWER_TOKENS = 16
NAME = "lengths"


def by_length(
    sizes: Sequence[int],
    conversations: int,
    answer_tokens: int = ANSWER_TOKENS,
    new_tokens: int = NEW_TOKENS,
    more: int = 0,
) -> Workload:
    """`conversations` for each of the sizes, in tokens, and `more` of the shortest. UserError for a size that
    leaves no first turn."""
    least = answer_tokens + new_tokens + 1
    for size in sizes:
        if not least <= size <= MAX_CHAIN_TOKENS:
            raise UserError(
                f"--prompt-tokens {size}: a second turn has {least} tokens or more, {new_tokens} of them new"
            )
    if not sizes or conversations < 1:
        raise UserError("--workload lengths needs --prompt-tokens, and a conversation for each")
    made = [
        _conversation(f"{size}-{number}", size, answer_tokens, new_tokens)
        for number in range(conversations)
        for size in sizes
    ]
    made += [_conversation(f"more-{number}", min(sizes), answer_tokens, new_tokens) for number in range(more)]
    words = ", ".join(map(str, sizes))
    return Workload(NAME, f"second turns of {words} tokens, {new_tokens} of them new", tuple(made))


def _conversation(name: str, size: int, answer_tokens: int, new_tokens: int) -> Conversation:
    first = MadeUp("user", ((f"{name}/first", size - answer_tokens - new_tokens),))
    new = MadeUp("user", ((f"{name}/new", new_tokens),))
    turns = (Turn((first,), answer_tokens), Turn((first, Answer(0), new), answer_tokens, after=0))
    return Conversation(name, turns)
