"""`kvloop bench report`: from a raw file alone, with the run's own verdict as exit status."""

import argparse
import json
from pathlib import Path

import msgspec
import pytest

from kvloop.bench.load.record import End, Record, line_of
from kvloop.bench.load.report_command import add_report_arguments, run_report
from kvloop.errors import UserError
from tests.bench.load.made_up import a_whole_run, asked, run_of


def report(*words: str) -> int:
    """The command's exit status."""
    parser = argparse.ArgumentParser()
    add_report_arguments(parser)
    return run_report(parser.parse_args(words))


def raw(path: Path, *records: Record) -> str:
    """A raw file of these."""
    path.write_bytes(b"".join(map(line_of, records)))
    return str(path)


def test_everything_from_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table is printed, page and figures are written, and the status is 0."""
    page, figures = tmp_path / "report.html", tmp_path / "figures.json"
    assert report(raw(tmp_path / "raw", *a_whole_run()), "--html", str(page), "--json", str(figures)) == 0
    printed = capsys.readouterr().out
    assert "time to the first token (TTFT), ms" in printed
    assert "sound: 1,120 requests measured, none failed; 1,152 answers compared" in printed
    assert page.read_text().startswith("<!DOCTYPE html>")
    told = json.loads(figures.read_text())
    assert told["sound"] is True
    assert [leg["name"] for leg in told["legs"]] == ["aggregated", "one-way", "upstream", "kvloop"]
    assert told["legs"][0]["ttft_ms"]["n"] == 280
    assert told["run"]["seed"] == 7


@pytest.mark.parametrize(
    "wrong", [asked("a", 1, agrees=False), asked("a", 1, status=500), asked("a", 1, error="the stream broke")]
)
def test_what_is_wrong_is_the_exit_status(wrong: Record, tmp_path: Path) -> None:
    """One answer that differs, or one request that failed, is enough."""
    path = tmp_path / "raw"
    assert report(raw(path, run_of("a"), asked("a"), End("done"))) == 0
    assert report(raw(path, run_of("a"), asked("a"), wrong, End("done"))) == 1


def test_a_file_that_was_cut_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the middle of its last line: what was written before it is reported, and that it is not all."""
    path = tmp_path / "raw"
    path.write_bytes(b"".join(map(line_of, [run_of("a"), asked("a"), asked("a", 1)]))[:-20])
    assert report(str(path)) == 0
    printed = capsys.readouterr().out
    assert "CUT OFF: the file ends before the run does" in printed
    assert "sound: 1 requests measured" in printed


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "there is nothing in it"),
        (b"{}\n", "line 1: "),
        (line_of(run_of("a")) + b'{"kind":"sample","leg":"a","round":"x"}\n', "line 2: .*round"),
        (
            line_of(run_of("a")) + b'{"kind":"end","why":"done","z":' + b"[" * 100_000 + b"\n",
            "line 2: .*recursion",
        ),
        (line_of(msgspec.structs.replace(run_of("a"), format=99)), "format 99"),
        (line_of(asked("a")), "line 1: "),
        (b"\xff\xfe\n", "line 1: "),
    ],
)
def test_what_is_no_raw_file(content: bytes, said: str, tmp_path: Path) -> None:
    """One line that names the file, its line and the field."""
    path = tmp_path / "raw"
    path.write_bytes(content)
    with pytest.raises(UserError, match=said) as caught:
        report(str(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be(tmp_path: Path) -> None:
    """No raw file, no place to write, and a raw file that would overwrite itself."""
    path = raw(tmp_path / "raw", run_of("a"), asked("a"))
    before = Path(path).read_bytes()
    with pytest.raises(UserError, match="No such file"):
        report(str(tmp_path / "none"))
    with pytest.raises(UserError, match="directory"):
        report(path, "--html", str(tmp_path))
    with pytest.raises(UserError, match="No such file"):
        report(path, "--json", str(tmp_path / "no" / "figures.json"))
    with pytest.raises(UserError, match="the raw file itself"):
        report(path, "--html", path)
    assert Path(path).read_bytes() == before
