"""The command: its parts and sizes, and that a part which cannot be measured fails the run."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvloop.bench import return_path, ttft
from kvloop.bench import router as router_bench
from kvloop.errors import UserError

TRUE_CASE = router_bench.Row("64 KB", 1.0, 2.0, 1.0, 1.5, 0.5)


@pytest.fixture
def no_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever starts engines fails to, and the router's benchmark has one case that meets its target."""

    def refuse(*_: Any, **__: Any) -> None:
        raise UserError("prefill-0 ended with status 1 while starting")

    monkeypatch.setattr(return_path, "Stack", refuse)
    monkeypatch.setattr(router_bench, "measure", lambda _pairs: [TRUE_CASE])


@pytest.mark.usefixtures("no_engines")
def test_a_part_that_cannot_be_measured_fails_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other parts' rows are printed, the failure is said, the status is 1, and the JSON has both."""
    path = tmp_path / "rows.json"
    assert return_path.main(["--only", "idle,router", "--json", str(path)]) == 1
    out = capsys.readouterr().out
    assert "router adds" in out
    assert "not measured: kvloop's engines: prefill-0 ended with status 1" in out
    told = json.loads(path.read_text())
    assert len(told["rows"]) == len(told["failures"]) == 1


def test_an_interrupt_keeps_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C in a later part shows the rows of the earlier ones, says that there are more, and fails."""

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(router_bench, "measure", lambda _pairs: [TRUE_CASE])
    monkeypatch.setattr(return_path, "_measure_kvloop", lambda *_: None)
    monkeypatch.setattr(return_path, "Stack", interrupted)
    assert return_path.main(["--only", "ttft,router"]) == 1
    out = capsys.readouterr().out
    assert "router adds" in out
    assert "not measured: the rest: interrupted" in out


@pytest.mark.usefixtures("no_engines")
def test_the_status_is_zero_where_all_is_met(capsys: pytest.CaptureFixture[str]) -> None:
    """A run of one part that meets its target succeeds."""
    assert return_path.main(["--only", "router"]) == 0
    assert "met" in capsys.readouterr().out


@pytest.mark.usefixtures("no_engines")
def test_every_target_of_the_first_token_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    """Without one sample each size's targets are there, and missed."""
    assert return_path.main(["--only", "ttft"]) == 1
    out = capsys.readouterr().out
    for tokens in ttft.LEAST_SPEED_UP:
        assert f"TTFT one-way / return, {tokens} tokens" in out
        assert f"TTFT return / upstream, {tokens} tokens" in out
    assert out.count("MISSED") == 2 * len(ttft.LEAST_SPEED_UP)


@pytest.mark.parametrize(
    ("words", "counts"), [([], [9, 5, 3]), (["--repetitions", "2"], [2, 2, 2]), (["--quick"], [1, 1, 1])]
)
def test_short_turns_get_more_samples(
    words: list[str], counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A size's own number of samples counts unless the command line says another."""
    seen: list[return_path.Options] = []

    def nothing(options: return_path.Options) -> tuple[list[Any], list[str]]:
        seen.append(options)
        return [], []

    monkeypatch.setattr(return_path, "measure", nothing)
    return_path.main(words)
    assert [seen[0].samples_of(tokens) for tokens in (570, 1_900, 5_600)] == counts


def test_an_unknown_part_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """A part that does not exist is not silently left out."""
    with pytest.raises(SystemExit):
        return_path.main(["--only", "claims"])
    assert "claims" in capsys.readouterr().err


def test_sizes_that_are_no_numbers_are_the_user_s_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    """Said before anything starts."""
    with pytest.raises(SystemExit) as ended:
        return_path.main(["--sizes", "570,many"])
    assert ended.value.code == 2
    assert "--sizes takes numbers" in capsys.readouterr().err
