"""How an answer ended, read off its bytes: with a tool call, by itself, or at its length.

What comes next depends on it: after a tool call the client is a program and is back in seconds, after a stop
it may be a person, after a cut it may never be. The word is OpenAI's `finish_reason`, or Anthropic's
`stop_reason`. In a stream it stands in one event among hundreds, so each read is searched once for the only
spelling that vLLM writes; text of the model sits inside JSON strings, where the quotation marks of that
spelling are escaped. A word that is found wrongly, or not at all, spoils a statistic and nothing else.
"""

from dataclasses import dataclass

import msgspec

TOOL_CALLS = "tool_calls"
STOP = "stop"
LENGTH = "length"
ENDINGS = (TOOL_CALLS, STOP, LENGTH)


@dataclass(frozen=True, slots=True)
class Spelling:
    """How an API's streams say it: what stands before the word, and the words. Any other is a stop."""

    mark: bytes
    words: dict[bytes, str]


FINISH_REASON = Spelling(b'"finish_reason":"', {word.encode(): word for word in ENDINGS})
STOP_REASON = Spelling(b'"stop_reason":"', {b"tool_use": TOOL_CALLS, b"max_tokens": LENGTH})


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []


class _Message(msgspec.Struct):
    stop_reason: str | None = None


_ANSWER = msgspec.json.Decoder(_Answer)
_MESSAGE = msgspec.json.Decoder(_Message)


def ending_of_events(lines: bytes, spelling: Spelling = FINISH_REASON) -> str | None:
    """The last ending in whole lines of a stream, or None while it goes on."""
    found = lines.rfind(spelling.mark)
    if found < 0:
        return None
    start = found + len(spelling.mark)
    return spelling.words.get(lines[start : lines.find(b'"', start)], STOP)


def ending_of_answer(body: bytes) -> str:
    """The ending of a JSON answer's last choice; a stop where it names none, or another one."""
    try:
        choices = _ANSWER.decode(body).choices
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return STOP
    reason = choices[-1].finish_reason if choices else None
    return reason if reason in ENDINGS else STOP


def ending_of_message(body: bytes) -> str:
    """The ending of an Anthropic message, likewise."""
    try:
        reason = _MESSAGE.decode(body).stop_reason or ""
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return STOP
    return STOP_REASON.words.get(reason.encode(), STOP)
