"""The simulation beside real engines: scripts, errors, verdicts, and which samples count."""

from collections.abc import Sequence

import pytest

from kvloop.bench import agreement, agreement_engines, calibrate
from kvloop.bench.agreement_engines import (
    SCRIPTS,
    Reuse,
    Step,
    Times,
    error_percent,
    play,
    reuse_rows,
    sample,
    time_rows,
)
from kvloop.bench.report import Bound, Row, Target
from kvloop.bench.token_turn import Forks, TokenTurn, known_reuse
from kvloop.errors import UserError


class _Decode:
    """Holds what its last turn came to, and gives back what it should, or so much less."""

    def __init__(self, less: int = 0) -> None:
        self.prompts: list[list[int]] = []
        self._history: list[int] = []
        self._less = less

    def __call__(self, prompt: Sequence[int], answer_tokens: int, session: str) -> TokenTurn:
        del session
        self.prompts.append(list(prompt))
        reused = max(0, known_reuse(self._history, prompt) - self._less)
        answer = tuple(range(len(self.prompts) * 100, len(self.prompts) * 100 + answer_tokens))
        self._history = [*prompt, *answer]
        return TokenTurn("return", reused, answer=answer)


def test_a_script_is_played() -> None:
    """Each prompt is what its step keeps of the conversation, and so much more."""
    decode = _Decode()
    turns = play(decode, (Step(300, 20), Step(150), Step(70, keep=200), Step(0, keep=-16)), "s")
    first, second, third, fourth = decode.prompts
    assert second[:320] == [*first, *range(100, 120)]
    assert (len(second), len(third), third[:200]) == (470, 270, second[:200])
    assert fourth == third
    assert turns == [Reuse(0, 0), Reuse(319, 319), Reuse(192, 192), Reuse(256, 256)]


def test_the_scripts_have_turns_that_reuse_and_turns_that_must_not() -> None:
    """Continued ones to the token, edited ones to a segment, and two that bring nothing back."""
    known = {name: [turn.known for turn in play(_Decode(), steps, name)] for name, steps in SCRIPTS.items()}
    later = [count for counts in known.values() for count in counts[1:]]
    assert known["continued"] == [0, 319, 485, 602]
    assert known["edited at token 200"] == [0, 515, 192, 665]
    assert known["asked again"] == [0, 415, 448, 511]
    assert (len(later), later.count(0)) == (15, 2)


def test_errors_are_of_medians_and_judged_both_ways() -> None:
    """15 % more or less is met, more than that is missed, and one outlier among three moves nothing."""
    real = Times({570: [2.0, 2.0, 9.0]}, {570: [4.0]})
    for factor, met in ((1.149, True), (0.851, True), (1.16, False), (0.84, False)):
        simulated = Times({570: [2.0 * factor, 0.1, 99.0]}, {570: [4.0]})
        one_way, returned = time_rows(real, simulated)
        assert (one_way.figure, one_way.met) == (0, True)
        assert returned.met is met
        assert returned.figure == pytest.approx(abs(100 * (factor - 1)))
    assert error_percent(2.0, 1.0) == -50


@pytest.mark.parametrize("counts", [(319, 319, 319), (318, 319, 319), (319, 318, 319), (318, 318, 319)])
def test_reuse_is_exact_or_missed(counts: tuple[int, int, int]) -> None:
    """One token of difference between any of the three is too many; first turns are no matter."""
    real, simulated, known = counts
    (row,) = reuse_rows(
        {"a": [Reuse(0, 0), Reuse(real, known)]}, {"a": [Reuse(0, 0), Reuse(simulated, known)]}
    )
    assert row.met is (len(set(counts)) == 1)
    assert row.detail == f"{real} real, {simulated} simulated, {known} known"


class _Side:
    """Takes what it is told to, and fails at the given calls."""

    name = "s"

    def __init__(self, failing: Sequence[int] = ()) -> None:
        self.calls = 0
        self.orders: list[bool] = []
        self._failing = failing

    def forks(self, seed: str, tokens: int, *, returned_first: bool) -> Forks:
        """One sample, worth its number."""
        del seed, tokens
        self.calls += 1
        if self.calls in self._failing:
            raise UserError("not as planned")
        self.orders.append(returned_first)
        taken = TokenTurn("return", 1, first_token_s=float(self.calls))
        return Forks(taken, taken)


def test_samples_that_are_not_as_planned_are_taken_again() -> None:
    """On both sides alike, so that they stay pairs; the first conversation is not counted; order turns."""
    sides = (_Side(), _Side(failing=[3]))
    real, simulated = sample(sides, "s", {570: 3}, lambda _: None)  # type: ignore[arg-type]
    assert real.returned == {570: [2.0, 4.0, 5.0]}
    assert simulated.returned == {570: [2.0, 4.0, 5.0]}
    assert sides[1].orders == [True, True, False, True]


def test_too_many_of_them_are_an_error() -> None:
    """Two may fail, not three."""
    sample([_Side(failing=[2, 3])], "s", {570: 1}, lambda _: None)  # type: ignore[list-item]
    with pytest.raises(UserError):
        sample([_Side(failing=[2, 3, 4])], "s", {570: 1}, lambda _: None)  # type: ignore[list-item]


def test_parts_can_be_chosen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Only those named are run; a part that fails is said, and fails the run."""
    row = Row("x", 1, "", Target(Bound.AT_MOST, 1))
    monkeypatch.setattr(agreement, "measure", lambda *_: [row])
    monkeypatch.setattr(agreement, "published_rows", lambda: pytest.fail("it was not asked for"))
    assert agreement.main(["--only", "engines"]) == 0

    def fails(*_: object) -> list[Row]:
        raise UserError("no engines here")

    monkeypatch.setattr(agreement, "measure", fails)
    assert agreement.main(["--only", "engines"]) == 1
    assert "engines: no engines here" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        agreement.main(["--only", "others"])


def test_the_profile_is_judged_where_it_was_not_fitted() -> None:
    """No prompt size is both."""
    judged = {*agreement_engines.REPETITIONS, *agreement_engines.QUICK_REPETITIONS}
    assert not judged & {*calibrate.REPETITIONS, *calibrate.QUICK_REPETITIONS}
