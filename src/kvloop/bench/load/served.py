"""What an endpoint serves, by its `/v1/models`."""

import http.client
import time
import urllib.error
import urllib.request
from dataclasses import dataclass

import msgspec

from kvloop.errors import UserError

TIMEOUT_S = 30.0
MAX_BYTES = 16 * 1024 * 1024


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


@dataclass(frozen=True, slots=True)
class Served:
    """A model, and how long a prompt with its answer may be, where the endpoint says."""

    model: str
    max_tokens: int | None


def _read(answer: http.client.HTTPResponse) -> bytes:
    """The body as far as it comes in time. TimeoutError where it is a trickle."""
    data, until_s = b"", time.monotonic() + TIMEOUT_S
    while len(data) < MAX_BYTES and (more := answer.read1(MAX_BYTES - len(data))):
        data += more
        if time.monotonic() > until_s:
            raise TimeoutError(f"no end after {TIMEOUT_S:g} s")
    return data


def served(url: str, api_key: str | None, model: str | None) -> Served:
    """The model of this name that the endpoint at `url` serves, or its first. Raises `UserError`."""
    request = urllib.request.Request(url + "/v1/models")
    if api_key is not None:
        request.add_header("authorization", f"Bearer {api_key}")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            models = msgspec.json.decode(_read(answer), type=_Models).data
    except urllib.error.HTTPError as error:
        raise UserError(f"{url}/v1/models answers HTTP {error.code}") from None
    except (OSError, ValueError, http.client.HTTPException, msgspec.MsgspecError) as error:
        raise UserError(f"{url}/v1/models does not answer with models: {error}") from None
    for one in models:
        if model is None or one.id == model:
            return Served(one.id, one.max_model_len)
    names = ", ".join(one.id for one in models[:10]) or "no model"
    raise UserError(f"{url} serves {names}" + ("" if model is None else f", not {model}"))
