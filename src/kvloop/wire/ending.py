"""How an answer ended, read off its bytes: with a tool call, by itself, or at its length.

What comes next depends on it: after a tool call the client is a program and is back in seconds, after a stop
it may be a person, after a cut it may never be. The word is vLLM's `finish_reason`. In a stream it stands in
one event among hundreds, so each read is searched once for the only spelling that vLLM writes; text of the
model sits inside JSON strings, where the quotation marks of that spelling are escaped. A word that is found
wrongly, or not at all, spoils a statistic and nothing else.
"""

import msgspec

TOOL_CALLS = "tool_calls"
STOP = "stop"
LENGTH = "length"
ENDINGS = (TOOL_CALLS, STOP, LENGTH)
_MARK = b'"finish_reason":"'
_SPELLINGS = {word.encode(): word for word in ENDINGS}


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []


_ANSWER = msgspec.json.Decoder(_Answer)


def ending_of_events(lines: bytes) -> str | None:
    """The last ending in whole lines of a stream, or None while it goes on. Any unknown word is a stop."""
    found = lines.rfind(_MARK)
    if found < 0:
        return None
    start = found + len(_MARK)
    return _SPELLINGS.get(lines[start : lines.find(b'"', start)], STOP)


def ending_of_answer(body: bytes) -> str:
    """The ending of a JSON answer's last choice; a stop where it names none, or another one."""
    try:
        choices = _ANSWER.decode(body).choices
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return STOP
    reason = choices[-1].finish_reason if choices else None
    return reason if reason in ENDINGS else STOP
