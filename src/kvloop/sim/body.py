"""Requests as vLLM's API takes them, and what a simulated engine makes of them.

One structure holds the fields of all three endpoints that are looked at; every other field is accepted and
changes nothing. Whoever sends what cannot be answered gets vLLM's kind of answer: 400, in OpenAI's shape.
"""

from typing import Any

import msgspec

from kvloop.sim.request import Handover, Hop, Request
from kvloop.sim.text import Text, origin
from kvloop.sim.tokenizer import encode, encode_ids, render_chat
from kvloop.wire.openai import RequestError

MAX_CHOICES = 16
_HANDOVER_FIELDS = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "remote_block_ids")


class Params(msgspec.Struct):
    """`kv_transfer_params`, as the router and prefill set them."""

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    kvloop_handle: Any = None
    kvloop_incarnation: str = ""
    kvloop_retain: bool = True
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    remote_block_ids: list[list[int]] | None = None
    remote_num_tokens: int = 0
    remote_prefill_cached_tokens: int | None = None


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
    tools: list[Any] | None = None
    tool_choice: Any = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    ignore_eos: bool = False
    stop: str | list[str] | None = None
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


def chat_prompt(body: Body) -> bytes:
    """The tokens of a conversation. RequestError if there is none."""
    if not body.messages:
        raise RequestError("you must provide messages", "messages")
    return render_chat(body.messages, body.tools)


def completion_prompts(body: Body) -> list[bytes]:
    """The tokens of each prompt of a completion. RequestError if there is none."""
    prompt: Any = body.prompt
    try:
        if isinstance(prompt, str):
            return [encode(prompt)]
        if prompt and isinstance(prompt[0], int):
            return [encode_ids(prompt)]
        if prompt:
            return [encode(one) if isinstance(one, str) else encode_ids(one) for one in prompt]
    except OverflowError:
        raise RequestError("a token id is out of range", "prompt") from None
    raise RequestError("you must provide a prompt", "prompt")


def response_prompt(body: Body) -> bytes:
    """The tokens of a Responses request, rendered as the conversation that it is."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        messages += body.input or []
    if not messages:
        raise RequestError("you must provide an input", "input")
    return render_chat(messages, body.tools)


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
        hop=None if params is None else _hop(params),
        handle=None if params is None else params.kvloop_handle,
        handover=None if params is None else _handover(params, len(text)),
        retain=params is None or params.kvloop_retain,
        ends_at=limit + 1 if body.ignore_eos else None,
    )


def _hop(params: Params) -> Hop:
    if params.do_remote_decode:
        return Hop.PREFILL
    return Hop.DECODE if params.do_remote_prefill else Hop.ALONE


def _handover(params: Params, prompt_tokens: int) -> Handover | None:
    """Where to pull the prompt from; None where that is not said, or not as vLLM's prefill says it."""
    if not params.do_remote_prefill or any(getattr(params, name) is None for name in _HANDOVER_FIELDS):
        return None
    blocks = params.remote_block_ids
    if not blocks or len(blocks) != 1 or min(blocks[0], default=0) < 0:
        return None
    return Handover(
        engine_id=params.remote_engine_id or "",
        incarnation=params.kvloop_incarnation,
        request_id=params.remote_request_id or "",
        address=(params.remote_host or "", params.remote_port or 0),
        blocks=tuple(blocks[0]),
        token_count=min(params.remote_num_tokens, prompt_tokens),
        cached_tokens=params.remote_prefill_cached_tokens or 0,
    )
