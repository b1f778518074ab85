"""The Responses API: what is refused of a request, how an answer ended, and its stream.

vLLM writes each event as two lines and a blank one, and puts the whole response into three of them:

    event: response.completed
    data: {"response":{...,"kv_transfer_params":{...},...},"sequence_number":9,"type":"response.completed"}

The handle thus sits one level deeper than in a chat's stream, in the last event only; in the first two the
field is null. The type is `response.completed` although the response may be incomplete: its status says so.
"""

from kvloop.wire.ending import LENGTH, STOP, TOOL_CALLS
from kvloop.wire.members import BOOL_OR_NULL, FIELDS, FIRST_ITEMS, TEXT, Fields, checked, decoded
from kvloop.wire.refusal import RequestError

TOOL_ITEMS = ("function_call", "custom_tool_call")  # calls that the client has to answer
# Tools that an engine may run itself: it then asks its model several times, with one hand-over.
_ENGINE_TOOLS = ("web_search_preview", "code_interpreter", "container", "mcp")


def check_response_request(fields: Fields) -> None:
    """RequestError for what only a server that runs and keeps responses by itself could serve."""
    raw = bytes(fields["input"])
    if raw[:1] not in (b'"', b"["):
        raise RequestError("input: expected a string or an array", "input", "invalid_type")
    if checked(fields, "background", BOOL_OR_NULL, None):
        message = "background: responses are not run in the background here; stream them, or wait"
        raise RequestError(message, "background", "unsupported_parameter")
    if bytes(fields.get("conversation", b"null")) != b"null":
        message = "conversation: send previous_response_id, or the whole input"
        raise RequestError(message, "conversation", "unsupported_parameter")


def alone_in_responses(fields: Fields) -> str | None:
    """Why prefill and decode cannot share a response: see `openai._alone`."""
    if decoded(fields.get("truncation", b""), TEXT, "disabled") != "disabled":
        return "truncation"
    for tool in decoded(fields.get("tools", b""), FIRST_ITEMS, []):
        if decoded(decoded(tool, FIELDS, {}).get("type", b""), TEXT, "") in _ENGINE_TOOLS:
            return "tools"
    return None


def ending_of_response(response: Fields) -> str:
    """How a response ended, by its members."""
    if decoded(response.get("status", b""), TEXT, "") == "incomplete":
        return LENGTH
    for item in decoded(response.get("output", b""), FIRST_ITEMS, []):
        if decoded(decoded(item, FIELDS, {}).get("type", b""), TEXT, "") in TOOL_ITEMS:
            return TOOL_CALLS
    return STOP
