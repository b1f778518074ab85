"""The router's own log of turns: one JSON object a line, written when a turn has ended.

The log has no texts: it says which turn another one goes on from, and how many tokens they have in common,
and that is what a workload is made of. Lines may come in any order. A turn that goes on from one that the log
does not have, because it was rotated, begins anew, in the conversation that its line names."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from kvloop.bench.workload.files import entries, read_bytes
from kvloop.bench.workload.options import RecordingOptions
from kvloop.bench.workload.recording import Asked, Recorded, workload
from kvloop.bench.workload.turns import Workload
from kvloop.errors import UserError
from kvloop.sim.fleet.recorded import MAX_S, Tokens

MS_PER_S = 1000
MAX_TIME_S = 1e11
"""Of a clock: beyond the year 5000, milliseconds were meant."""
TEMPLATE_TOKENS = 8
"""What a chat template may put between an answer and what follows, and an answer's own stop token: a prompt
that has all but so many tokens of another and its answer goes on from its end."""

Time = Annotated[float, msgspec.Meta(ge=0, le=MAX_TIME_S)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_S * MS_PER_S)]
Name = Annotated[str, msgspec.Meta(max_length=1024)]


class LoggedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A line. `time`: when the request came, by the wall clock, in seconds. `conversation`: an opaque name.
    `goes_on_from`: the `request_id` of the turn whose prompt and answer this prompt begins with, as far as
    its first `shared_tokens`. `reused_tokens`: those that prefill did not compute. `first_ms`, `took_ms`: to
    the answer's first byte and to its end."""

    time: Time
    request_id: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
    prompt_tokens: Tokens
    answer_tokens: Tokens
    conversation: Name = ""
    goes_on_from: Name | None = None
    tenant: Name = ""
    shared_tokens: Tokens = 0
    ending: Literal["stop", "length", "tool_calls"] = "stop"
    route: Name = ""
    reused_tokens: Tokens = 0
    first_ms: Milliseconds = 0.0
    took_ms: Milliseconds = 0.0


def read_turn_log(path: Path, options: RecordingOptions | None = None) -> Workload:
    """The turns of a log, as conversations. UserError that names the line and the field."""
    options = options or RecordingOptions()
    lines = []
    for where, line in entries(path, read_bytes(path), LoggedTurn):
        if not line.prompt_tokens:
            raise UserError(f"{where}: a request needs tokens - at `$.prompt_tokens`")
        if line.shared_tokens > line.prompt_tokens:
            raise UserError(f"{where}: more tokens are shared than there are - at `$.shared_tokens`")
        lines.append(line)
    lines.sort(key=lambda line: line.time)
    return workload("turn-log", path.name, _conversations(lines), options)


def _conversations(lines: Iterable[LoggedTurn]) -> list[Recorded]:
    log = _Log()
    for line in lines:
        log.put(line)
    return [Recorded(name, asked, tenant) for name, tenant, asked in log.conversations]


class _Log:
    """The conversations while their turns are put in, in order of start."""

    def __init__(self) -> None:
        self.conversations: list[tuple[str, str, list[Asked]]] = []
        self._turns: dict[str, tuple[int, int, str]] = {}  # by request: conversation, number there, ending
        self._named: dict[tuple[str, str], int] = {}

    def put(self, line: LoggedTurn) -> None:
        before = None if line.goes_on_from is None else self._turns.get(line.goes_on_from)
        answer, took_s = max(1, line.answer_tokens), line.took_ms / MS_PER_S
        if before is None:
            at = self._conversation(line)
            turns = self.conversations[at][2]
            follows = len(turns) - 1 if turns else None
            asked = Asked(line.time, took_s, line.prompt_tokens, answer, follows=follows)
        else:
            at, like, ending = before
            turns = self.conversations[at][2]
            is_over = line.time >= turns[like].start_s + turns[like].took_s
            asked = Asked(
                line.time,
                took_s,
                line.prompt_tokens,
                answer,
                like=like,
                shared_tokens=_shared(line, turns[like]),
                follows=like if is_over else None,
                kind="tool" if ending == "tool_calls" else "user",
            )
        self._turns[line.request_id] = at, len(turns), line.ending
        turns.append(asked)

    def _conversation(self, line: LoggedTurn) -> int:
        """The number of the conversation that the line names, or of a new one."""
        named = (line.tenant, line.conversation)
        at = self._named.get(named) if line.conversation else None
        if at is None:
            at = len(self.conversations)
            name = line.conversation or line.request_id
            self.conversations.append((name, line.tenant, []))
            self._named[named] = at
        return at


def _shared(line: LoggedTurn, before: Asked) -> int:
    """The tokens in common, where these are all but a few of a prompt or an answer, up to its end."""
    for end in (before.prompt_tokens + before.answer_tokens, before.prompt_tokens):
        if line.shared_tokens >= max(1, end - TEMPLATE_TOKENS):
            return max(line.shared_tokens, end)
    return line.shared_tokens
