"""OpenAI request and answer bodies, read and edited as bytes.

A body is decoded one level deep: every value stays the client's own bytes (`msgspec.Raw`), and only those
that the router decides by are looked at. What decode gets is what the client sent with a member spliced in
before the closing brace; what prefill gets asks for one token and nothing that costs. In answers the member
that carries decode's handle is cut out, and the cut is checked by decoding what is left: text of the model
may say anything.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from kvloop.errors import UserError
from kvloop.wire.items import FirstItems, Members, TooManyMembersError

HANDOVER_FIELD = "kv_transfer_params"
ALONE = b'{"do_remote_decode":false,"do_remote_prefill":false}'
MAX_SALT_CHARS = 128  # vLLM's own bound from 0.33 on
SALT_PREFIX = "kvloop."  # of salts that the router derives; no client may send one
_MEMBER = re.compile(rb'"kv_transfer_params"\s*:\s*')
_MEMBER_KEY = b'"kv_transfer_params"'
_SPACE = b" \t\r\n"
_OF_THIS_TURN = ("do_remote_decode", "do_remote_prefill", "kvloop_turn")
# What the prefill hop drops: it streams nothing, and what it says of its tokens would be thrown away.
_DROPPED_ON_PREFILL = (
    "stream_options",
    "min_tokens",
    "logprobs",
    "top_logprobs",
    "logprob_token_ids",
    "return_token_ids",
    "return_prompt_text",
)
Fields = dict[str, msgspec.Raw]
_Decoder = msgspec.json.Decoder[Any]  # made once: to describe a type costs more than to decode a small value
_FIELDS = Members()
_ITEMS: _Decoder = msgspec.json.Decoder(list[msgspec.Raw])
_FIRST_ITEMS = FirstItems()
_TEXT: _Decoder = msgspec.json.Decoder(str)
_TEXT_OR_NULL: _Decoder = msgspec.json.Decoder(str | None)
_BOOL_OR_NULL: _Decoder = msgspec.json.Decoder(bool | None)
_INT_OR_NULL: _Decoder = msgspec.json.Decoder(int | None)


class Endpoint(StrEnum):
    """The generation endpoints, by what their prompt is called."""

    CHAT = "messages"
    COMPLETIONS = "prompt"


class RequestError(UserError):
    """A request that is answered with 400 (or `status`), in OpenAI's shape. `param` names the field."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


@dataclass(frozen=True, slots=True)
class Generation:
    """A client's request: its bytes, its members as bytes, and what the router decides by.

    `messages`: each one's own bytes, none for a completion. `alone`: why it cannot be split between prefill
    and decode, or None.
    """

    endpoint: Endpoint
    raw: bytes
    fields: Fields
    model: str
    stream: bool
    cache_salt: str | None
    alone: str | None
    messages: Sequence[bytes] = ()

    def text(self, path: str) -> str | None:
        """The non-empty string at a member, or one level deeper (`a.b`); None where there is none."""
        outer, _, inner = path.partition(".")
        raw = self.fields.get(outer)
        if raw is not None and inner:
            raw = _decoded(raw, _FIELDS, {}).get(inner)
        value = _decoded(raw, _TEXT, None) if raw is not None else None
        return str(value) if value else None


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> bytes:
    """An error in OpenAI's shape."""
    error = {"message": message, "type": kind, "param": param, "code": code}
    return msgspec.json.encode({"error": error})


def read_generation(endpoint: Endpoint, raw: bytes) -> Generation:
    """Check what the router reads of a client's body. RequestError for what it cannot serve."""
    try:
        fields = _FIELDS.decode(raw)
    except msgspec.ValidationError:
        raise RequestError("the request body must be a JSON object") from None
    except TooManyMembersError as error:
        raise RequestError(f"the request body has {error}", code="too_many_members") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the request body is not valid JSON: {error}") from None
    except RecursionError:
        raise RequestError("the request body is nested too deeply") from None
    if HANDOVER_FIELD in fields:
        raise RequestError(
            f"{HANDOVER_FIELD} is set by the router and may not be sent",
            HANDOVER_FIELD,
            "unsupported_parameter",
        )
    model = _member(fields, "model", _TEXT_OR_NULL, None)
    if not model:
        raise RequestError("you must provide a model", "model", "missing_required_parameter")
    messages: Sequence[bytes] = ()
    if endpoint is Endpoint.CHAT:
        if "messages" not in fields:
            raise RequestError("you must provide messages", "messages", "missing_required_parameter")
        messages = _member(fields, "messages", _FIRST_ITEMS, [])
    elif "prompt" not in fields and "prompt_embeds" not in fields:
        raise RequestError("you must provide a prompt", "prompt", "missing_required_parameter")
    stream = _member(fields, "stream", _BOOL_OR_NULL, None)
    salt = _member(fields, "cache_salt", _TEXT_OR_NULL, None)
    if salt is not None and not 0 < len(salt) <= MAX_SALT_CHARS:
        raise RequestError(
            f"cache_salt must have 1 to {MAX_SALT_CHARS} characters", "cache_salt", "invalid_value"
        )
    if salt is not None and salt.startswith(SALT_PREFIX):
        raise RequestError(f"cache_salt may not start with {SALT_PREFIX!r}", "cache_salt", "invalid_value")
    return Generation(endpoint, raw, fields, model, bool(stream), salt, _alone(endpoint, fields), messages)


def prefill_body(generation: Generation, filed: bytes | None, salt: str | None) -> bytes:
    """The prefill hop: one token of the same prompt, and `filed` to read back from."""
    fields: dict[str, Any] = dict(generation.fields)
    for name in _DROPPED_ON_PREFILL:
        fields.pop(name, None)
    fields["stream"] = False
    fields["max_tokens"] = 1
    if "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = 1
    if "n" in fields:
        fields["n"] = 1
    if salt is not None:
        fields["cache_salt"] = salt
    asked = b'{"do_remote_decode":true,"do_remote_prefill":false'
    fields[HANDOVER_FIELD] = msgspec.Raw(asked + (b"," + filed[1:] if filed else b"}"))
    return msgspec.json.encode(fields)


def decode_body(generation: Generation, handover: bytes, salt: str | None) -> bytes:
    """The decode hop: the client's bytes, with the handover (and the salt, where it differs) added."""
    raw = generation.raw
    if salt is not None and salt != generation.cache_salt:
        if (
            "cache_salt" in generation.fields
        ):  # two members of one name would be read differently by different parsers
            raw = msgspec.json.encode({**generation.fields, "cache_salt": salt})
        else:
            raw = _spliced(raw, "cache_salt", msgspec.json.encode(salt))
    return _spliced(raw, HANDOVER_FIELD, handover)


def filed_handle(handle: bytes) -> bytes | None:
    """Decode's answer as prefill gets it next time, less what is of this turn only. None if nothing is."""
    fields = _decoded(handle, _FIELDS, {})
    for flag in _OF_THIS_TURN:
        fields.pop(flag, None)
    return msgspec.json.encode(fields) if fields else None


def read_prefill_answer(body: bytes) -> bytes | None:
    """The handover in prefill's answer, verbatim; None without one."""
    raw = _decoded(body, _FIELDS, {}).get(HANDOVER_FIELD)
    if raw is None or not _is_object(raw):
        return None
    return bytes(raw)


def take_handle(body: bytes) -> tuple[bytes, bytes | None]:
    """An answer without its handle, byte for byte otherwise, and the handle; a null stays where it is."""
    if _MEMBER_KEY not in body:
        return body, None
    fields = _decoded(body, _FIELDS, {})
    raw = fields.get(HANDOVER_FIELD)
    if raw is None or not _is_object(raw):
        return body, None
    return without_member(body, fields), bytes(raw)


def without_member(body: bytes, fields: Fields) -> bytes:
    """`body`, whose members are `fields`, without its top-level `kv_transfer_params`.

    The search proposes, the decoder decides: a cut counts only if every other member is left as it was.
    """
    kept = {name: bytes(raw) for name, raw in fields.items() if name != HANDOVER_FIELD}
    value = bytes(fields[HANDOVER_FIELD])
    for found in reversed(list(_MEMBER.finditer(body))):
        if not body.startswith(value, found.end()):
            continue
        head, tail = body[: found.start()].rstrip(_SPACE), body[found.end() + len(value) :]
        if head.endswith(b","):
            cut = head[:-1] + tail
        else:
            cut = body[: found.start()] + tail.lstrip(_SPACE).removeprefix(b",").lstrip(_SPACE)
        left = _decoded(cut, _FIELDS, {})
        if {name: bytes(raw) for name, raw in left.items()} == kept:
            return cut
    return msgspec.json.encode({name: msgspec.Raw(raw) for name, raw in kept.items()})


def merged_models(bodies: Iterable[bytes]) -> bytes | None:
    """The union of several `/v1/models` answers, by model id; None where none of them is one."""
    seen: dict[str, msgspec.Raw] = {}
    first: bytes | None = None
    for body in bodies:
        models = _decoded(_decoded(body, _FIELDS, {}).get("data", b""), _ITEMS, None)
        if models is None:
            continue
        first = first or body
        for model in models:
            seen.setdefault(_decoded(_decoded(model, _FIELDS, {}).get("id", b""), _TEXT, ""), model)
    if first is None:
        return None
    return msgspec.json.encode({"object": "list", "data": list(seen.values())})


def _alone(endpoint: Endpoint, fields: Fields) -> str | None:
    """Why no handover can serve this request:

    it has several prompts or answers, or looks back at its prompt.
    """
    for name in ("n", "best_of"):
        if (_member(fields, name, _INT_OR_NULL, None) or 1) > 1:
            return name
    for name in ("echo", "use_beam_search"):
        if _member(fields, name, _BOOL_OR_NULL, None):
            return name
    if _member(fields, "prompt_logprobs", _INT_OR_NULL, None) is not None:
        return "prompt_logprobs"
    if endpoint is Endpoint.COMPLETIONS:
        if "prompt_embeds" in fields:
            return "prompt_embeds"
        prompts = _decoded(fields["prompt"], _FIRST_ITEMS, [])
        if len(prompts) > 1 and bytes(prompts[0])[:1] in (b'"', b"["):
            return "prompt"
    return None


def _member(fields: Mapping[str, msgspec.Raw], name: str, kind: _Decoder | FirstItems, default: Any) -> Any:
    raw = fields.get(name)
    if raw is None:
        return default
    try:
        return kind.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"{name}: {error}", name, "invalid_type") from None


def _decoded(raw: bytes | msgspec.Raw, kind: _Decoder | FirstItems | Members, default: Any) -> Any:
    try:
        return kind.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return default


def _is_object(raw: bytes | msgspec.Raw) -> bool:
    return bytes(raw)[:1] == b"{"


def _spliced(body: bytes, name: str, value: bytes) -> bytes:
    """`body`, a JSON object with at least one member, with one more before its closing brace."""
    end = body.rindex(b"}")
    return b"".join((body[:end], b',"', name.encode(), b'":', value, body[end:]))
