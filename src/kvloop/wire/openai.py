"""OpenAI request and answer bodies, read and edited as bytes.

A body is decoded one level deep: every value stays the client's own bytes (`msgspec.Raw`), and only those
that the router decides by are looked at. What decode gets is what the client sent with a member spliced in
before the closing brace; what prefill gets asks for one token and nothing that costs. In answers the member
that carries decode's handle is cut out, and the cut is checked by decoding what is left: text of the model
may say anything.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from kvloop.wire.dialect import DIALECTS
from kvloop.wire.dialect import Endpoint as Endpoint  # whoever reads a request says of which,
from kvloop.wire.items import TooManyMembersError
from kvloop.wire.members import (
    BOOL_OR_NULL,
    FIELDS,
    FIRST_ITEMS,
    INT_OR_NULL,
    TEXT,
    TEXT_OR_NULL,
    Fields,
    checked,
    decoded,
    is_object,
    spliced,
    without_member,
)
from kvloop.wire.refusal import RequestError as RequestError  # and minds what he gets
from kvloop.wire.responses import alone_in_responses, check_response_request
from kvloop.wire.units import units_of

HANDOVER_FIELD = "kv_transfer_params"
ALONE = b'{"do_remote_decode":false,"do_remote_prefill":false}'
MAX_SALT_CHARS = 128  # vLLM's own bound from 0.33 on
SALT_PREFIX = "kvloop."  # of salts that the router derives; no client may send one
_MEMBER_KEY = b'"kv_transfer_params"'
_OF_THIS_TURN = ("do_remote_decode", "do_remote_prefill", "kvloop_turn")


class Generation(msgspec.Struct, frozen=True):
    """A client's request: its bytes, its members as bytes, and what the router decides by.

    `units`: what its prompt consists of (`wire.units`). `alone`: why it cannot be split between prefill and
    decode, or None.
    """

    endpoint: Endpoint
    raw: bytes
    fields: Fields
    model: str
    stream: bool
    cache_salt: str | None
    alone: str | None
    units: Sequence[bytes] = ()

    def text(self, path: str) -> str | None:
        """The non-empty string at a member, or one level deeper (`a.b`); None where there is none."""
        outer, _, inner = path.partition(".")
        raw = self.fields.get(outer)
        if raw is not None and inner:
            raw = decoded(raw, FIELDS, {}).get(inner)
        value = decoded(raw, TEXT, None) if raw is not None else None
        return str(value) if value else None


def read_generation(endpoint: Endpoint, raw: bytes) -> Generation:
    """Check what the router reads of a client's body. RequestError for what it cannot serve."""
    fields = fields_of(raw)
    if HANDOVER_FIELD in fields:
        raise RequestError(
            f"{HANDOVER_FIELD} is set by the router and may not be sent",
            HANDOVER_FIELD,
            "unsupported_parameter",
        )
    model = checked(fields, "model", TEXT_OR_NULL, None)
    if not model:
        raise RequestError("you must provide a model", "model", "missing_required_parameter")
    _check_prompt(endpoint, fields)
    stream = checked(fields, "stream", BOOL_OR_NULL, None)
    salt = salt_in(fields)
    alone, units = _alone(endpoint, fields), units_of(endpoint, fields)
    return Generation(endpoint, raw, fields, model, bool(stream), salt, alone, units)


def fields_of(raw: bytes) -> Fields:
    """The members of a client's body. RequestError where it is no JSON object, or too large a one."""
    try:
        return FIELDS.decode(raw)
    except msgspec.ValidationError:
        raise RequestError("the request body must be a JSON object") from None
    except TooManyMembersError as error:
        raise RequestError(f"the request body has {error}", code="too_many_members") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the request body is not valid JSON: {error}") from None
    except RecursionError:
        raise RequestError("the request body is nested too deeply") from None


def salt_in(fields: Fields) -> str | None:
    """A body's own `cache_salt`. RequestError for one that may not be."""
    salt: str | None = checked(fields, "cache_salt", TEXT_OR_NULL, None)
    if salt is not None and not 0 < len(salt) <= MAX_SALT_CHARS:
        raise RequestError(
            f"cache_salt must have 1 to {MAX_SALT_CHARS} characters", "cache_salt", "invalid_value"
        )
    if salt is not None and salt.startswith(SALT_PREFIX):
        raise RequestError(f"cache_salt may not start with {SALT_PREFIX!r}", "cache_salt", "invalid_value")
    return salt


def with_salt(raw: bytes, fields: Fields, salt: str) -> bytes:
    """`raw`, a JSON object of at least one member, under another salt than its own."""
    if "cache_salt" in fields:  # two members of one name would be read differently by different parsers
        return msgspec.json.encode({**fields, "cache_salt": salt})
    return spliced(raw, "cache_salt", msgspec.json.encode(salt))


def prefill_body(generation: Generation, filed: bytes | None, salt: str | None) -> bytes:
    """The prefill hop: one token of the same prompt, and `filed` to read back from."""
    dialect = DIALECTS[generation.endpoint]
    fields: dict[str, Any] = dict(generation.fields)
    for name in dialect.dropped:
        fields.pop(name, None)
    fields.update(dialect.always)
    fields.update({name: value for name, value in dialect.if_sent.items() if name in fields})
    if salt is not None:
        fields["cache_salt"] = salt
    asked = b'{"do_remote_decode":true,"do_remote_prefill":false'
    fields[HANDOVER_FIELD] = msgspec.Raw(asked + (b"," + filed[1:] if filed else b"}"))
    return msgspec.json.encode(fields)


def decode_body(generation: Generation, handover: bytes, salt: str | None) -> bytes:
    """The decode hop: the client's bytes, with the handover (and the salt, where it differs) added."""
    raw = generation.raw
    if salt is not None and salt != generation.cache_salt:
        raw = with_salt(raw, generation.fields, salt)
    return spliced(raw, HANDOVER_FIELD, handover)


def filed_handle(handle: bytes) -> bytes | None:
    """Decode's answer as prefill gets it next time, less what is of this turn only. None if nothing is."""
    fields = decoded(handle, FIELDS, {})
    for flag in _OF_THIS_TURN:
        fields.pop(flag, None)
    return msgspec.json.encode(fields) if fields else None


def read_prefill_answer(body: bytes) -> bytes | None:
    """The handover in prefill's answer, verbatim; None without one."""
    raw = decoded(body, FIELDS, {}).get(HANDOVER_FIELD)
    if raw is None or not is_object(raw):
        return None
    return bytes(raw)


def take_handle(body: bytes) -> tuple[bytes, bytes | None]:
    """An answer without its handle, byte for byte otherwise, and the handle; a null stays where it is."""
    if _MEMBER_KEY not in body:
        return body, None
    fields = decoded(body, FIELDS, {})
    raw = fields.get(HANDOVER_FIELD)
    if raw is None or not is_object(raw):
        return body, None
    return without_member(body, fields, HANDOVER_FIELD), bytes(raw)


def _check_prompt(endpoint: Endpoint, fields: Fields) -> None:
    name = DIALECTS[endpoint].prompt
    if name not in fields and (endpoint is not Endpoint.COMPLETIONS or "prompt_embeds" not in fields):
        article = "messages" if name == "messages" else f"{'an' if name == 'input' else 'a'} {name}"
        raise RequestError(f"you must provide {article}", name, "missing_required_parameter")
    if endpoint is Endpoint.RESPONSES:
        check_response_request(fields)


def _alone(endpoint: Endpoint, fields: Fields) -> str | None:
    """Why no handover can serve this request:

    it has several prompts or answers, looks back at its prompt, may be asked in several goes, its prompt
    depends on how many tokens are asked for, or vLLM fails over an answer of one token (it decodes the
    arguments of a message's forced call).
    """
    if endpoint is Endpoint.MESSAGES:
        choice = decoded(fields.get("tool_choice", b""), FIELDS, {})
        return "tool_choice" if decoded(choice.get("type", b""), TEXT, "") == "tool" else None
    if endpoint is Endpoint.RESPONSES:
        return alone_in_responses(fields)
    for name in ("n", "best_of"):
        if (checked(fields, name, INT_OR_NULL, None) or 1) > 1:
            return name
    for name in ("echo", "use_beam_search"):
        if checked(fields, name, BOOL_OR_NULL, None):
            return name
    if checked(fields, "prompt_logprobs", INT_OR_NULL, None) is not None:
        return "prompt_logprobs"
    if (checked(fields, "truncate_prompt_tokens", INT_OR_NULL, None) or 0) < 0:
        return "truncate_prompt_tokens"
    if endpoint is Endpoint.COMPLETIONS:
        if "prompt_embeds" in fields:
            return "prompt_embeds"
        prompts = decoded(fields["prompt"], FIRST_ITEMS, [])
        if len(prompts) > 1 and bytes(prompts[0])[:1] in (b'"', b"["):
            return "prompt"
    return None
