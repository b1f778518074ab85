"""Mooncake's traces: JSON lines of arrival, lengths, and hashes of the prompt's blocks.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ...]}

`timestamp` is in milliseconds, a block has 512 tokens, the last hash is that of what is left. An id stands
for everything up to its block's end, in the whole file. Conversations are not named. A request goes on from
the one before it with which it has most blocks in common, unless these are only how many prompts begin:

  * what is gone on from in more than `MAX_FORKS` ways is a system prompt, and no conversation;
  * and less than half of the earlier prompt is a document that two of them quote.

Requests that go on from none begin a conversation, with the text of their blocks, so that what they have in
common with others they still have.

Only arrivals are recorded. A turn's wait is what passed since the one before it arrived, less the estimated
duration of its answer, and not less than 0.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from kvloop.bench.workload.blocks import Blocks, Found, InCommon, runs_of
from kvloop.bench.workload.files import entries, read_bytes
from kvloop.bench.workload.options import RecordingOptions
from kvloop.bench.workload.prefixes import joined
from kvloop.bench.workload.recording import Asked, Recorded, took_s, workload
from kvloop.bench.workload.turns import Workload
from kvloop.core.chain import MAX_CHAIN_TOKENS
from kvloop.errors import UserError
from kvloop.sim.fleet.recorded import MAX_S, Tokens

MAX_FORKS = 8
"""Ways in which a history is gone on from, at most. Edits, retries and subagents are a few; system prompts,
in the published traces, thousands."""
MAX_RUNS = 5_000_000
"""In all prompts, of names that count up: some 600 MB. The published traces have less than a tenth of it."""
MS_PER_S = 1000
MAX_ID = (1 << 63) - 1

Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_S * MS_PER_S)]
Id = Annotated[int, msgspec.Meta(ge=0, le=MAX_ID)]


class _Request(msgspec.Struct):
    timestamp: Milliseconds
    input_length: Tokens
    output_length: Tokens
    hash_ids: Annotated[list[Id], msgspec.Meta(max_length=MAX_CHAIN_TOKENS)]


def read_mooncake(path: Path, options: RecordingOptions | None = None) -> Workload:
    """The requests of a trace, as conversations. UserError that names the line and the field."""
    options = options or RecordingOptions()
    requests: list[tuple[float, Blocks]] = []
    runs = 0
    for where, request in entries(path, read_bytes(path), _Request):
        if not request.input_length:
            raise UserError(f"{where}: a request needs tokens - at `$.input_length`")
        if len(request.hash_ids) > -(-request.input_length // options.block_tokens):
            raise UserError(
                f"{where}: {len(request.hash_ids)} blocks of {options.block_tokens} do not fit into "
                f"{request.input_length} tokens - at `$.hash_ids`"
            )
        requests.append((request.timestamp / MS_PER_S, _blocks(request, options.block_tokens)))
        runs += len(requests[-1][1].runs)
        if runs > MAX_RUNS:
            raise UserError(f"{where}: more than {MAX_RUNS} runs of blocks are not read")
    requests.sort(key=lambda request: request[0])
    return workload("mooncake", path.name, _conversations(requests, options.block_tokens), options)


def _conversations(requests: Sequence[tuple[float, Blocks]], block_tokens: int) -> list[Recorded]:
    in_common = InCommon(block_tokens)
    found = [in_common.put(prompt) for _, prompt in requests]
    places: list[tuple[int, int]] = []  # of each request: its conversation, its number there
    named: list[int] = []  # of each: how many of its first blocks have their own texts
    conversations: list[tuple[str, list[Asked]]] = []
    for number, ((start_s, prompt), other) in enumerate(zip(requests, found, strict=True)):
        asked = start_s, took_s(prompt.answer_tokens), prompt.prompt_tokens, prompt.answer_tokens
        if other is None or _is_beginning(other, requests[other.like][1].whole, named[other.like]):
            places.append((len(conversations), 0))
            named.append(prompt.whole)
            beginning = _beginning(prompt, block_tokens)
            conversations.append((f"mooncake-{number}", [Asked(*asked, beginning=beginning)]))
            continue
        conversation, like = places[other.like]
        is_answered = start_s > requests[other.like][0]
        shared = in_common.shared_tokens(number, other, is_answered)
        places.append((conversation, len(conversations[conversation][1])))
        named.append(min(other.depth, named[other.like]))
        conversations[conversation][1].append(Asked(*asked, like, shared))
    return [Recorded(name, asked) for name, asked in conversations]


def _is_beginning(found: Found, whole: int, named: int) -> bool:
    """Whether what is in common is only how many prompts begin. Never what a new conversation's own text
    could not give back."""
    is_wide = len(found.node.edges) > MAX_FORKS
    return found.depth <= named and (is_wide or 2 * found.depth < whole)


def _blocks(request: _Request, block_tokens: int) -> Blocks:
    whole = request.input_length // block_tokens
    tail = request.hash_ids[whole] if len(request.hash_ids) > whole else None
    runs = runs_of(request.hash_ids[:whole])
    return Blocks(request.input_length, max(1, request.output_length), runs, tail)


def _beginning(prompt: Blocks, block_tokens: int) -> tuple[tuple[str, int], ...]:
    """The prompt as stretches: what its blocks' names, and its tail's, stand for. Prompts that begin with the
    same blocks begin with the same stretches, for runs end where names do."""
    stretches, left = [], prompt.prompt_tokens
    tail = () if prompt.tail is None else ((prompt.tail, 1),)
    for first, length in joined((*prompt.runs, *tail)):
        tokens = min(left, length * block_tokens)
        stretches.append((f"block-{first}", tokens))
        left -= tokens
    return tuple(stretches)
