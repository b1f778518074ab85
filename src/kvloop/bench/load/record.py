"""The raw file of `kvloop bench`: one JSON object a line, in the order in which things happened.

The first line is the `run`; then one `request` for each, `sample`s of what a leg holds, a `window` whenever
a leg's turn is over, and the `end`. A report is drawn from this file alone. Times are in milliseconds unless
a name says otherwise; what an endpoint does not tell is null.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from kvloop.errors import UserError

FORMAT = 1


class Leg(msgspec.Struct, frozen=True):
    """One of the things that are compared: an endpoint, and what stands behind it."""

    name: str
    description: str
    url: str


class Run(msgspec.Struct, frozen=True, tag="run", tag_field="kind"):
    """What was measured, where and when. `settings` are the command's, by flag."""

    format: int
    kvloop: str
    started: str
    command: str
    workload: str
    source: str
    model: str
    seed: int
    legs: list[Leg]
    settings: dict[str, Any]
    machine: dict[str, Any]


class Request(msgspec.Struct, frozen=True, tag="request", tag_field="kind"):
    """One request of one leg. `at_s` counts from its window's start.

    `late_ms` is how long after its time it was sent; `first_ms` is to the first event with a token,
    `between_ms` the gaps between events after it. `planned_tokens` is the prompt as the workload has it,
    `prompt_tokens` as the endpoint counted it. `what` is the turn's kind. `answer` is a digest of the text;
    `text` is there where legs disagree. `transfer_ms` is reading back, `compute_ms` the rest of prefill,
    where the endpoint tells.
    """

    leg: str
    round: int
    conversation: str
    turn: int
    what: str
    warm_up: bool
    at_s: float
    late_ms: float
    status: int
    took_ms: float
    first_ms: float | None = None
    between_ms: list[float] = []
    planned_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    answer_tokens: int | None = None
    route: str | None = None
    reused_tokens: int | None = None
    transfer_ms: float | None = None
    compute_ms: float | None = None
    answer: str | None = None
    text: str | None = None
    agrees: bool | None = None
    error: str | None = None


class Sample(msgspec.Struct, frozen=True, tag="sample", tag_field="kind"):
    """What a leg's decode engines hold for conversations, at a moment of a window."""

    leg: str
    round: int
    at_s: float
    held_bytes: float | None
    kv_usage: float | None


class Window(msgspec.Struct, frozen=True, tag="window", tag_field="kind"):
    """A leg's turn is over. CPU seconds are those of the leg's processes, where they are this command's, and
    of the client."""

    leg: str
    round: int
    took_s: float
    cpu_s: float | None
    client_cpu_s: float
    transferred_bytes: float | None = None
    transfer_s: float | None = None


class End(msgspec.Struct, frozen=True, tag="end", tag_field="kind"):
    """The last line of a run that came to its end; `why` is `done` or what cut it off."""

    why: str


Record = Run | Request | Sample | Window | End
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)


def line_of(record: Record) -> bytes:
    """The record as a line."""
    return _encoder.encode(record) + b"\n"


def read(lines: Iterable[bytes], name: str) -> Iterator[Record]:
    """The records of a raw file. UserError that names the line and the field; a last line that was cut off is
    passed over."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = _decoder.decode(line)
        except (msgspec.MsgspecError, RecursionError) as error:
            if not line.endswith(b"\n") and number > 1:
                return
            raise UserError(f"{name}, line {number}: {error}") from None
        if (number == 1) != isinstance(record, Run):
            raise UserError(f"{name}, line {number}: the first line, and no other, is the run's")
        if isinstance(record, Run) and record.format != FORMAT:
            raise UserError(f"{name}: format {record.format} is not known, {FORMAT} is")
        yield record


def read_file(path: Path) -> list[Record]:
    """All of a raw file's records. Raises `UserError`."""
    try:
        with path.open("rb") as lines:
            records = list(read(lines, str(path)))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    if not records:
        raise UserError(f"{path}: there is nothing in it")
    return records
