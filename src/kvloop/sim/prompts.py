"""The tokens of each endpoint's prompt, by way of a chat: what the other APIs send is written as one first.

So does vLLM: the items of a Responses input and the blocks of Anthropic's messages become chat messages, with
calls and results in their places, and are rendered by the chat template. An answer that comes back as items
or blocks therefore has the tokens that it was generated as.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvloop.sim.body import Body
from kvloop.sim.tokenizer import encode, encode_ids, render_chat
from kvloop.wire.openai import RequestError

Message = dict[str, Any]
_CALLS = ("function_call", "custom_tool_call")
_RESULTS = ("function_call_output", "custom_tool_call_output")
_CHOICES = {"any": "required", "none": "none"}  # Anthropic's word, and a chat's
_BILLING = "x-anthropic-billing-header"  # a block of a system prompt that vLLM leaves out


def chat_prompts(body: Body) -> list[bytes]:
    """The tokens of a conversation. RequestError if there is none."""
    if not body.messages:
        raise RequestError("you must provide messages", "messages")
    return [render_chat(body.messages, body.tools)]


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
    except (OverflowError, AttributeError, TypeError):
        raise RequestError("a token id is none, or out of range", "prompt") from None
    raise RequestError("you must provide a prompt", "prompt")


def chat_of_response(body: Body) -> Body:
    """A Responses request as a chat. RequestError without an input, or for a name of an earlier one."""
    if body.previous_response_id is not None:
        message = f"Response with id '{body.previous_response_id[:200]}' not found."
        raise RequestError(message, "response_id", status=404)
    messages: list[Message] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    for item in body.input if isinstance(body.input, list) else ():
        _add_item(messages, item)
    if not body.input:
        raise RequestError("you must provide an input", "input")
    return msgspec.structs.replace(body, messages=messages, n=None)


def chat_of_message(body: Body) -> Body:
    """An Anthropic request as a chat. RequestError for one without messages, or `max_tokens`."""
    if not body.messages:
        raise RequestError("you must provide messages", "messages")
    if body.max_tokens is None:
        raise RequestError("max_tokens: field required", "max_tokens")
    messages: list[Message] = []
    system = "".join(text for text in _texts(body.system) if not text.startswith(_BILLING))
    if system:
        messages.append({"role": "system", "content": system})
    for message in body.messages:
        _add_message(messages, message)
    choice = body.tool_choice if isinstance(body.tool_choice, dict) else {}
    named = {"type": "function", "function": {"name": choice.get("name")}}
    return msgspec.structs.replace(
        body,
        messages=messages,
        tools=[_tool(tool) for tool in body.tools or ()] or None,
        tool_choice=named if choice.get("type") == "tool" else _CHOICES.get(str(choice.get("type")), "auto"),
        stop=body.stop_sequences,
        n=None,
    )


def _add_item(messages: list[Message], item: Mapping[str, Any]) -> None:
    """One item of a Responses input. A call joins the assistant's message before it, as vLLM has it."""
    kind, role = item.get("type", "message"), item.get("role")
    if kind in _CALLS:
        arguments = item.get("arguments", item.get("input"))
        function = {"name": item.get("name"), "arguments": arguments}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        _assistants(messages).setdefault("tool_calls", []).append(call)
    elif kind in _RESULTS:
        result = {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
        messages.append(result)
    elif kind == "reasoning":
        _assistants(messages, unless="reasoning")["reasoning"] = "".join(_texts(item.get("content")))
    elif role == "assistant":
        _assistants(messages, unless="content")["content"] = "".join(_texts(item.get("content")))
    elif role is not None:
        messages.append({"role": role, "content": item.get("content")})
    else:
        raise RequestError(f"Unsupported input item type: {str(kind)[:100]}", "input")


def _assistants(messages: list[Message], unless: str | None = None) -> Message:
    """The assistant's message at the end, a new one where there is none, or it has an `unless` already."""
    if not messages or messages[-1]["role"] != "assistant" or unless in messages[-1]:
        messages.append({"role": "assistant"})
    return messages[-1]


def _add_message(messages: list[Message], message: Message) -> None:
    """One of Anthropic's messages. Its tools' results come before what else it says."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(content, list):
        messages.append({"role": role, "content": content})
        return
    said: Message = {"role": role}
    parts: list[Any] = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use":
            arguments = msgspec.json.encode(block.get("input") or {}).decode()
            function = {"name": block.get("name"), "arguments": arguments}
            call = {"id": block.get("id"), "type": "function", "function": function}
            said.setdefault("tool_calls", []).append(call)
        elif kind == "tool_result" and role == "user":
            text = "\n".join(_texts(block.get("content")))
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        elif kind == "thinking":
            said["reasoning"] = said.get("reasoning", "") + str(block.get("thinking"))
        elif kind == "text":
            parts.append({"type": "text", "text": block.get("text")})
        elif kind != "redacted_thinking":
            parts.append(block)
    if parts:
        said["content"] = parts
    if role != "user" or parts:
        messages.append(said)


def _texts(content: Any) -> Sequence[str]:
    """What is text of a content: a string, or the texts among its parts."""
    if isinstance(content, str):
        return (content,)
    if not isinstance(content, list):
        return ()
    return [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]


def _tool(tool: Any) -> Any:
    if not isinstance(tool, dict):
        return tool
    function = {"name": tool.get("name"), "description": tool.get("description")}
    return {"type": "function", "function": function | {"parameters": tool.get("input_schema")}}
