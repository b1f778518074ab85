"""The four generation endpoints, and what differs between them, as a table.

All of them take a prompt, ask for a number of tokens and carry `kv_transfer_params`, in the request as in the
answer. What the prompt is called, how one token is asked for, and what of the rest a prefill hop has no use
for, is each API's own.
"""

from dataclasses import dataclass
from enum import StrEnum


class Endpoint(StrEnum):
    """The generation endpoints. A value is part of every key that a conversation is found under."""

    CHAT = "messages"
    COMPLETIONS = "prompt"
    RESPONSES = "input"
    MESSAGES = "anthropic"


@dataclass(frozen=True, slots=True)
class Dialect:
    """One endpoint's words.

    `prompt` is the member that brings the prompt. On the prefill hop `always` says what members are set to,
    `if_sent` what those are set to that the client has sent, and `dropped` what is left out: what streams,
    stores or describes an answer that nobody sees.
    """

    prompt: str
    always: dict[str, bool | int]
    if_sent: dict[str, bool | int]
    dropped: tuple[str, ...]


_CHAT = Dialect(
    "messages",
    {"stream": False, "max_tokens": 1},
    {"max_completion_tokens": 1, "n": 1},
    (
        "stream_options",
        "min_tokens",
        "logprobs",
        "top_logprobs",
        "logprob_token_ids",
        "return_token_ids",
        "return_prompt_text",
    ),
)
DIALECTS = {
    Endpoint.CHAT: _CHAT,
    Endpoint.COMPLETIONS: Dialect("prompt", _CHAT.always, _CHAT.if_sent, _CHAT.dropped),
    Endpoint.RESPONSES: Dialect(
        "input",
        {"stream": False, "store": False, "max_output_tokens": 1},
        {},
        ("stream_options", "background", "include", "top_logprobs", "enable_response_messages"),
    ),
    Endpoint.MESSAGES: Dialect("messages", {"stream": False, "max_tokens": 1}, {}, ()),
}
