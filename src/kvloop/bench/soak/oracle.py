"""What a cold engine would say: the simulated model's answer, from nothing but the tokens of the prompt.

An engine's answer is a function of the memory that it read (`sim.answer`). Of the right memory that is this
one, whichever engines worked on it, whatever was read back, and wherever the answer was cut and continued; of
any other it differs from the first token on.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from kvloop.sim.answer import STOP_TOKEN, answer_tokens, natural_tokens
from kvloop.sim.body import read_body
from kvloop.sim.endpoints import ENDPOINTS
from kvloop.sim.outcome import Choice
from kvloop.sim.request import Finished, Reason
from kvloop.sim.text import TOKEN_BYTES, Text

_CELL_TOKENS = 16  # of no consequence: no memory is looked at


@dataclass(frozen=True, slots=True)
class Said:
    """An answer: its text (a call's is its argument), the tool that it calls, and how it ended."""

    text: str
    tool: str | None
    reason: str


def expected(path: str, asked: dict[str, Any]) -> Said:
    """The answer to a request, whose body has the whole history and a limit of tokens."""
    endpoint = ENDPOINTS[path]
    body = endpoint.read(read_body(msgspec.json.encode(asked)))
    seed = Text(endpoint.prompts(body)[0], 0, _CELL_TOKENS).seed()
    limit = body.limit
    assert limit is not None
    natural = limit + 1 if body.ignore_eos else natural_tokens(seed)
    data = answer_tokens(seed, 0, min(natural, limit))
    if natural <= limit:
        data = data[:-TOKEN_BYTES] + STOP_TOKEN
    choice = Choice(0, body)
    choice.take(data)
    choice.end(Finished("", Reason.STOP if natural <= limit else Reason.LENGTH, wrong=False))
    return Said(choice.text, choice.tool, str(choice.reason))
