"""Which streamed answers another engine can go on with.

Its prompt is the tokens of the first one and of what was said, so whatever depends on how they came about has
to be out of it: a parser that has to have seen the beginning, a penalty or a grammar that counts what was
said, a stop string that may lie across the seam, an image behind a placeholder. A request is followed only if
every member that it has is known here and takes no part in the seam.

With a temperature of 0 the rest is the one that the first engine would have said. A sampled answer without a
seed is gone on with, too: its rest is drawn anew, as every token of it would have been. With a seed it is
not, for how far the first engine's generator had come is not known.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from kvloop.wire.dialect import Endpoint
from kvloop.wire.members import ITEMS, Fields, decoded
from kvloop.wire.openai import Generation
from kvloop.wire.token_ids import ASKED

GREEDY_BELOW = 1e-5  # a temperature that vLLM takes for 0
SENT = frozenset(
    (
        "model",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "stop_token_ids",
        "seed",
        "include_stop_str_in_output",
        "ignore_eos",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "allowed_token_ids",
        "logit_bias",
        "priority",
        "session_id",
        "stream",
        "stream_options",
        "stream_interval",
        "cache_salt",
        "user",
    )
)
_DROPPED = frozenset(  # rendered already, counted anew, or not vLLM's
    (
        "messages",
        "prompt",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "add_special_tokens",
        "documents",
        "chat_template",
        "chat_template_kwargs",
        "reasoning_effort",
        "parallel_tool_calls",
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "conversation_id",
        "session_params",
    )
)


def why_not(generation: Generation) -> str | None:
    """The member for which an answer to this request is not gone on with, or None. What the messages hold
    is looked at only when it comes to it: see `has_media`."""
    if generation.endpoint not in (Endpoint.CHAT, Endpoint.COMPLETIONS):
        return "endpoint"
    if not generation.stream:
        return "stream"
    if generation.alone is not None and generation.alone in generation.fields:
        return generation.alone
    fields = generation.fields
    for name, raw in fields.items():
        if name not in SENT and name not in _DROPPED:
            value = value_of(raw)
            allowed = _ALLOWED.get(name)
            if not (allowed(value) if allowed is not None else _nothing(value)):
                return name
    if value_of(fields.get("tools", b"null")) and value_of(fields.get("tool_choice", b"null")) != "none":
        return "tools"
    if value_of(fields.get("seed", b"null")) is not None and not is_greedy(fields):
        return "seed"
    return None


def is_greedy(fields: Fields) -> bool:
    """Whether the same prompt has the same answer."""
    temperature = value_of(fields.get("temperature", b"null"))
    return isinstance(temperature, int | float) and temperature < GREEDY_BELOW


def has_media(generation: Generation) -> bool:
    """Whether a prompt holds anything else than text: its ids do not say what."""
    if generation.endpoint is not Endpoint.CHAT:
        return False
    for message in decoded(generation.fields["messages"], ITEMS, []):
        content = decoded(message, _MESSAGE, _UNREAD).content
        if isinstance(content, list) and any(not _is_text(part) for part in content):
            return True
    return False


def value_of(raw: bytes | msgspec.Raw) -> Any:
    """A member's value."""
    return decoded(raw, _ANY, "?")


class _Message(msgspec.Struct):
    content: Any = None


_UNREAD = _Message([None])
_MESSAGE: msgspec.json.Decoder[_Message] = msgspec.json.Decoder(_Message)
_ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


def _is_text(part: Any) -> bool:
    return isinstance(part, str) or (isinstance(part, dict) and part.get("type") in ("text", "refusal"))


def _nothing(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})


def _at_rest(value: Any) -> bool:
    return not value


def _text_format(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and value.get("type") == "text")


# What the others have to be; any that is not named here has to be nothing.
_ALLOWED: dict[str, Callable[[Any], bool]] = {
    "n": lambda value: value in (None, 1),
    "best_of": lambda value: value in (None, 1),
    "frequency_penalty": _at_rest,
    "presence_penalty": _at_rest,
    "top_logprobs": _at_rest,
    "response_format": _text_format,
    "tool_choice": lambda value: value in (None, "none", "auto"),  # with tools, only "none"
    "include_reasoning": lambda value: value in (None, True),
    "length_penalty": lambda value: value in (None, 1),
    ASKED: lambda value: value is True,
}
