"""A fake vLLM that speaks in tokens: what it says after a prompt depends on the prompt's ids and no more.

Its tokens are the bytes of a text, some of them two or three at a time, so that a character may take several
and its text is held back until it is whole, as vLLM's detokenizer does. A continuation is right only if the
prompt's ids are those of the prompt and of what was said, for it looks up where it stands by them.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.router.fake_engine import Answer, Asked, json_answer, stream_answer

TEXT = 'Grüße, "世界"! 👩‍👩‍👧 says: \\n{"token_ids":[1,2]}, data: [DONE]\n\nand 🎉🎉 ends.'
PROMPT_IDS = [101, 7, 2**30, 0, 55]
EOS = 99_999
HANDLE = b'data: {"object":"kvloop.handle","choices":[],"kv_transfer_params":{"kvloop_handle":"h1"}}\n\n'


def tokens_of(text: str, width: int = 3) -> list[tuple[int, bytes]]:
    """A text's tokens, each its id and its bytes: cut every `width` bytes, wherever that is."""
    raw = text.encode()
    pieces = [raw[start : start + width] for start in range(0, len(raw), width)]
    return [(1000 + place, piece) for place, piece in enumerate(pieces)]


@dataclass
class Speaker:
    """What is said: `text` after `PROMPT_IDS`, so many bytes an id, and so many ids an event."""

    text: str = TEXT
    several: int = 1
    width: int = 3

    def events(self, after: int = 0, *, chat: bool, ids: bool, usage: bool, most: int) -> list[bytes]:
        """The stream after the first so many tokens, `[DONE]` and handle included."""
        tokens = tokens_of(self.text, self.width)
        left = [*tokens[after:], (EOS, b"")]
        finish = "stop"
        if len(left) > most:
            left, finish = left[:most], "length"
        prompt = [*PROMPT_IDS, *[one for one, _ in tokens[:after]]]
        out = []
        if chat:
            role = chunk(True, {"delta": {"role": "assistant", "content": ""}}, None, None, False)
            out.append(with_prompt(role, prompt if ids else None))
        held = b""
        groups = [left[start : start + self.several] for start in range(0, len(left), self.several)]
        for number, group in enumerate(groups):
            text = ""
            for one, piece in group:
                more, held = whole_text(held + piece, last=number == len(groups) - 1 and one == group[-1][0])
                text += more
            said: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
            named = [one for one, _ in group] if ids else None
            event = chunk(chat, said, finish if number == len(groups) - 1 else None, named, True)
            if not chat:
                event["choices"][0]["prompt_token_ids"] = prompt if ids and not number else None
                event["choices"][0]["token_ids"] = event["choices"][0].pop("token_ids")
            out.append(event)
        if usage:
            counts = {"prompt_tokens": len(prompt), "total_tokens": len(prompt) + len(left)}
            head = {name: value for name, value in out[-1].items() if name != "choices"}
            out.append({**head, "choices": [], "usage": {**counts, "completion_tokens": len(left)}})
        return [*[dumped(event) for event in out], HANDLE, b"data: [DONE]\n\n"]

    def answer(self, asked: Asked) -> list[bytes]:
        """The events that a request gets."""
        body = asked.body
        chat = "messages" in body
        after = 0
        if isinstance(body.get("prompt"), list):
            known = [*PROMPT_IDS, *[one for one, _ in tokens_of(self.text, self.width)]]
            after = len(body["prompt"]) - len(PROMPT_IDS)
            assert body["prompt"] == known[: len(body["prompt"])], "no such prompt"
        most = body.get("max_tokens") or (10_000 if chat else 16)
        options = body.get("stream_options") or {}
        return self.events(
            after,
            chat=chat,
            ids=bool(body.get("return_token_ids")),
            usage=bool(options.get("include_usage")),
            most=most,
        )

    def plan(self) -> Callable[[Asked], Answer]:
        """One that lives."""
        return lambda asked: stream_answer(*self.answer(asked))

    def dies(self, at: int) -> Callable[[Asked], Answer]:
        """One that breaks off after so many bytes."""
        return lambda asked: stream_answer(b"".join(self.answer(asked))[:at], None)


def pieces_of(data: bytes, size: int) -> list[bytes]:
    """Bytes in pieces."""
    return [data[start : start + size] for start in range(0, len(data), size)]


def chunk(
    chat: bool, said: dict[str, Any], finish: str | None, ids: list[int] | None, has_ids: bool
) -> dict[str, Any]:
    """A chunk as vLLM 0.32 has it."""
    choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish}
    if not chat or finish is not None:
        choice["stop_reason"] = None
    if not chat:
        choice["prompt_token_ids"] = None
    if has_ids:
        choice["token_ids"] = ids
    kind = ("chatcmpl-1", "chat.completion.chunk") if chat else ("cmpl-1", "text_completion")
    return {"id": kind[0], "object": kind[1], "created": 1, "model": "tiny", "choices": [choice]}


def with_prompt(event: dict[str, Any], prompt: list[int] | None) -> dict[str, Any]:
    """The first chunk of a chat."""
    return {**event, "prompt_token_ids": prompt, "prompt_text": None}


def whole_text(held: bytes, *, last: bool) -> tuple[str, bytes]:
    """What of it is whole characters, and what is held back: all of it, if it does not end with one."""
    try:
        return held.decode(), b""
    except UnicodeDecodeError:
        return (held.decode(errors="replace"), b"") if last else ("", held)


def dumped(event: dict[str, Any]) -> bytes:
    """As pydantic writes it."""
    return b"data: " + json.dumps(event, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


def refuses(_: Asked) -> Answer:
    """An engine that has no room."""
    return json_answer(b'{"error":{"message":"busy","code":503}}', 503)


@dataclass
class Read:
    """A stream as a client understands it."""

    text: str
    ids: list[int]
    finish: str | None
    usage: dict[str, int] | None
    errors: int
    done: bool
    roles: int
    heads: set[str]


def read(body: bytes) -> Read:
    """What a client understands of a stream's bytes. Everything after an error, or the end, is too much."""
    got = Read("", [], None, None, 0, False, 0, set())
    for block in body.split(b"\n\n"):
        data = b"".join(line[5:].strip() for line in block.split(b"\n") if line.startswith(b"data:"))
        if not data:
            continue
        assert not got.errors, "something after the error"
        assert not got.done, "something after the end"
        if data == b"[DONE]":
            got.done = True
            continue
        event = json.loads(data)
        if "error" in event:
            got.errors += 1
            continue
        got.heads.add(json.dumps([event[name] for name in ("id", "object", "created", "model")]))
        got.usage = event.get("usage") or got.usage
        for choice in event["choices"]:
            assert got.finish is None, "something after the finish"
            delta = choice.get("delta") or {"content": choice.get("text", "")}
            got.roles += "role" in delta
            got.text += delta.get("content") or ""
            got.ids += choice.get("token_ids") or []
            got.finish = choice["finish_reason"]
    return got
