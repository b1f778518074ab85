"""How a benchmark ends: its table, what could not be measured, the JSON file, the exit status."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kvloop.bench.report import Row, as_json, exit_status, table


def say(text: str) -> None:
    """A line of progress, on stderr, with the time of day."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stderr.flush()


def conclude(
    heading: str,
    rows: Sequence[Row],
    failures: Sequence[str],
    facts: dict[str, object],
    json_path: Path | None,
) -> int:
    """Print everything and return the exit status: 1 if a target was missed or a part not measured."""
    sys.stdout.write(f"\n{heading}\n\n{table(rows)}")
    for failure in failures:
        sys.stdout.write(f"not measured: {failure}\n")
    if json_path is not None:
        json_path.write_text(as_json(rows, facts | {"failures": list(failures)}))
    return 1 if failures else exit_status(rows)
