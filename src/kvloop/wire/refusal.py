"""What a client is told that cannot be served: OpenAI's shape of an error, and Anthropic's.

A client library reads the shape of its own API and no other. The path says which one that is, so whatever
goes wrong on it, before or after an engine was asked, is told alike. In a stream an error is an event, which
differs three ways: a bare `data:` line; an `error` event with OpenAI's members on its top level, and with the
error object that its Python client raises for; and Anthropic's.
"""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from kvloop.errors import UserError

MODEL_NOT_FOUND = "model_not_found"
# Anthropic's names of errors, by status.
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class RequestError(UserError):
    """A request that is answered with 400 (or `status`), in its API's shape. `param` names the field."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> bytes:
    """An error in OpenAI's shape."""
    return msgspec.json.encode({"error": _error(message, kind, param, code)})


def unknown_model(model: str) -> RequestError:
    """No engine serves the model: in OpenAI's words, for clients look at the code."""
    message = f"The model `{model[:200]}` does not exist or you do not have access to it."
    return RequestError(message, "model", MODEL_NOT_FOUND, 404)


@dataclass(frozen=True, slots=True)
class Shape:
    """How an API writes errors.

    `body(status, message, param, code)` is an answer's; `event(message)` a stream's last, without the blank
    line that ends the event before it.
    """

    body: Callable[[int, str, str | None, str | None], bytes]
    event: Callable[[str], bytes]


def shape_of(path: str) -> Shape:
    """The shape that clients of this path read."""
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return ANTHROPIC
    return RESPONSES if path == "/v1/responses" else OPENAI


def _error(message: str, kind: str, param: str | None, code: str | None) -> dict[str, str | None]:
    return {"message": message, "type": kind, "param": param, "code": code}


def _openai(status: int, message: str, param: str | None, code: str | None) -> bytes:
    return error_body(message, "invalid_request_error" if status < 500 else "server_error", param, code)


def _openai_event(message: str) -> bytes:
    return b"data: " + error_body(message, "server_error") + b"\n\n"


def _responses_event(message: str) -> bytes:
    told = {"type": "error", "code": "server_error", "message": message, "param": None}
    told["error"] = _error(message, "server_error", None, None)  # type: ignore[assignment]
    return b"event: error\ndata: " + msgspec.json.encode(told) + b"\n\n"


def _anthropic(status: int, message: str, _param: str | None, _code: str | None) -> bytes:
    kind = _ANTHROPIC_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})


def _anthropic_event(message: str) -> bytes:
    return b"event: error\ndata: " + _anthropic(500, message, None, None) + b"\n\n"


OPENAI = Shape(_openai, _openai_event)
RESPONSES = Shape(_openai, _responses_event)
ANTHROPIC = Shape(_anthropic, _anthropic_event)
