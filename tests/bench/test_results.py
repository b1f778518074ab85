"""docs/results.md: its tables say what the raw files say, and nothing that was not measured."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvloop.bench.load.record import End, Record, line_of
from kvloop.bench.results.__main__ import main, page
from kvloop.bench.results.experiments import EXPERIMENTS
from kvloop.bench.results.tables import between_tokens, first_tokens, held, wrong
from kvloop.cli import build_parser
from tests.bench.load.made_up import asked, run_of, window
from tests.bench.load.made_up import held as sample

LEGS = ("one-way", "return", "aggregated")


def second(leg: str, planned: int, first_ms: float | None, **given: object) -> Record:
    """A measured second turn."""
    return asked(leg, turn=1, planned_tokens=planned, first_ms=first_ms, **given)


def records() -> list[Record]:
    """A run over three legs and two sizes."""
    made: list[Record] = [run_of(*LEGS)]
    for planned, one_way_ms, returned_ms, floor_ms in ((500, 900, 300, 200), (4000, 9000, 600, 500)):
        for factor in (1.0, 1.1, 3.0):
            made.append(second("one-way", planned, one_way_ms * factor))
            made.append(second("return", planned, returned_ms * factor))
            made.append(second("aggregated", planned, floor_ms * factor))
    return made


def cells(lines: Sequence[str], begins: str) -> list[str]:
    """The cells of the line that begins so."""
    (line,) = [line for line in lines if line.startswith(begins)]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_medians_and_ratios_are_those_of_second_turns() -> None:
    """First turns, warm-up and failed requests are left out; what was not measured is a dash."""
    more: list[Record] = [
        asked("return", turn=0, planned_tokens=500, first_ms=1.0),
        second("return", 500, 1.0, warm_up=True),
        second("return", 500, 1.0, error="broken"),
    ]
    lines = list(first_tokens([*records(), *more, End("done")]))
    assert cells(lines, "| 500 ")[1:] == ["0.99 s (3)", "0.33 s (3)", "0.22 s (3)", "1.50", "-", "3.00"]
    assert cells(lines, "| 4,000 ")[4:] == ["1.20", "-", "15.00"]


def test_wrong_outputs_are_counted() -> None:
    """Of each leg, with how many were compared."""
    made = [run_of(*LEGS), *(second(leg, 500, 1.0, agrees=leg != "return") for leg in LEGS)]
    lines = list(wrong(made))
    assert cells(lines, "| outputs") == ["outputs compared", "1", "1", "1"]
    assert cells(lines, "| of these") == ["of these wrong", "0", "1", "0"]


def test_what_is_held_comes_from_samples() -> None:
    """A leg without has a dash."""
    made = [run_of("upstream", "return"), second("return", 500, 1.0), second("upstream", 500, 1.0)]
    made += [sample("return", 1.0, 2.0**20), sample("return", 2.0, 3 * 2.0**20)]
    made += [window("upstream"), window("return")]
    assert cells(list(held(made)), "| held") == ["held for conversations, mean", "-", "2 MiB"]
    assert cells(list(held(made)), "| most") == ["most", "-", "3 MiB"]


def test_the_time_between_tokens_is_that_of_all_gaps() -> None:
    """In whole milliseconds."""
    made = [run_of("return"), second("return", 500, 1.0, between_ms=[10.0, 20.0, 30.0])]
    assert cells(list(between_tokens(made)), "| between tokens, median") == [
        "between tokens, median",
        "20 ms",
    ]


def test_a_page_says_what_is_missing(tmp_path: Path) -> None:
    """And of each experiment its command; a run that was cut off is called so."""
    (tmp_path / "lengths.jsonl").write_bytes(b"".join(map(line_of, records())))
    text = page(tmp_path)
    assert text.count("Not measured yet.") == len(EXPERIMENTS) - 1
    assert "`kvloop bench --compare" in text
    assert "cut off" in text


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda one: one.name)
def test_every_experiment_is_a_command(experiment: object) -> None:
    """That `kvloop bench` takes."""
    parser, _ = build_parser("bench")
    parser.parse_args([*experiment.flags, "--out", "x"])  # type: ignore[attr-defined]


def test_a_page_is_drawn_from_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without running anything; a raw file that is none is one line."""
    words = ["--draw-only", "--raw", str(tmp_path), "--page", str(tmp_path / "page.md")]
    assert main(words) == 1  # nothing was measured
    assert "Not measured yet." in (tmp_path / "page.md").read_text()
    (tmp_path / "edits.jsonl").write_text("nonsense\n")
    assert main(words) == 1
    assert "edits.jsonl, line 1" in capsys.readouterr().err
    assert sorted(one.name for one in tmp_path.iterdir()) == ["edits.jsonl", "page.md"]
