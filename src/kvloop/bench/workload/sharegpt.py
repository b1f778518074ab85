"""Conversations in ShareGPT's form, and in that of chat APIs: texts, without times.

    [{"id": "QWJhYvA_0", "conversations": [{"from": "human", "value": "."}, {"from": "gpt", "value": "."}]},
     {"id": 7, "messages": [{"role": "user", "content": "."}, {"role": "assistant", "content": "."}]}]

or the same objects one a line. Both are in use under this name. What else an entry has is left alone.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvloop.bench.workload.files import entries, read_bytes
from kvloop.bench.workload.options import RecordingOptions
from kvloop.bench.workload.said import ROLES, Conversed, workload
from kvloop.bench.workload.turns import Workload
from kvloop.errors import UserError


class _Value(msgspec.Struct):
    who: str = msgspec.field(name="from")
    value: str


class _Message(msgspec.Struct):
    role: str
    content: str


class _Entry(msgspec.Struct):
    id: str | int | None = None
    conversations: list[_Value] | None = None
    messages: list[_Message] | None = None


def read_sharegpt(path: Path, options: RecordingOptions | None = None, name: str = "sharegpt") -> Workload:
    """The conversations of a file, as workload `name`. UserError that names the entry and the field."""
    options = options or RecordingOptions()
    found: list[tuple[str, Conversed]] = []
    for where, entry in entries(path, read_bytes(path), _Entry):
        called = f"{name}-{len(found)}" if entry.id is None else str(entry.id)
        found.append((called, list(_said(entry, where))))
    return workload(name, path.name, found, options)


def _said(entry: _Entry, where: str) -> Iterator[tuple[str, str]]:
    if entry.conversations is not None:
        for number, value in enumerate(entry.conversations):
            yield _role(value.who, f"{where}: ", f"$.conversations[{number}].from"), value.value
    elif entry.messages is not None:
        for number, message in enumerate(entry.messages):
            yield _role(message.role, f"{where}: ", f"$.messages[{number}].role"), message.content
    else:
        raise UserError(f"{where}: an entry needs `conversations` or `messages`")


def _role(name: str, before: str, field: str) -> str:
    role = ROLES.get(name)
    if role is None:
        raise UserError(f"{before}nobody is called {name[:40]!r} - at `{field}`")
    return role
