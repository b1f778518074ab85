"""Conversations whose texts are known: each answer that was recorded becomes a turn that asks for one.

The endpoint under test gives answers of its own, and they stand in later prompts where the recorded ones did.
Of a recorded answer only its length is used, in tokens that are estimated from its bytes. There are no times
in such recordings: a turn is due as soon as the one before it is answered.
"""

from collections.abc import Iterable, Iterator, Sequence

from kvloop.bench.workload.options import RecordingOptions
from kvloop.bench.workload.recording import Budget, Names
from kvloop.bench.workload.turns import Answer, Conversation, Message, Said, Turn, Workload
from kvloop.errors import UserError

BYTES_PER_TOKEN = 4.0
"""Rough: what common tokenizers make of English in UTF-8, and the simulated engines of anything. Other
languages and code come to fewer bytes a token."""

ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
}
"""As they are called in ShareGPT's collections and in chat APIs."""
BETWEEN_MESSAGES = "\n\n"

Conversed = Sequence[tuple[str, str]]
"""Messages: a role (as in `ROLES`, on the right) and a text."""


def estimated_tokens(text: str) -> int:
    """A text's length, roughly; at least one token for any."""
    return max(1, round(len(text.encode(errors="surrogatepass")) / BYTES_PER_TOKEN))


def workload(
    name: str, source: str, found: Sequence[tuple[str, Conversed]], options: RecordingOptions
) -> Workload:
    """Of conversations, each by its name: those that have turns, and of them as many as are wanted. UserError
    where none is left, or too much."""
    fitting = [one for one in found if next(_turns(one[1], options), None)]
    if not fitting:
        raise UserError(f"{source}: of {len(found)} conversations none has a turn{options.words()}")
    names, budget = Names(), Budget(source)
    taken = []
    for called, said in (fitting[number] for number in options.share_of(len(fitting))):
        turns = []
        for turn in _turns(said, options):
            budget.spend(len(turn.messages))
            turns.append(turn)
        taken.append(Conversation(names.distinct(called), tuple(turns)))
    words = f"{source}: {len(taken)} of {len(found)} conversations{options.words()}"
    return Workload(name, words, tuple(taken))


def _turns(said: Conversed, options: RecordingOptions) -> Iterator[Turn]:
    """What an assistant says before any user is left out, and so is what a user says last, for nobody
    answered; messages of one role in a row are one."""
    messages: list[Message] = []
    prompt = number = 0
    for role, text in _merged(said):
        if role != "assistant":
            shortened = _shortened(text, options.scale)
            messages.append(Said(role, shortened))
            prompt += estimated_tokens(shortened)
        elif any(isinstance(one, Said) and one.role == "user" for one in messages):
            if not options.fits(prompt):
                return
            answer = max(1, options.tokens(estimated_tokens(text)))
            yield Turn(tuple(messages), answer, number - 1 if number else None)
            messages.append(Answer(number))
            number += 1
            prompt += answer


def _merged(said: Iterable[tuple[str, str]]) -> Iterable[tuple[str, str]]:
    """Without two of one role in a row. A system has its say at the beginning; later, users say it, for few
    chat templates know of another."""
    before: tuple[str, list[str]] | None = None
    for who, text in said:
        role = "user" if who == "system" and before and before[0] != "system" else who
        if before and before[0] == role:
            before[1].append(text)
            continue
        if before:
            yield before[0], BETWEEN_MESSAGES.join(before[1])
        before = role, [text]
    if before:
        yield before[0], BETWEEN_MESSAGES.join(before[1])


def _shortened(text: str, scale: float) -> str:
    """Its beginning."""
    return text if scale == 1 else text[: max(1, int(len(text) / scale))]
