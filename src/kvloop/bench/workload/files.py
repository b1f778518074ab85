"""Files of recordings, read whole up to a bound, and taken apart with errors that say where.

A recording is a line of JSON for each request or conversation, or one JSON list of conversations; packed by
gzip or not. What is wrong is a `UserError` with the file, the line (or the entry, from 1) and the field.
"""

import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from kvloop.errors import UserError

MAX_BYTES = 1 << 30
"""Unpacked. The largest in use, ShareGPT as it was published, has 650 MB."""
MAX_ENTRIES = 1_000_000
"""Lines, or entries of a list; a kilobyte each where they have no texts."""
_GZIP = b"\x1f\x8b"

T = TypeVar("T")


def read_bytes(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """What the file holds, unpacked. UserError for one that cannot be read, is too large, or is empty."""
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
        if data.startswith(_GZIP):
            with gzip.open(io.BytesIO(data)) as packed:
                data = packed.read(max_bytes + 1)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise UserError(f"{path}: {error}") from None
    if len(data) > max_bytes:
        raise UserError(f"{path}: more than {max_bytes} bytes are not read")
    if not data.strip():
        raise UserError(f"{path}: there is nothing in it")
    return data


def is_list(data: bytes) -> bool:
    """Whether it is one JSON list, and not lines."""
    return data.lstrip()[:1] == b"["


def entries(path: Path, data: bytes, entry_type: type[T]) -> Iterator[tuple[str, T]]:
    """Each line, or each entry of the list, as `entry_type`, and how to name it in an error."""
    if is_list(data):
        for number, raw in enumerate(decoded(data, list[msgspec.Raw], f"{path}"), 1):
            where = f"{path}, entry {number}"
            _check_number(number, where)
            yield where, decoded(raw, entry_type, where)
        return
    decoder = msgspec.json.Decoder(entry_type)
    for number, line in enumerate(io.BytesIO(data), 1):
        if line.strip():
            where = f"{path}, line {number}"
            _check_number(number, where)
            try:
                entry = decoder.decode(line)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                raise UserError(f"{where}: {error}") from None
            yield where, entry


def decoded(data: bytes | msgspec.Raw, wanted: type[T], where: str) -> T:
    """A JSON text as `wanted`; UserError that begins with `where`."""
    try:
        return msgspec.json.decode(data, type=wanted)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UserError(f"{where}: {error}") from None


def _check_number(number: int, where: str) -> None:
    if number > MAX_ENTRIES:
        raise UserError(f"{where}: more than {MAX_ENTRIES} are not read")
