"""What engines say they serve: `/v1/models`, whose list has base models and LoRA adapters alike."""

import re
from collections.abc import Iterable

import msgspec

from kvloop.core.lineage import MAX_UNITS
from kvloop.wire.members import FIELDS, FIRST_ITEMS, INT, ITEMS, TEXT, decoded

MAX_MODELS = MAX_UNITS - 1  # of one engine; a list that is longer is not read to its end
FORM_SEARCH_BYTES, FORM_TAIL_BYTES = 1 << 20, 1 << 16  # before the file, or after it
# A form's part of that name. What stands between its first line and its value is bounded, for a body may
# consist of such first lines.
_FORM_MODEL = re.compile(rb'name="?model"?\r\n(?:[^\r\n]{1,200}\r\n){0,4}\r\n([^\r\n]{1,512})\r\n--')


def merged_models(bodies: Iterable[bytes]) -> bytes | None:
    """The union of several answers, by model id; None where none of them is one."""
    seen: dict[str, msgspec.Raw] = {}
    is_listing = False
    for body in bodies:
        models = decoded(decoded(body, FIELDS, {}).get("data", b""), ITEMS, None)
        if models is None:
            continue
        is_listing = True
        for model in models:
            seen.setdefault(_id(model), model)
    return msgspec.json.encode({"object": "list", "data": list(seen.values())}) if is_listing else None


def listed_models(body: bytes) -> frozenset[str] | None:
    """The ids in an answer; None where it is no list, or too long a one."""
    models = decoded(decoded(body, FIELDS, {}).get("data", b""), FIRST_ITEMS, None)
    if models is None or len(models) > MAX_MODELS:
        return None
    return frozenset(_id(model) for model in models)


def model_lengths(body: bytes) -> dict[str, int]:
    """How many tokens a prompt and its answer may have together, by model id; an adapter's is its model's."""
    models = [
        decoded(model, FIELDS, {})
        for model in decoded(decoded(body, FIELDS, {}).get("data", b""), FIRST_ITEMS, [])[:MAX_MODELS]
    ]
    lengths: dict[str, int] = {}
    for name in ("id", "parent"):  # adapters after the models that they are of
        for model in models:
            length = decoded(model.get("max_model_len", b""), INT, None)
            if name == "parent" and length is None:
                length = lengths.get(decoded(model.get("parent", b""), TEXT, ""))
            if length is not None:
                lengths.setdefault(decoded(model.get("id", b""), TEXT, ""), length)
    return lengths


def one_model(bodies: Iterable[bytes], model: str) -> bytes | None:
    """An engine's own entry for a model."""
    for body in bodies:
        for entry in decoded(decoded(body, FIELDS, {}).get("data", b""), FIRST_ITEMS, []):
            if _id(entry) == model:
                return bytes(entry)
    return None


def model_asked_for(content_type: bytes, body: bytes) -> str | None:
    """The model that a request of any route names, in JSON or in a form; None where none can be found."""
    if content_type.lower().startswith(b"multipart/form-data"):
        tail = max(FORM_SEARCH_BYTES, len(body) - FORM_TAIL_BYTES)
        found = _FORM_MODEL.search(body, 0, FORM_SEARCH_BYTES) or _FORM_MODEL.search(body, tail)
        return None if found is None else found[1].decode("utf-8", "replace")
    return decoded(decoded(body, FIELDS, {}).get("model", b""), TEXT, None)  # type: ignore[no-any-return]


def _id(model: bytes | msgspec.Raw) -> str:
    return str(decoded(decoded(model, FIELDS, {}).get("id", b""), TEXT, ""))
