"""The profiles: whole, strict, and how far their timing is from what they were fitted to."""

from pathlib import Path

import pytest

from kvloop.errors import UserError
from kvloop.sim.profile import Step, Transfer, built_in, load_profile


@pytest.mark.parametrize("name", built_in())
def test_a_built_in_profile_is_whole(name: str) -> None:
    """Each can be read, and made faster; one that is a thousand times as fast takes a thousandth."""
    profile = load_profile(name)
    fast = profile.faster(1000)
    assert fast.limits == profile.limits
    assert fast.step.base_ns == round(profile.step.base_ns / 1000)
    assert load_profile(name).faster(1) == profile


def test_a_profile_says_how_far_it_was_fitted() -> None:
    """Those that were, and what else to know; the longest prompt is one that the model takes."""
    for name in built_in():
        profile = load_profile(name)
        assert profile.fitted_tokens <= profile.limits.model_tokens
        assert bool(profile.fitted_tokens) is bool(profile.caveat) is (name != "instant")


def test_a_step_takes_the_longer_of_weights_and_tokens() -> None:
    """Few tokens wait for the weights, many for the arithmetic; attention grows with the square; a prompt
    costs its own."""
    step = Step(base_ns=1000, prompt_ns=50, token_ns=100, pair_ps=2000)
    assert step.takes_ns([(1, 0)]) == 1000 + 2
    assert step.takes_ns([(1, 9), (1, 0)]) == 1000 + 20 + 2
    assert step.takes_ns([(20, 0)]) == 2000 + 2 * 210 + 50
    assert step.takes_ns([(10, 10), (10, 10)]) == 2000 + 2 * 2 * 155 + 50
    assert Transfer(5, 10, 3).busy_ns(2, 16) == 2 * (10 + 48)


@pytest.mark.parametrize(
    ("text", "mention"),
    [("", "missing"), ("title = 7", "Expected"), ("x = 1", "unknown field"), ("[", "profile")],
)
def test_a_profile_that_is_not_whole_is_refused(text: str, mention: str, tmp_path: Path) -> None:
    """A missing, unknown or mistyped field is an error that names it; so is a file that is not there."""
    path = tmp_path / "p.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=mention):
        load_profile(str(path))
    path.write_text(Path(__file__).parents[2].joinpath("src/kvloop/sim/profiles/instant.toml").read_text())
    assert load_profile(str(path)) == load_profile("instant")
    path.write_text(path.read_text().replace("blocks = 65536", "blocks = 10"))
    with pytest.raises(UserError, match="do not hold one request"):
        load_profile(str(path))
    with pytest.raises(UserError, match="choose from"):
        load_profile(str(tmp_path / "none"))
    with pytest.raises(UserError, match="positive"):
        load_profile("instant").faster(0)
