"""Requests as vLLM's API takes them, and what a simulated engine makes of them.

One structure holds the fields of all endpoints that are looked at; every other field is accepted and changes
nothing. Whoever sends what cannot be answered gets vLLM's kind of answer: 400, in the shape of his API.
"""

from typing import Any

import msgspec

from kvloop.sim.request import Request
from kvloop.sim.text import Text, origin
from kvloop.sim.transfer_params import Params, handover_of, hop_of
from kvloop.wire.openai import RequestError

MAX_CHOICES = 16


class StreamOptions(msgspec.Struct):
    """What a stream says besides its text."""

    include_usage: bool = False


class Body(msgspec.Struct):
    """What is looked at of a request."""

    model: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt: str | list[int | str | list[int]] | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    ignore_eos: bool = False
    stop: str | list[str] | None = None
    stop_sequences: list[str] | None = None
    n: int | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    kv_transfer_params: Params | None = None

    @property
    def stop_strings(self) -> list[str]:
        """Texts that end the answer."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in stop if text]

    @property
    def limit(self) -> int | None:
        """The most tokens that the client wants."""
        for limit in (self.max_completion_tokens, self.max_output_tokens, self.max_tokens):
            if limit is not None:
                return limit
        return None

    @property
    def choices(self) -> int:
        """How many answers to each prompt. RequestError for none, or too many."""
        choices = 1 if self.n is None else self.n
        if not 1 <= choices <= MAX_CHOICES:
            raise RequestError(f"n must be from 1 to {MAX_CHOICES}", "n")
        return choices

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the count of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


_DECODER = msgspec.json.Decoder(Body)


def read_body(raw: bytes) -> Body:
    """The request. RequestError for what is none."""
    try:
        return _DECODER.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the request body is not valid: {error}") from None


def make_request(
    body: Body, request_id: str, prompt: bytes, model: str, cell_tokens: int, model_tokens: int
) -> Request:
    """What the engine is asked for. RequestError where prompt and answer are longer than the model takes."""
    salt = body.cache_salt or ""
    text = Text(prompt, origin(model, salt), cell_tokens)
    room = model_tokens - len(text)
    limit = room if body.limit is None else body.limit
    if not len(text) or limit < 1 or limit > room:
        raise RequestError(
            f"this model's maximum context length is {model_tokens} tokens, and the request has {len(text)} "
            f"in its prompt and asks for {limit}"
        )
    params = body.kv_transfer_params
    return Request(
        request_id=request_id,
        text=text,
        max_tokens=limit,
        salt=salt,
        hop=None if params is None else hop_of(params),
        handle=None if params is None else params.kvloop_handle,
        handover=None if params is None else handover_of(params, len(text)),
        retain=params is None or params.kvloop_retain,
        ends_at=limit + 1 if body.ignore_eos else None,
    )
