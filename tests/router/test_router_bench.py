"""The bench measures what it says, and its status follows its table."""

import re

import pytest

from kvloop.bench import router as bench


def row(added_ms: float) -> bench.Row:
    """A measured case."""
    return bench.Row("a case", 0.2, 0.2 + added_ms, added_ms, added_ms, 0.1)


def test_verdict() -> None:
    """A row says met under its target, and missed at it."""
    lines = bench.table([row(1.999), row(2.0)]).splitlines()
    assert [line.split()[-1] for line in lines[1:]] == ["met", "MISSED"]


def test_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """It runs against a real router, prints every case, and the status says whether all targets were met."""
    status = bench.main(["--pairs", "2"])
    lines = capsys.readouterr().out.splitlines()
    verdicts = [line.split()[-1] for line in lines if re.search(r"(met|MISSED)$", line)]
    assert len(verdicts) == 3
    assert status == int("MISSED" in verdicts)
