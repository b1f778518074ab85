"""docs/results.md, by one command: `python -m kvloop.bench.results`.

Each experiment is a run of `kvloop bench` and leaves its raw file in a folder; the page is written from these
files alone. An experiment whose raw file is there already is not run again: what was cut off goes on where it
stopped, and the page can be drawn anew without a machine.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from kvloop.bench.load.figures import COPY_RATE, figures_of
from kvloop.bench.load.record import Record, Run, read_file
from kvloop.bench.results.experiments import EXPERIMENTS, Experiment
from kvloop.bench.run import say
from kvloop.errors import UserError

PAGE = Path("docs/results.md")


def main(words: list[str] | None = None) -> int:
    """Run what is not there yet, and write the page. Returns 1 where an experiment failed."""
    args = _arguments(words)
    chosen = [one for one in EXPERIMENTS if one.name in args.only]
    args.raw.mkdir(parents=True, exist_ok=True)
    failed = False
    for one in chosen:
        path = args.raw / f"{one.name}.jsonl"
        if not path.exists() and not args.draw_only:
            say(f"now {one.name}")
            # Wrong answers are a result here, and status 1; no raw file is none.
            command = [sys.executable, "-m", "kvloop.cli", "bench", *one.flags, "--out", str(path)]
            subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        failed = failed or not path.exists()
    try:
        args.page.write_text(page(args.raw))
    except (OSError, UserError) as error:
        sys.stderr.write(f"{args.page}: {error}\n")
        return 1
    return 1 if failed else 0


def page(folder: Path) -> str:
    """The page from what raw files there are. Raises `UserError` for one that cannot be read."""
    parts = [_HEAD]
    for one in EXPERIMENTS:
        path = folder / f"{one.name}.jsonl"
        parts.append(f"\n## {one.title}\n\n{one.words}\n\n")
        if not path.exists():
            parts.append("Not measured yet.\n")
            continue
        records = read_file(path)
        parts.append("\n".join(one.table(records)) + "\n\n" + _footing(one, records))
    return "".join(parts)


_HEAD = """# Results

Written by `python -m kvloop.bench.results` from raw files of [`kvloop bench`](bench.md), which has the legs.
Medians, in brackets the number of requests. Where kvloop is behind, the table shows it.
"""


def _footing(one: Experiment, records: Sequence[Record]) -> str:
    run = next(one for one in records if isinstance(one, Run))
    facts = ", ".join(f"{name} {value}" for name, value in run.machine.items() if name != COPY_RATE)
    figures = figures_of(records)
    cut = "" if figures.cut_off is None else f" The run was cut off: {figures.cut_off}."
    different = f" {len(figures.mismatches)} answers differ between legs." if figures.mismatches else ""
    failed = f" {len(figures.failures)} requests failed." if figures.failures else ""
    return (
        f"`kvloop bench {' '.join(one.flags)}`, {run.started[:10]}, model {run.model}; {facts}."
        f"{cut}{different}{failed}\n"
    )


def _arguments(words: list[str] | None) -> argparse.Namespace:
    names = tuple(one.name for one in EXPERIMENTS)
    parser = argparse.ArgumentParser(
        prog="python -m kvloop.bench.results", description="Measure what docs/results.md says, and write it."
    )
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE", help="(default: %(default)s)")
    parser.add_argument(
        "--raw", type=Path, default=Path("results"), metavar="DIR", help="raw files (default: %(default)s)"
    )
    parser.add_argument(
        "--only",
        type=lambda text: tuple(text.split(",")),
        default=names,
        metavar="NAMES",
        help=f"run only these of {','.join(names)}",
    )
    parser.add_argument("--draw-only", action="store_true", help="run nothing")
    args = parser.parse_args(words)
    if not set(args.only) <= set(names):
        parser.error(f"--only takes some of {','.join(names)}, not {','.join(args.only)}")
    return args


if __name__ == "__main__":
    sys.exit(main())
