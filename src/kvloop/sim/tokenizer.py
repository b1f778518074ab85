"""A tokenizer and a chat template that are no model's: four bytes of text are a token.

Token ids are the bytes themselves, as a little-endian u32. A text that is no multiple of four bytes long is
filled up with zero bytes; every message therefore begins at a token, as with a real template, and an answer
that is sent back in the history comes to the tokens that it was generated as. Its length is realistic: common
tokenizers make about one token of four bytes of English. What it does not show is how a real tokenizer merges
across the end of a completion's prompt.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvloop.sim.answer import STOP_TOKEN
from kvloop.sim.text import TOKEN_BYTES

ARGUMENT = "input"  # the one argument of a simulated tool call
_FILL = b"\0"
_ROLES = {
    "system": b"<|sy",
    "developer": b"<|de",
    "user": b"<|us",
    "assistant": b"<|as",
    "tool": b"<|to",
}
_OTHER_ROLE = b"<|__"
_TOOLS = b"<|fn"
_SHOWN_BY_CONTENT = ("role", "content", "tool_calls")


def encode(text: str) -> bytes:
    """The tokens of a text."""
    data = text.encode(errors="surrogatepass")
    return data + _FILL * (-len(data) % TOKEN_BYTES)


def encode_ids(ids: Sequence[int]) -> bytes:
    """Tokens that a client sent as numbers. OverflowError for one that is none."""
    return b"".join(number.to_bytes(TOKEN_BYTES, "little") for number in ids)


def decode(tokens: bytes) -> str:
    """The text of an answer's tokens; a stop token has none."""
    return tokens.removesuffix(STOP_TOKEN).decode()


def decode_ids(tokens: bytes) -> list[int]:
    """Tokens as numbers."""
    return [
        int.from_bytes(tokens[at : at + TOKEN_BYTES], "little") for at in range(0, len(tokens), TOKEN_BYTES)
    ]


def render_chat(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, *, asks: bool = True
) -> bytes:
    """The prompt of a conversation: tools, each message in its turn; the assistant's turn, if it `asks`."""
    parts = [_TOOLS, encode(_json(tools)), STOP_TOKEN] if tools else []
    for message in messages:
        parts += (_ROLES.get(str(message.get("role")), _OTHER_ROLE), _message(message), STOP_TOKEN)
    if asks:
        parts.append(_ROLES["assistant"])
    return b"".join(parts)


def _message(message: Mapping[str, Any]) -> bytes:
    data = encode(_content(message.get("content")))
    for call in message.get("tool_calls") or ():
        data += encode(_call(call))
    rest = {name: value for name, value in message.items() if name not in _SHOWN_BY_CONTENT and value}
    return data + encode(_json(rest)) if rest else data


def _content(content: Any) -> str:
    """A message's text; what is no text, an image say, counts by its description."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        return _json(content)
    return "".join(
        str(part["text"]) if isinstance(part, dict) and isinstance(part.get("text"), str) else _json(part)
        for part in content
    )


def _call(call: Any) -> str:
    """A tool call's tokens: those that it was generated as, where a simulated model made it."""
    try:
        arguments = msgspec.json.decode(call["function"]["arguments"])
        said = arguments[ARGUMENT]
        if isinstance(said, str) and len(arguments) == 1:
            return said
    except (KeyError, TypeError, ValueError, msgspec.MsgspecError):
        pass
    return _json(call)


def _json(value: Any) -> str:
    return msgspec.json.encode(value, order="sorted").decode()
