"""Answers of the Responses and Messages APIs as vLLM writes them, made by its own classes.

To record: `python -m tests.connector.vllm_answers`. The router's tests read the recording, so that they need
no vLLM (`tests.router.recorded`); `test_vllm_answers.py` says when another vLLM writes otherwise.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensResponse
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponse,
    ChatCompletionStreamResponse,
)
from vllm.entrypoints.openai.responses import api_router
from vllm.entrypoints.openai.responses.protocol import (
    ResponseCompletedEvent,
    ResponseCreatedEvent,
    ResponseInProgressEvent,
    ResponsesRequest,
    ResponsesResponse,
    ResponseUsage,
)
from vllm.entrypoints.openai.responses.streaming_events import SimpleStreamingEventProcessor
from vllm.sampling_params import SamplingParams

VECTORS = Path(__file__).parent.parent / "vectors" / "vllm_answers.json"
HANDLE = {"kvloop_handle": "HANDLE"}
TEXT = ("Hel", "lo")
CALL = {"id": "call_1", "index": 0, "type": "function", "function": {"name": "get_weather"}}
ARGUMENTS = '{"city":"Oslo"}'
RESPONSE_TOOL = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}, "strict": True}
USAGE = {"prompt_tokens": 100, "completion_tokens": 2, "total_tokens": 102}
_CREATED = 1790000000
_RANDOM = re.compile(r"(?<=_)[0-9a-f]{16,32}|(?<=signature\":\")[0-9a-f]{32}")


def answers() -> dict[str, Any]:
    """Every answer: JSON bodies as text, streams as lists of events."""
    made = {
        "response": _response(False, "completed", HANDLE).model_dump_json(by_alias=True),
        "response_tools": _response(True, "completed", HANDLE).model_dump_json(by_alias=True),
        "response_cut": _response(False, "incomplete", HANDLE).model_dump_json(by_alias=True),
        "response_stream": _response_events(tools=False),
        "response_stream_tools": _response_events(tools=True),
        "chat_tools": _chat(True).model_dump_json(),
        "chat_stream_tools": _chat_events(),
        "message": _message(False).model_dump_json(exclude_none=True),
        "message_tools": _message(True).model_dump_json(exclude_none=True),
        "message_stream": asyncio.run(_message_events(tools=False)),
        "message_stream_tools": asyncio.run(_message_events(tools=True)),
        "count_tokens": AnthropicCountTokensResponse(input_tokens=12).model_dump_json(exclude_none=True),
    }
    return json.loads(_RANDOM.sub("0" * 16, json.dumps(made)))  # type: ignore[no-any-return]


def _deltas(tools: bool) -> Iterator[dict[str, Any]]:
    if not tools:
        yield from ({"content": text} for text in TEXT)
        return
    yield {"tool_calls": [{**CALL, "function": {**CALL["function"], "arguments": ""}}]}  # type: ignore[dict-item]
    yield {"tool_calls": [{"index": 0, "function": {"arguments": ARGUMENTS}}]}


def _processed(tools: bool) -> tuple[list[Any], list[Any]]:
    processor = SimpleStreamingEventProcessor(tools=None)
    events: list[Any] = []
    for delta in _deltas(tools):
        message = DeltaMessage.model_validate(delta)
        state, call = processor.resolve_target_state(message)
        if processor.needs_transition(state, call):
            events += [*processor.close_current(), *processor.open(state, call)]
        events += processor.emit_delta(message, None)
    events += processor.close_current()
    return events, processor.output_items


def _response(tools: bool, status: Any, params: dict[str, Any] | None) -> Any:
    request = ResponsesRequest(
        model="tiny", input="hello", request_id="resp_1", tools=[RESPONSE_TOOL] if tools else []
    )
    usage = ResponseUsage(
        input_tokens=100,
        input_tokens_details={"cached_tokens": 80, "cache_write_tokens": 0},
        output_tokens=2,
        output_tokens_details={"reasoning_tokens": 0},
        total_tokens=102,
    )
    begun = status == "in_progress"
    return ResponsesResponse.from_request(
        request,
        SamplingParams(max_tokens=64),
        model_name="tiny",
        created_time=_CREATED,
        output=[] if begun else _processed(tools)[1],
        status=status,
        usage=None if begun else usage,
        kv_transfer_params=params,
    )


def _response_events(tools: bool) -> list[str]:
    begun = _response(tools, "in_progress", None).model_dump(mode="json", by_alias=True)
    made = [
        ResponseCreatedEvent(type="response.created", sequence_number=0, response=begun),
        ResponseInProgressEvent(type="response.in_progress", sequence_number=0, response=begun),
        *_processed(tools)[0],
        ResponseCompletedEvent(
            type="response.completed", sequence_number=0, response=_response(tools, "completed", HANDLE)
        ),
    ]

    async def numbered() -> AsyncIterator[Any]:
        for number, event in enumerate(made):
            event.sequence_number = number
            yield event

    async def gathered() -> list[str]:
        return [text async for text in api_router._convert_stream_to_sse_events(numbered())]  # type: ignore[arg-type]

    return asyncio.run(gathered())


def _chat(tools: bool, arguments: str = ARGUMENTS) -> ChatCompletionResponse:
    message: dict[str, Any] = {"role": "assistant", "content": "".join(TEXT)}
    if tools:
        message = {"role": "assistant", "content": None, "tool_calls": [_whole_call(arguments)]}
    return ChatCompletionResponse.model_validate(
        {
            "id": "chatcmpl-1",
            "created": _CREATED,
            "model": "tiny",
            "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls" if tools else "stop"}],
            "usage": USAGE,
            "kv_transfer_params": HANDLE,
        }
    )


def _message(tools: bool) -> Any:
    return message_of(_chat(tools))


def message_of(chat: ChatCompletionResponse) -> Any:
    """A chat's answer as vLLM makes an Anthropic message of it."""
    return _serving().messages_full_converter(chat)


def cut_call() -> ChatCompletionResponse:
    """A chat's answer to a forced call of which one token was asked for."""
    return _chat(True, ARGUMENTS[:1])


def _whole_call(arguments: str) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


def _serving() -> Any:
    return object.__new__(AnthropicServingMessages)


def _chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> str:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": _CREATED, "model": "tiny"}
    made = ChatCompletionStreamResponse.model_validate({**head, "choices": [choice], **more})
    return f"data: {made.model_dump_json(exclude_unset=True)}\n\n"


def _chat_events() -> list[str]:
    calls = [_chunk(delta) for delta in _deltas(tools=True)]
    first, last = _chunk({"role": "assistant", "content": ""}), _chunk({}, "tool_calls")
    return [first, *calls, last, "data: [DONE]\n\n"]


async def _message_events(tools: bool) -> list[str]:
    async def chunks() -> AsyncIterator[str]:
        yield _chunk({"role": "assistant", "content": ""}, usage=USAGE)
        for delta in _deltas(tools):
            yield _chunk(delta, usage=USAGE)
        yield _chunk({}, "tool_calls" if tools else "stop", usage=USAGE)
        yield _chunk({}, choices=[], usage=USAGE)
        yield "data: [DONE]\n\n"

    return [text async for text in _serving().message_stream_converter(chunks())]


def main() -> None:
    """Record what the installed vLLM writes."""
    VECTORS.write_text(json.dumps(answers(), indent=1) + "\n")


if __name__ == "__main__":
    main()
