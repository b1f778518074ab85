"""`kvloop bench` as a command: whole runs on simulated engines, and what is said of mistakes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvloop.bench.load.record import End, Request, Run, Window, read_file
from kvloop.cli import main

SMALL = "--turns 3 --system-tokens 1500 --user-tokens 100 --tool-tokens 100 --answer-tokens 8 --fork-share 0"
FLAGS = [*SMALL.split(), "--conversations", "2", "--time-scale", "0", "--rounds", "2"]
LEGS = "one-way,kvloop,return,aggregated"


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The raw file of a run over four simulated legs."""
    path = tmp_path_factory.mktemp("bench") / "raw.jsonl"
    flags = ["--compare", LEGS, "--sim", "qwen3-32b-h200", *FLAGS]
    assert main(["bench", *flags, "--out", str(path)]) == 0
    return path


def requests(raw: Path, leg: str = "", *, warm_up: bool = False) -> list[Request]:
    """The requests of a leg, or of all."""
    found = [one for one in read_file(raw) if isinstance(one, Request) and one.warm_up == warm_up]
    return [one for one in found if leg in ("", one.leg)]


def test_every_leg_is_asked_the_same(raw: Path) -> None:
    """Each turn once a leg, in the legs' turns, none lost; the first line says what was run, the last that
    it ended."""
    records = read_file(raw)
    assert isinstance(records[0], Run)
    assert [leg.name for leg in records[0].legs] == LEGS.split(",")
    assert records[-1] == End("done")
    asked = {leg: [(one.conversation, one.turn) for one in requests(raw, leg)] for leg in LEGS.split(",")}
    assert len(set(map(tuple, map(sorted, asked.values())))) == 1
    assert all(len(turns) == 6 for turns in asked.values())
    windows = [(one.round, one.leg) for one in records if isinstance(one, Window)]
    assert windows[:4] == [(-1, leg) for leg in LEGS.split(",")]
    assert [leg for number, leg in windows if number == 1] == ["kvloop", "return", "aggregated", "one-way"]


def test_what_is_reused_is_what_the_leg_is(raw: Path) -> None:
    """One-way computes all; kvloop goes its own ways, and reads later turns back where it is told to, and
    says how long that took; the aggregated engine finds them in its own cache."""
    assert {one.reused_tokens for one in requests(raw, "one-way")} == {0}
    assert {one.cached_tokens for one in requests(raw, "one-way")} == {0}
    assert {one.route for one in requests(raw, "kvloop")} <= {"recompute", "return", "append"}
    for one in requests(raw, "return"):
        assert one.compute_ms is not None
        if one.turn:
            assert one.route == "return"
            assert one.prompt_tokens is not None
            assert one.reused_tokens is not None
            assert one.prompt_tokens - 120 < one.reused_tokens < one.prompt_tokens
            assert one.transfer_ms is not None
            assert one.transfer_ms > 0
    assert all((one.cached_tokens or 0) > 1400 for one in requests(raw, "aggregated") if one.turn)


def test_answers_are_compared(raw: Path) -> None:
    """All legs say the same, and it is known of every turn."""
    assert {one.agrees for one in requests(raw)} == {True}
    assert {one.text for one in requests(raw)} == {None}
    assert all(one.answer_tokens == 8 and len(one.between_ms) == 7 for one in requests(raw))


def test_prompts_are_as_long_as_planned(raw: Path) -> None:
    """As the endpoint counts them, but for what its template adds."""
    for one in requests(raw):
        assert one.planned_tokens is not None
        assert one.prompt_tokens is not None
        assert 0 <= one.prompt_tokens - one.planned_tokens < 40


def test_a_report_is_drawn_from_the_raw_file_alone(raw: Path, tmp_path: Path) -> None:
    """Its status is the run's; page and figures are there."""
    page, figures = tmp_path / "report.html", tmp_path / "figures.json"
    assert main(["bench", "report", str(raw), "--html", str(page), "--json", str(figures)]) == 0
    assert "<svg" in page.read_text()
    assert json.loads(figures.read_text())["sound"] is True


def test_a_report_that_cannot_be_written_is_told_all_the_same(
    raw: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The summary is on stdout before a page is drawn."""
    assert main(["bench", "report", str(raw), "--html", "/dev/full"]) == 2
    assert "sound: " in capsys.readouterr().out


def test_a_wrong_answer_fails_the_run(raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A mismatch in the file is a mismatch in the report, named, and the status is 1."""
    lines = [json.loads(line) for line in raw.read_text().splitlines()]
    wrong = next(one for one in lines if one.get("leg") == "kvloop" and one.get("turn") == 1)
    wrong |= {"agrees": False, "text": "something else"}
    path = tmp_path / "wrong.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["bench", "report", str(path)]) == 1
    assert wrong["conversation"] in capsys.readouterr().out


BY_LENGTH = ["--workload", "lengths", "--prompt-tokens", "300"]
MISTAKES = {
    "nobody to ask": ([], "--url"),
    "both": (["--url", "http://a", "--compare", "kvloop"], "--url"),
    "no such leg": (["--compare", "kvloop,best"], "one-way,upstream,kvloop,return,aggregated"),
    "a leg twice": (["--compare", "kvloop,kvloop"], "each once"),
    "no URL": (["--url", "localhost:8000"], "http://HOST:PORT"),
    "nobody there": (["--url", "http://127.0.0.1:9"], "/v1/models"),
    "upstream simulated": (["--compare", "upstream", "--sim", "instant"], "upstream"),
    "no such profile": (["--compare", "kvloop", "--sim", "best"], "profile"),
    "no trace": (["--url", "http://a", "--workload", "mooncake"], "--trace"),
    "a trace without its format": (["--url", "http://a", "--trace", "x"], "--workload"),
    "a generator's flag": (["--url", "http://a", "--workload", "agent-sessions", "--turns", "3"], "--turns"),
    "no rounds": (["--url", "http://a", "--rounds", "0"], "--rounds"),
    "negative warm-up": (["--url", "http://a", "--warm-up", "-1"], "--warm-up"),
    "endless warm-up": (["--url", "http://a", "--warm-up", "1000000000"], "--warm-up must be from 0 to"),
    "no conversations": (["--url", "http://a", *BY_LENGTH, "--conversations", "0"], "--conversations"),
    "too many": (["--url", "http://a", *BY_LENGTH, "--conversations", "1000000000"], "--conversations"),
    "two headers": (["--url", "http://a", "--session-header", "x\r\ny"], "is no header's name"),
    "two legs of a name": (["--url", "a=http://a", "--url", "a=http://b"], "two legs"),
    "a folder for a file": (["--compare", "kvloop", "--sim", "instant", "--out", "."], ". is there already"),
    "a file nowhere": (
        ["--compare", "kvloop", "--sim", "instant", "--out", "no/x"],
        "no/x is there already, or",
    ),
    "a page nowhere": (["--url", "http://a", "--html", "no/x.html"], "no/x.html: its folder is not there"),
    "figures nowhere": (["--url", "http://a", "--json", "no/x.json"], "no/x.json: its folder is not there"),
    "no raw file": (["report", "missing.jsonl"], "missing.jsonl"),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_is_one_line(kind: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """That names the flag, and status 2; no file is left behind."""
    flags, said = MISTAKES[kind]
    before = set(Path.cwd().iterdir())
    out = ["--out", str(tmp_path / "raw.jsonl")] if "--out" not in flags and "report" not in flags else []
    assert main(["bench", *flags, *out]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert said in last
    assert last.startswith("kvloop bench: ")
    assert set(Path.cwd().iterdir()) == before
    assert not list(tmp_path.iterdir())


def test_a_prompt_that_does_not_fit_is_said_beforehand(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With what to do, before anything is asked."""
    flags = ["--compare", "aggregated", "--sim", "qwen3-32b-h200", "--system-tokens", "40000"]
    assert main(["bench", *flags, "--conversations", "1", "--out", str(tmp_path / "raw.jsonl")]) == 2
    assert "--max-prompt-tokens" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_keeps_what_it_has(tmp_path: Path, number: signal.Signals) -> None:
    """The turns that were answered are in the raw file, those of the window under way, too, so that a report
    can be drawn; nothing runs on."""
    path = tmp_path / "raw.jsonl"
    slow = ["--conversations", "40", "--time-scale", "1", "--tool-s", "0.05", "--think-s", "0.05"]
    command = [sys.executable, "-m", "kvloop.cli", "bench", "--compare", "aggregated", "--sim"]
    command += ["qwen3-32b-h200", *SMALL.split(), *slow, "--rounds", "1", "--out", str(path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)
    try:
        deadline_s = time.monotonic() + 60
        while not (path.exists() and path.read_bytes().count(b'"kind":"window"') >= 1):  # the warm-up's
            assert process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        time.sleep(2)
        os.kill(process.pid, number)
        assert process.wait(30) == 130
    finally:
        process.kill()
    records = read_file(path)
    assert End("done") not in records
    assert any(isinstance(one, Request) and not one.warm_up for one in records)
