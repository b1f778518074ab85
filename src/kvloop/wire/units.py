"""What a prompt consists of, unit by unit: the bytes of a message, of an input item, of a stretch of text.

A conversation is recognised by the units that its client sends again, so a unit has to be the same bytes on
every turn although the client may write it anew: a string for a Responses input is one user's item, and what
marks how far Anthropic's own cache should reach wanders from message to message and is no part of any.
Where a unit is taken for another one, the engines find out.
"""

import re
from collections.abc import Sequence

import msgspec

from kvloop.core.lineage import MAX_UNITS
from kvloop.wire.dialect import Endpoint
from kvloop.wire.members import FIRST_ITEMS, Fields, checked, decoded

PROMPT_UNIT_BYTES = 1024  # a prompt is cut finely in its first KiB, then by the KiB
_PROMPT_FINE_BYTES = 128
# What comes before the first unit in the prompt, or changes how all of them are rendered.
ROOT_FIELDS = (
    "tools",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
    "add_special_tokens",
    "mm_processor_kwargs",
    "instructions",
    "reasoning",
    "previous_input_messages",
    "thinking",
    "output_config",
)
_CACHE_MARK = b'"cache_control"'
_CACHE_VALUE = rb'"cache_control"\s*:\s*(?:\{[^{}]*\}|null)'
_CACHE_MEMBER = re.compile(rb",\s*%b|%b\s*,?" % (_CACHE_VALUE, _CACHE_VALUE))
# A block of Claude Code's system prompt that differs from request to request; vLLM leaves it out of prompts.
_BILLING = b"x-anthropic-billing-header"


def user_item(text: bytes | msgspec.Raw) -> bytes:
    """The input item that a string stands for; `text` is the string as JSON."""
    return b'{"role":"user","content":%b}' % bytes(text)


def input_items(raw: bytes | msgspec.Raw) -> list[bytes]:
    """The items of a Responses input, a JSON string or array."""
    if bytes(raw)[:1] == b'"':
        return [user_item(raw)]
    return [bytes(item) for item in decoded(raw, FIRST_ITEMS, [])]


def units_of(endpoint: Endpoint, fields: Fields) -> Sequence[bytes]:
    """A prompt's units. RequestError where messages are no array."""
    if endpoint is Endpoint.RESPONSES:
        return input_items(fields["input"])
    if endpoint is Endpoint.COMPLETIONS:
        return _stretches(bytes(fields.get("prompt", b"")))
    messages: list[msgspec.Raw] = checked(fields, "messages", FIRST_ITEMS, [])
    if endpoint is Endpoint.MESSAGES and _CACHE_MARK in bytes(fields["messages"]):
        return [_unmarked(bytes(message)) for message in messages]
    return messages


def root_of(endpoint: Endpoint, fields: Fields) -> list[bytes]:
    """What stands before the first unit, or changes all of them, as it was sent."""
    root = [bytes(fields.get(name, b"")) for name in ROOT_FIELDS]
    if endpoint is Endpoint.MESSAGES:
        root = [_unmarked(part) for part in root]
        root.append(_system(bytes(fields.get("system", b""))))
    return root


def _system(system: bytes) -> bytes:
    if _BILLING in system:
        blocks = [bytes(block) for block in decoded(system, FIRST_ITEMS, [])]
        system = b",".join([block for block in blocks if _BILLING not in block]) or system
    return _unmarked(system)


def _unmarked(unit: bytes) -> bytes:
    return _CACHE_MEMBER.sub(b"", unit) if _CACHE_MARK in unit else unit


def _stretches(prompt: bytes) -> list[bytes]:
    """Whole stretches of a prompt's bytes. A last one counts only if it is whole, for the next turn's prompt
    goes on in the middle of it.
    """
    prompt = prompt.rstrip(b'"] \t\r\n')
    ends = [*range(_PROMPT_FINE_BYTES, PROMPT_UNIT_BYTES, _PROMPT_FINE_BYTES)]
    ends += range(PROMPT_UNIT_BYTES, min(len(prompt), MAX_UNITS * PROMPT_UNIT_BYTES) + 1, PROMPT_UNIT_BYTES)
    return [prompt[start:end] for start, end in zip([0, *ends], ends, strict=False) if end <= len(prompt)]
