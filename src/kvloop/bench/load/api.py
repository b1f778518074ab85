"""Requests and answers of the two APIs that a benchmark speaks: what is sent, and what its events say.

An answer is read as a client would, with nothing kept but what a record needs. Of an event only the members
named here are decoded. A stream's event that carries no token (a role, a finish, usage) is not a token's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec


class Api(StrEnum):
    """Which of an endpoint's APIs is asked."""

    CHAT = "chat"
    COMPLETIONS = "completions"

    @property
    def path(self) -> str:
        """Where it is, below the endpoint's base."""
        return "/chat/completions" if self is Api.CHAT else "/completions"


@dataclass(frozen=True, slots=True)
class Style:
    """How requests are made. `fields` go into every body. `exact_lengths`: answers go on to their planned
    length, past an end of sequence, which is vLLM's `ignore_eos`."""

    api: Api = Api.CHAT
    stream: bool = True
    exact_lengths: bool = True
    fields: Mapping[str, Any] = field(default_factory=dict)


def body_of(style: Style, model: str, prompt: Sequence[tuple[str, str]], answer_tokens: int) -> bytes:
    """A request for an answer of `answer_tokens`; the prompt is `(role, text)`, first to last."""
    body: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": answer_tokens}
    if style.api is Api.CHAT:
        body["messages"] = [{"role": role, "content": text} for role, text in prompt]
    else:
        body["prompt"] = "".join(text for _, text in prompt)
    if style.exact_lengths:
        body |= {"ignore_eos": True, "min_tokens": answer_tokens}
    if style.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return msgspec.json.encode(body | dict(style.fields))


class _Words(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw(b"")

    def text(self) -> str:
        said = self.reasoning or self.reasoning_content or ""
        called = bytes(self.tool_calls).decode("utf-8", "replace")
        return said + (self.content or "") + ("" if called in ("null", "[]") else called)


class _Choice(msgspec.Struct):
    delta: _Words | None = None
    message: _Words | None = None
    text: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Tokens as the endpoint counted them."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Of the prompt, those that were not computed; None where the endpoint does not say."""
        return None if self.prompt_tokens_details is None else self.prompt_tokens_details.cached_tokens


class Event(msgspec.Struct):
    """An event of a stream, or a whole answer."""

    choices: list[_Choice] = []
    usage: Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"")

    @property
    def text(self) -> str:
        """What it adds to the answer, reasoning and tool calls included; nothing for one without a token."""
        if not self.choices:
            return ""
        choice = self.choices[0]
        words = choice.delta or choice.message
        return (choice.text or "") if words is None else words.text()


_decoder = msgspec.json.Decoder(Event)


def event_of(data: bytes) -> Event:
    """Decode one. Raises `msgspec.MsgspecError`."""
    return _decoder.decode(data)
