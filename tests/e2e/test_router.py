"""The whole loop as a client sees it: one URL, ordinary requests, ordinary answers, and headers that say
the rest."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from kvloop.local.ports import free_ports
from kvloop.local.stack import Stack
from tests.e2e.test_histories import SEGMENT, Messages, assistant, opening, user
from tests.e2e.turns import REQUEST_TIMEOUT_S, Pair, events, salt, until


@dataclass(frozen=True)
class Answer:
    """What a client got."""

    status: int
    headers: dict[str, str]
    raw: bytes

    @property
    def route(self) -> str:
        """The route header."""
        return self.headers["x-kvloop-route"]

    @property
    def reused(self) -> int:
        """Tokens read back, as the header says."""
        return int(self.headers["x-kvloop-reused-tokens"])

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return json.loads(self.raw)  # type: ignore[no-any-return]

    @property
    def tokens(self) -> list[int]:
        """The answer's token ids, streamed or not."""
        chunks = events(self.raw) if self.raw.startswith(b"data:") else [self.body]
        return [
            token
            for chunk in chunks
            for choice in chunk["choices"]
            for token in choice.get("token_ids") or []
        ]

    @property
    def text(self) -> str:
        """The answer's text, streamed or not."""
        if self.raw.startswith(b"data:"):
            choices = [choice for event in events(self.raw) for choice in event["choices"]]
            return "".join(choice["delta"].get("content") or "" for choice in choices)
        return self.body["choices"][0]["message"]["content"] or ""


class Client:
    """Posts to one router."""

    def __init__(self, url: str) -> None:
        self.url = url

    def post(self, route: str, body: dict[str, Any], **headers: str) -> Answer:
        """Any answer, errors too."""
        named = {"content-type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
        request = urllib.request.Request(self.url + route, json.dumps(body).encode(), named)
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as answer:
                return Answer(answer.status, {k.lower(): v for k, v in answer.headers.items()}, answer.read())
        except urllib.error.HTTPError as error:
            return Answer(error.code, {k.lower(): v for k, v in error.headers.items()}, error.read())

    def chat(self, messages: Messages, fields: dict[str, Any] | None = None, **headers: str) -> Answer:
        """A greedy chat completion of 16 tokens."""
        body = {
            "model": "tiny",
            "messages": messages,
            "temperature": 0,
            "max_tokens": 16,
            "return_token_ids": True,
        }
        answer = self.post("/v1/chat/completions", body | (fields or {}), **headers)
        assert b"kvloop" not in answer.raw, "block metadata reached the client"
        return answer


@pytest.fixture(scope="module")
def client(pair_stack: Stack) -> Iterator[Client]:
    """A router in front of the pair."""
    admin_port = free_ports(1, "127.0.0.1")[0]
    flags = ("--prefill-timeout-s", "60", "--admin-port", str(admin_port), "--policy", "sticky")
    router = pair_stack.add_router("router", flags)
    yield Client(router.url)
    router.shut_down()


def grow(messages: Messages, answer: Answer, question: str) -> Messages:
    """The history after a turn, with the next question."""
    return [*messages, assistant(answer.text), user(question)]


@pytest.mark.parametrize("stream", [False, True])
def test_conversation(client: Client, pair: Pair, stream: bool) -> None:
    """Three turns with no help from the client: everything held is read back, every answer is a cold
    engine's."""
    fields = {"stream": stream} | ({"stream_options": {"include_usage": True}} if stream else {})
    messages = opening("gardens")
    answer = client.chat(messages, fields)
    assert (answer.status, answer.route, answer.reused) == (200, "recompute", 0)
    for question in ("What next?", "And after that?"):
        before = len(answer.tokens)
        messages = grow(messages, answer, question)
        answer = client.chat(messages, fields)
        assert answer.tokens == pair.oracle(messages)
        assert answer.route == "return"
        usage = events(answer.raw)[-1]["usage"] if stream else answer.body["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == answer.reused
        assert 0 < usage["prompt_tokens"] - answer.reused < 2 * SEGMENT + before


def test_forks_and_regeneration(client: Client, pair: Pair) -> None:
    """A branch and a repetition find the turn they share."""
    messages = opening("bridges")
    first = client.chat(messages)
    for question in ("Left?", "Right?"):
        branch = grow(messages, first, question)
        answer = client.chat(branch)
        assert answer.route == "return"
        assert answer.tokens == pair.oracle(branch)
    again = client.chat(messages)
    assert again.route == "return"
    assert again.tokens == first.tokens


@pytest.mark.parametrize(
    ("fields", "headers"),
    [
        ({"conversation_id": "c-1"}, {}),
        ({"session_id": "s-1"}, {}),
        ({"prompt_cache_key": "k-1"}, {}),
        ({}, {"x_conversation_id": "h-1"}),
        ({}, {"x_session_id": "h-2"}),
    ],
)
def test_an_identifier_finds_an_edited_history(
    client: Client, pair: Pair, fields: dict[str, Any], headers: dict[str, str]
) -> None:
    """Where an edit has changed every message's digest, the identifier still leads to the lease, which
    proves what
    is left."""
    messages = opening("libraries")
    client.chat(messages, fields, **headers)
    edited = [user(messages[0]["content"] + " Edited at its end."), assistant("Well."), user("Go on.")]
    answer = client.chat(edited, fields, **headers)
    assert answer.tokens == pair.oracle(edited)
    assert answer.route == "return"
    unnamed = client.chat(edited[:1])
    assert unnamed.tokens == pair.oracle(edited[:1])


def test_first_message_edited_under_the_same_identifier(client: Client, pair: Pair) -> None:
    """The identifier leads to a lease that proves nothing: recompute, and the right answer."""
    messages = opening("harbours")
    client.chat(messages, {"conversation_id": "edited"})
    edited = [user("Different. " + messages[0]["content"])]
    answer = client.chat(edited, {"conversation_id": "edited"})
    assert (answer.route, answer.reused) == ("recompute", 0)
    assert answer.tokens == pair.oracle(edited)


def test_another_tenants_content(client: Client, pair: Pair) -> None:
    """Equal messages and an equal identifier under another key reach nothing."""
    messages = opening("vaults")
    fields = {"conversation_id": "shared"}
    first = client.chat(messages, fields, authorization="Bearer a")
    messages = grow(messages, first, "And?")
    other = client.chat(messages, fields, authorization="Bearer b")
    assert (other.route, other.reused) == ("recompute", 0)
    own = client.chat(messages, fields, authorization="Bearer a")
    assert own.route == "return"
    assert own.tokens == other.tokens == pair.oracle(messages)


def test_completions(client: Client) -> None:
    """A completion's prompt that goes on from an earlier one's answer is a next turn too."""
    prompt = opening("letters")[0]["content"]
    body = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 16}
    first = client.post("/v1/completions", body)
    prompt += first.body["choices"][0]["text"] + " And then " + salt()
    second = client.post("/v1/completions", body | {"prompt": prompt})
    assert second.route == "return"
    cold = client.post("/v1/completions", body | {"prompt": prompt, "cache_salt": salt()})
    assert cold.reused == 0
    assert second.body["choices"][0]["text"] == cold.body["choices"][0]["text"]


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2, "temperature": 0.7, "seed": 3},
        {"prompt_logprobs": 1},
        {"logprobs": True, "top_logprobs": 2},
        {"seed": 7, "stop": ["never this"], "frequency_penalty": 0.1},
        {"response_format": {"type": "json_object"}, "max_tokens": 12},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}], "tool_choice": "none"},
        {"max_completion_tokens": 5, "min_tokens": 3},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_fields_survive_both_hops(client: Client, pair: Pair, fields: dict[str, Any]) -> None:
    """What vLLM knows, a client may send, and gets what the engine alone would have answered."""
    messages = opening("tables", words=30)
    answer = client.chat(messages, fields)
    assert answer.status == 200, answer.raw
    alone = Client(pair.prefill.url).chat(messages, fields | {"cache_salt": salt()})
    ours, theirs = answer.body, alone.body
    for body in (ours, theirs):
        for name in ("id", "created", "kv_transfer_params", "usage", "system_fingerprint"):
            body.pop(name, None)
    assert _rounded(ours) == _rounded(theirs)


def _rounded(value: Any) -> Any:
    """The same with log-probabilities rounded: KV computed in other chunks differs in its last bits."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 2) if isinstance(value, float) else value


def test_clients_supply_no_metadata(client: Client) -> None:
    """`kv_transfer_params` of a client is refused, by name."""
    answer = client.post(
        "/v1/chat/completions",
        {"model": "tiny", "messages": [user("Hi")], "kv_transfer_params": {"do_remote_prefill": True}},
    )
    assert answer.status == 400
    assert answer.body["error"]["param"] == "kv_transfer_params"


def test_engine_errors_keep_their_status(client: Client) -> None:
    """An engine's refusal reaches the client as the engine wrote it."""
    answer = client.post("/v1/chat/completions", {"model": "absent", "messages": [user("Hi")]})
    assert answer.status == 404
    assert "absent" in answer.body["error"]["message"]


def test_prefill_down(client: Client, pair: Pair, pair_stack: Stack) -> None:
    """Without a prefill engine decode serves alone, and the loop is whole again afterwards."""
    messages = opening("lamps")
    first = client.chat(messages)
    pair.prefill.kill()
    messages = grow(messages, first, "And?")
    alone = client.chat(messages)
    assert (alone.status, alone.route) == (200, "decode")
    pair.prefill.restart()
    messages = grow(messages, alone, "And then?")
    until(lambda: client.chat(messages).route == "return", "a probe finds prefill, and a turn returns")
    answer = client.chat(messages)
    assert (answer.route, answer.tokens) == ("return", pair.oracle(messages))
    assert pair_stack.prefill[0].running


def test_decode_restarted(client: Client, pair: Pair) -> None:
    """The handle of a decode engine that was restarted is worth nothing; the turn is answered all the
    same."""
    messages = opening("clocks")
    first = client.chat(messages)
    pair.decode.restart()
    messages = grow(messages, first, "And?")
    answer = client.chat(messages)
    assert (answer.status, answer.route) == (200, "recompute")
    assert answer.tokens == pair.oracle(messages)
    messages = grow(messages, answer, "More?")
    again = client.chat(messages)
    assert again.route == "return"
    assert again.tokens == pair.oracle(messages)


def test_official_client(client: Client) -> None:
    """OpenAI's own library works unchanged, streamed and not."""
    openai = pytest.importorskip("openai")
    messages: Any = opening("ferries", words=40)
    library = openai.OpenAI(base_url=client.url + "/v1", api_key="k")
    whole = library.chat.completions.create(model="tiny", messages=messages, max_tokens=8, temperature=0)
    stream = library.chat.completions.create(
        model="tiny", messages=messages, max_tokens=8, temperature=0, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == whole.choices[0].message.content
    assert "tiny" in [model.id for model in library.models.list()]
