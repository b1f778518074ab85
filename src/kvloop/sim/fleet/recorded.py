"""Recorded agent sessions: what was asked when, how long it was, and which of its blocks were the same.

The format is that of `bench/traces/README.md`: one session a line, as JSON, packed by gzip or not. Contents
are not recorded. Where blocks are named, `hash_runs` (runs of ids) or `hash_ids` (one id a block), two
prompts of a session share as many of them as their names begin with; where they are not, each prompt goes on
from the one before. A subagent is a session of its own. Nothing is guessed: a line that is not whole is an
error that says which field of which line.
"""

import gzip
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated

import msgspec

from kvloop.core.chain import MAX_CHAIN_TOKENS
from kvloop.core.life_table import Ending
from kvloop.errors import UserError

BLOCK_TOKENS = 64
NS_PER_S = 1_000_000_000
MAX_S = 10**8  # three years: beyond, nanoseconds would not be what was meant
_ENDINGS = {"tool_use": Ending.TOOL_CALLS, "max_tokens": Ending.LENGTH}
_GZIP = b"\x1f\x8b"

Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_S)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_CHAIN_TOKENS)]
BlockId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Length = Annotated[int, msgspec.Meta(ge=1, le=MAX_CHAIN_TOKENS // BLOCK_TOKENS)]


class _Request(msgspec.Struct):
    """A request as it stands in the file; a subagent has `requests` instead of the rest."""

    t: Seconds
    type: str = "n"
    input_tokens: Tokens | None = msgspec.field(name="in", default=None)
    output_tokens: Tokens | None = msgspec.field(name="out", default=None)
    stop: str | None = None
    api_time: Seconds | None = None
    hash_runs: list[tuple[BlockId, Length]] | None = None
    hash_ids: list[BlockId] | None = None
    requests: list["_Request"] | None = None


class _Session(msgspec.Struct):
    requests: list[_Request]
    id: str | int
    block_size: int = BLOCK_TOKENS


class RecordedTurn(msgspec.Struct, frozen=True):
    """One request. `runs`: the names of its prompt's whole blocks. `after_ns`: how long after the one before
    it begins, counted from that one's end; negative where it began before that, and then from its beginning.
    """

    prompt_tokens: int
    answer_tokens: int
    ending: Ending
    runs: tuple[tuple[int, int], ...]
    after_ns: int = 0
    overlaps: bool = False

    def blocks(self) -> "array[int]":
        """The names of its blocks, one by one."""
        return array("I", chain.from_iterable(range(first, first + length) for first, length in self.runs))


class RecordedSession(msgspec.Struct, frozen=True):
    """A conversation's requests in order of start; there is at least one. `start_ns`: when the first came,
    None where that was not recorded."""

    name: str
    turns: tuple[RecordedTurn, ...]
    start_ns: int | None = None


def read_recorded(path: Path) -> list[RecordedSession]:
    """All sessions of a file, subagents behind their parents. UserError that names the line and the field."""
    try:
        data = path.read_bytes()
        lines = (gzip.decompress(data) if data.startswith(_GZIP) else data).splitlines()
    except (OSError, EOFError, ValueError) as error:
        raise UserError(f"trace {path}: {error}") from None
    sessions: list[RecordedSession] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = msgspec.json.decode(line, type=_Session)
            if record.block_size != BLOCK_TOKENS:
                raise ValueError(f"blocks of {BLOCK_TOKENS} tokens are expected - at `$.block_size`")
            sessions += _sessions(str(record.id), record.requests, "$.requests")
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise UserError(f"trace {path}, line {number}: {error}") from None
    if not sessions:
        raise UserError(f"trace {path}: there is no session in it")
    return sessions


def longest_tokens(sessions: Sequence[RecordedSession]) -> int:
    """Prompt and answer of the longest turn."""
    return max(turn.prompt_tokens + turn.answer_tokens for one in sessions for turn in one.turns)


def _sessions(name: str, requests: list[_Request], where: str) -> Iterator[RecordedSession]:
    asked = [(one, f"{where}[{number}]") for number, one in enumerate(requests) if one.type != "subagent"]
    if asked:
        asked.sort(key=lambda item: item[0].t)
        yield RecordedSession(name, tuple(_turns(asked)))
    for number, one in enumerate(requests):
        if one.type == "subagent":
            yield from _sessions(f"{name}/{number}", one.requests or [], f"{where}[{number}].requests")


def _turns(asked: list[tuple[_Request, str]]) -> Iterator[RecordedTurn]:
    before: _Request | None = None
    for request, where in asked:
        after_s, overlaps = 0.0, False
        if before is not None:
            after_s = request.t - before.t - (before.api_time or 0.0)
            overlaps = after_s < 0
            if overlaps:
                after_s = request.t - before.t
        yield _turn(request, where, round(after_s * NS_PER_S), overlaps)
        before = request


def _turn(request: _Request, where: str, after_ns: int, overlaps: bool) -> RecordedTurn:
    tokens = request.input_tokens
    if not tokens:
        raise ValueError(f"a request needs tokens - at `{where}.in`")
    if request.output_tokens is None:
        raise ValueError(f"a request needs the length of its answer - at `{where}.out`")
    if request.hash_runs is not None:
        field, runs = "hash_runs", tuple(request.hash_runs)
    elif request.hash_ids is not None:
        field, runs = "hash_ids", tuple((name, 1) for name in request.hash_ids)
    else:
        field, runs = "in", ((1, tokens // BLOCK_TOKENS),) if tokens >= BLOCK_TOKENS else ()
    blocks = sum(length for _, length in runs)
    if blocks > tokens // BLOCK_TOKENS:
        raise ValueError(f"{blocks} blocks do not fit into {tokens} tokens - at `{where}.{field}`")
    if any(first + length > 1 << 32 for first, length in runs):
        raise ValueError(f"a block's name is too large - at `{where}.{field}`")
    ending = _ENDINGS.get(request.stop or "", Ending.STOP)
    return RecordedTurn(tokens, max(1, request.output_tokens), ending, runs, after_ns, overlaps)
