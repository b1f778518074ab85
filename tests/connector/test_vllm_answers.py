"""The recording of vLLM's answers that the router's tests read is what this vLLM writes, and takes."""

import json
from typing import Any

import pytest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import construct_input_messages

from kvloop.wire.openai import Endpoint, prefill_body, read_generation
from kvloop.wire.thread import expanded, own_stretch
from tests.connector.vllm_answers import VECTORS, answers, cut_call, message_of

RECORDED = json.loads(VECTORS.read_text())


def test_recorded_answers_are_vllm_s_own() -> None:
    """Where this fails after an update, record again: `python -m tests.connector.vllm_answers`."""
    assert answers() == RECORDED


@pytest.mark.parametrize("name", ["response", "response_tools"])
def test_vllm_takes_a_conversation_that_the_router_puts_together(name: str) -> None:
    """Each item for what it was: the model is shown the user's words, its own, and what came of its calls."""
    own: list[dict[str, Any]] = [{"role": "user", "content": "more"}]
    if name == "response_tools":
        own.insert(0, {"type": "function_call_output", "call_id": "call_1", "output": "rain"})
    sent = {"model": "tiny", "previous_response_id": "resp_1", "input": own}
    request = read_generation(Endpoint.RESPONSES, json.dumps(sent).encode())
    whole = expanded(request, [own_stretch(b'"hello"', RECORDED[name].encode())])
    for body in (whole.raw, prefill_body(whole, None, None)):
        taken = ResponsesRequest.model_validate_json(body)
        messages: list[Any] = construct_input_messages(request_input=taken.input)
        assert [message["role"] for message in messages] == [
            "user",
            "assistant",
            *(["tool"] if name == "response_tools" else []),
            "user",
        ]
        assert messages[0]["content"] == "hello"
        if name == "response_tools":
            assert messages[1]["tool_calls"][0]["function"]["name"] == "get_weather"
            assert messages[2]["content"] == "rain"
        else:
            assert "Hello" in str(messages[1]["content"])


def test_vllm_fails_over_a_message_s_forced_call_of_one_token() -> None:
    """Where it does not any more, such requests need not go to decode alone (`wire.openai._alone`)."""
    with pytest.raises(json.JSONDecodeError):
        message_of(cut_call())
