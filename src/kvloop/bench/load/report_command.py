"""`kvloop bench report`: the summary, the page and the figures again, from a raw file alone.

The exit status is 1 where the figures are not sound, as that of the run itself.
"""

import argparse
import sys
from pathlib import Path

import msgspec

from kvloop.bench.load.figures import Figures, figures_of, is_sound
from kvloop.bench.load.html import page
from kvloop.bench.load.record import read_file
from kvloop.bench.load.summary import write_summary
from kvloop.errors import UserError


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """The raw file, and where to write what."""
    parser.add_argument("raw", type=Path, metavar="RAW", help="the raw file of a run (JSON lines)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report as one page there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")


def run_report(args: argparse.Namespace) -> int:
    """Print the summary, write what is asked for. Raises `UserError`."""
    raw: Path = args.raw
    for path in (args.html, args.json):
        if path is not None and path.exists() and raw.exists() and path.samefile(raw):
            raise UserError(f"{path}: that is the raw file itself, and it would be overwritten")
    records = read_file(raw)
    figures = figures_of(records)
    write_summary(figures, sys.stdout)
    if args.html is not None:
        write(args.html, page(figures, records).encode())
    if args.json is not None:
        write(args.json, as_json(figures))
    return 0 if is_sound(figures) else 1


def as_json(figures: Figures) -> bytes:
    """The figures with whether they are sound. Raises `UserError`."""
    try:
        told = msgspec.to_builtins(figures) | {"sound": is_sound(figures)}
        return msgspec.json.format(msgspec.json.encode(told), indent=2) + b"\n"
    except (RecursionError, msgspec.MsgspecError) as error:
        raise UserError(f"the run's settings cannot be written as JSON: {error}") from None


def write(path: Path, content: bytes) -> None:
    """A file's new content. Raises `UserError`."""
    try:
        path.write_bytes(content)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
