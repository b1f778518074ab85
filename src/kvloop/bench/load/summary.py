"""The figures as text for a terminal: what is wrong first and in red, then the tables, and the verdict last,
where it is still in sight."""

import itertools
from typing import TextIO

from kvloop.bench.load.figures import Figures, is_sound
from kvloop.bench.load.sections import Section, sections
from kvloop.bench.load.words import alarms, facts, notices, verdict
from kvloop.bench.report import aligned

RED, YELLOW, BOLD, PLAIN = "\x1b[31;1m", "\x1b[33m", "\x1b[1m", "\x1b[0m"


def summary_text(figures: Figures, coloured: bool = False) -> str:
    """All of it. The tables' columns stand under each other."""

    def painted(colour: str, text: str) -> str:
        return f"{colour}{text}{PLAIN}" if coloured else text

    said = [f"{name:<9} {value}" for name, value in facts(figures)]
    parts = ["\n".join(said) + "\n"] if said else []
    loud = [painted(RED, line) for line in alarms(figures)]
    loud += [painted(YELLOW, line) for line in notices(figures)]
    if loud:
        parts.append("\n".join(loud) + "\n")
    tables = sections(figures)
    lines = [line for table in tables for line in _lines(table)]
    rows = iter(aligned(lines, numbers=True).splitlines())
    for table in tables:
        body = "\n".join(itertools.islice(rows, len(table.rows) + 1))
        parts.append(f"{painted(BOLD, table.title)}\n{body}\n")
    last = verdict(figures)
    parts.append(f"{last if is_sound(figures) else painted(RED, last)}\n")
    return "\n".join(parts)


def _lines(table: Section) -> list[tuple[str, ...]]:
    return [("", *table.head), *((f"  {what}", *cells) for what, cells in table.rows)]


def write_summary(figures: Figures, stream: TextIO) -> None:
    """The same onto a stream: in colours where it is a terminal, and in letters that it has."""
    text = summary_text(figures, stream.isatty())
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding))
