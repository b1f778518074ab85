"""Conversations of a soak: histories that grow by turns in the words of one API, are forked, and are edited.

Everything is drawn from the chance that is handed in. Conversations of one tenant share their beginnings, as
agents of one user do.
"""

import random
from dataclasses import dataclass, field, replace
from typing import Any

from kvloop.bench.soak.hearing import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Heard

MODEL = "soak"
PATHS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
TENANTS = 4
SYSTEMS = 3  # of each tenant
MAX_TURNS = 16
SHORT, LONG = (8, 50), (700, 1500)  # words of a question, or of a tool's long result
LONG_SHARE = 0.15
NAMED = 0.6
_WORDS = [
    "harbour",
    "light",
    "engine",
    "table",
    "river",
    "stone",
    "letter",
    "window",
    "garden",
    "winter",
    "copper",
    "signal",
    "ledger",
    "market",
    "bridge",
    "paper",
    "island",
    "number",
    "silver",
    "morning",
    "anchor",
    "valley",
    "timber",
    "answer",
    "question",
    "method",
    "record",
    "summer",
]
_PARAMETERS = {"type": "object", "properties": {"input": {"type": "string"}}}
Value = dict[str, Any]


def words(chance: random.Random, count: int) -> str:
    """So many words of a small language."""
    return " ".join(chance.choices(_WORDS, k=count))


@dataclass(slots=True)
class Conversation:
    """One conversation. `history` is what its API takes back: messages, items, or a prompt's text.

    `session`: the name that its client gives it; its handle is found by it where the past was edited.
    `by_name`: a Responses conversation that names the response before instead of sending all. `named`: of
    the history, how much that response covers.
    """

    path: str
    tenant: int
    system: str
    tools: bool
    by_name: bool
    session: str | None = None
    history: list[Value] = field(default_factory=list)
    prompt: str = ""
    previous: str | None = None
    named: int = 0
    turns: int = 0
    result_of: Value | None = None

    def ask(self, chance: random.Random) -> None:
        """Put the next question, or the result of the call that is open, at the history's end."""
        self.turns += 1
        said = words(chance, chance.randint(*(LONG if chance.random() < LONG_SHARE else SHORT)))
        if self.path == COMPLETIONS:
            self.prompt += f"\nQ: {said}\nA:"
        elif self.result_of is not None:
            self.history.append(_result(self.path, self.result_of, said))
            self.result_of = None
        else:
            self.history.append({"role": "user", "content": said})

    def unask(self, before: "Conversation") -> None:
        """The question got no answer: as it was before it."""
        self.history, self.prompt, self.result_of = before.history, before.prompt, before.result_of

    def copy(self) -> "Conversation":
        """As it is now; what it said is shared."""
        return replace(self, history=[*self.history])

    def body(self, max_tokens: int) -> Value:
        """The request with the whole history."""
        body: Value = {"model": MODEL}
        if self.path == COMPLETIONS:
            return body | {"prompt": self.system + self.prompt, "max_tokens": max_tokens}
        if self.tools:
            body["tools"] = [_tool(self.path, name) for name in ("look", "go")]
        if self.path == RESPONSES:
            return body | {
                "input": self.history,
                "instructions": self.system,
                "max_output_tokens": max_tokens,
            }
        body["max_tokens"] = max_tokens
        if self.path == MESSAGES:
            return body | {"system": self.system, "messages": self.history}
        return body | {"messages": [{"role": "system", "content": self.system}, *self.history]}

    def wire_body(self, body: Value) -> Value:
        """The same request as it is sent: with a name in the place of what the router has kept."""
        if not self.by_name or self.previous is None:
            return body
        return body | {"input": self.history[self.named :], "previous_response_id": self.previous}

    def answered(self, heard: Heard) -> None:
        """Take in an answer that was right."""
        assert heard.said is not None
        if self.path == COMPLETIONS:
            self.prompt += heard.said.text
            return
        self.history += heard.items
        self.named, self.previous = len(self.history), heard.name
        self.result_of = heard.items[0] if heard.said.tool is not None else None

    def edited(self, chance: random.Random) -> None:
        """Change the past, as a client that compacts does."""
        self.system = f"{words(chance, 12)}. {self.system}"
        self.previous, self.named = None, 0


def begun(chance: random.Random) -> Conversation:
    """A new conversation."""
    tenant = chance.randrange(TENANTS)
    like = random.Random(f"{tenant} {chance.randrange(SYSTEMS)}")
    path = chance.choices(PATHS, (5, 2, 3, 3))[0]
    return Conversation(
        path=path,
        tenant=tenant,
        system=f"You are one of the {words(like, like.randint(60, 400))}.",
        tools=path != COMPLETIONS and chance.random() < 0.25,
        by_name=path == RESPONSES and chance.random() < 0.6,
        session=f"{chance.getrandbits(64):x}" if chance.random() < NAMED else None,
    )


def _tool(path: str, name: str) -> Value:
    if path == MESSAGES:
        return {"name": name, "input_schema": _PARAMETERS}
    function: Value = {"name": name, "parameters": _PARAMETERS}
    if path == RESPONSES:
        return {"type": "function", "strict": False, **function}
    return {"type": "function", "function": function}


def _result(path: str, call: Value, said: str) -> Value:
    if path == RESPONSES:
        return {"type": "function_call_output", "call_id": call["call_id"], "output": said}
    if path == MESSAGES:
        block = {"type": "tool_result", "tool_use_id": call["content"][0]["id"], "content": said}
        return {"role": "user", "content": [block]}
    return {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": said}
