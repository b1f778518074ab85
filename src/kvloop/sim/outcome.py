"""An answer as it grows: text out of tokens, tool calls out of text, and where a stop string cuts it.

Which of its tools a simulated model calls, and whether it does, is decided by its answer's first token; so it
is as repeatable as the answer.
"""

import zlib
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kvloop.sim.body import Body
from kvloop.sim.request import Finished, Reason
from kvloop.sim.text import TOKEN_BYTES
from kvloop.sim.tokenizer import ARGUMENT, decode, decode_ids

_CALLS_OF_FOUR = 3  # with tools at hand, three answers in four are calls


@dataclass(slots=True)
class Usage:
    """Tokens of a request: in its prompt, of these not computed, and in its answer."""

    prompt: int
    answer: int = 0
    cached: int = 0

    def shown(self) -> dict[str, Any]:
        """As the chat and completion APIs show it."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.answer,
            "total_tokens": self.prompt + self.answer,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


@dataclass(slots=True)
class Choice:
    """One answer. `tool`: the name of the function that it calls, None for text. `matched`: the stop string
    that ended it.
    """

    index: int
    body: Body
    text: str = ""
    tool: str | None = None
    token_ids: list[int] = field(default_factory=list)
    reason: str | None = None
    matched: str | None = None
    finished: Finished | None = None
    argument_end: ClassVar[str] = '"}'
    _sent: int = 0

    def take(self, data: bytes) -> str:
        """Take in new tokens; what they add to the text. At a stop string the answer ends."""
        if self.reason is not None:
            return ""
        if not self.text and not self.token_ids:
            self.tool = _tool_called(self.body, data)
        if self.body.return_token_ids:
            self.token_ids += decode_ids(data)
        self.text += decode(data)
        if self.tool is None:
            for stop in self.body.stop_strings:
                cut = self.text.find(stop, max(0, self._sent - len(stop) + 1))
                if cut >= 0:
                    self.text, self.reason, self.matched = self.text[:cut], Reason.STOP, stop
        news = self.text[self._sent :] if len(self.text) > self._sent else ""
        self._sent = max(self._sent, len(self.text))
        return news

    def end(self, finished: Finished) -> None:
        """The engine has ended the answer."""
        self.finished = finished
        if self.reason is None:
            calls = self.tool is not None and finished.reason is Reason.STOP
            self.reason = "tool_calls" if calls else str(finished.reason)

    @property
    def arguments(self) -> str:
        """The call's arguments, as JSON."""
        return f'{{"{ARGUMENT}":"{self.text}{self.argument_end}'

    def argument_news(self, news: str) -> str:
        """What new text adds to the arguments, which `argument_end` will close."""
        return self.arguments.removesuffix(self.argument_end) if self.is_begun_by(news) else news

    def is_begun_by(self, news: str) -> bool:
        """Whether all of the text is new."""
        return len(news) == len(self.text)


def answer_count(data: bytes) -> int:
    """How many tokens these are."""
    return len(data) // TOKEN_BYTES


def _tool_called(body: Body, first: bytes) -> str | None:
    if not body.tools or body.tool_choice == "none":
        return None
    drawn = zlib.crc32(first[:TOKEN_BYTES])
    forced = body.tool_choice == "required" or isinstance(body.tool_choice, dict)
    if not forced and drawn % 4 >= _CALLS_OF_FOUR:
        return None
    chosen = body.tool_choice if isinstance(body.tool_choice, dict) else body.tools[drawn % len(body.tools)]
    function = chosen.get("function", chosen) if isinstance(chosen, dict) else {}
    return str(function.get("name", "tool"))
