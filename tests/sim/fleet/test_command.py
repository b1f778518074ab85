"""`kvloop sim fleet` and `kvloop sim replay`: what they say, and when they say that all is well."""

import re

import pytest

from kvloop.cli import USER_ERROR_STATUS, main
from kvloop.sim.fleet.plan import draw
from tests.sim.fleet.broken_leases import proof_rounded_up
from tests.sim.fleet.test_mutations import CAUGHT

SEED = 3
BROKEN_SEED = CAUGHT["proof_rounded_up"][0]


def test_a_run_says_everything_that_was_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    """The seed, every option, what came of it; status 0 where every checker held."""
    assert main(["sim", "fleet", "--seed", str(SEED)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[:-1] == draw(SEED).lines()
    assert said[0] == f"seed = {SEED}"
    assert re.search(rf"^seed {SEED}: .*trace [0-9a-f]{{32}}: every checker held$", said[-1])


def test_a_run_without_a_seed_says_which_it_took(capsys: pytest.CaptureFixture[str]) -> None:
    """One that nobody has had; the same again with that seed."""
    assert main(["sim", "fleet"]) == 0
    said = capsys.readouterr().out
    seed = said.splitlines()[0].removeprefix("seed = ")
    assert main(["sim", "fleet", "--seed", seed]) == 0
    assert capsys.readouterr().out == said


def test_a_replay_is_the_same_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Its last line is the run's own, and before it are so many events as were asked for."""
    assert main(["sim", "fleet", "--seed", str(SEED)]) == 0
    run = capsys.readouterr().out.splitlines()
    assert main(["sim", "replay", str(SEED), "--lines", "7"]) == 0
    replay = capsys.readouterr().out.splitlines()
    assert replay[-1] == run[-1]
    assert replay[: len(run) - 1] == run[:-1]
    assert len(replay) == len(run) + 7


def test_a_failure_is_shown_and_shown_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status 1, the checker and how to replay it; and the replay ends with what led to it."""
    proof_rounded_up(monkeypatch)
    assert main(["sim", "fleet", "--seed", str(BROKEN_SEED), "--count", "1"]) == 1
    run = capsys.readouterr().out.splitlines()
    assert "NeverAWrongToken" in run[-2]
    command = f"kvloop sim replay {BROKEN_SEED}"
    assert run[-1].endswith(command)
    assert main(command.split()[1:]) == 1
    replay = capsys.readouterr().out
    assert run[-2] in replay
    assert re.search(r"^ +\d+\.\d{6} [dp]\d +ends .* True ", replay, re.MULTILINE)


def test_one_failure_among_many_is_enough(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status is 1, and the failed seed's options are there."""
    proof_rounded_up(monkeypatch)
    assert main(["sim", "fleet", "--seed", "0", "--count", str(BROKEN_SEED + 1)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert f"seed = {BROKEN_SEED}" in said
    held = re.match(rf"(\d+) of {BROKEN_SEED + 1} seeds held", said[-1])
    assert held is not None
    assert int(held[1]) <= BROKEN_SEED


def test_an_option_can_be_set(capsys: pytest.CaptureFixture[str]) -> None:
    """In place of what would be drawn; what is no option, or no number, is the user's mistake."""
    assert main(["sim", "fleet", "--seed", str(SEED), "--set", "decode=5", "--set", "prefix_cache=True"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "decode = 5" in said
    assert "prefix_cache = True" in said
    for wrong in ("decodes=5", "decode=five", "decode=-1", "decode=10001", "seed=4", "decode"):
        assert main(["sim", "replay", str(SEED), "--set", wrong]) == USER_ERROR_STATUS
        assert "--set" in capsys.readouterr().err


def test_no_seeds_are_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    """Where nothing ran, nothing held."""
    assert main(["sim", "fleet", "--count", "0"]) == USER_ERROR_STATUS
    assert "--count 0" in capsys.readouterr().err
