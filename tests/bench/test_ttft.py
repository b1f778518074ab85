"""A sample counts only if it was what it claims to be; targets stand where the sizes have them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvloop.bench import ttft
from kvloop.bench.report import Row
from kvloop.bench.ttft import Bench, Samples, Way, WrongSampleError, check
from kvloop.errors import UserError
from kvloop.local.chat import TurnResult

RETURN = Way(ttft.RETURN, "http://127.0.0.1:1", returns=True)
ONE_WAY = Way(ttft.ONE_WAY, "http://127.0.0.1:2", returns=False)
UPSTREAM = Way(ttft.UPSTREAM, "http://127.0.0.1:3", returns=True, names_reuse=False)
TOKENS, FIRST_TOKENS, LOADED = 570, 439, 453

RETURNED = TurnResult("text", "return", TOKENS, LOADED, LOADED, 0.4)
COMPUTED = TurnResult("text", "recompute", TOKENS, 0, 0, 1.6)


def test_a_true_sample_counts() -> None:
    """Each way's own kind of turn is accepted; upstream's router headers name no reuse."""
    check(RETURN, TOKENS, FIRST_TOKENS, RETURNED, LOADED)
    check(ONE_WAY, TOKENS, FIRST_TOKENS, COMPUTED, 0)
    check(UPSTREAM, TOKENS, FIRST_TOKENS, replace(RETURNED, reused_tokens=None), LOADED)


@pytest.mark.parametrize(
    ("way", "result", "loaded"),
    [
        pytest.param(RETURN, COMPUTED, 0, id="a return that was recomputed"),
        pytest.param(RETURN, RETURNED, 0, id="prefill loaded nothing"),
        pytest.param(RETURN, replace(RETURNED, reused_tokens=64), 64, id="less came back than decode held"),
        pytest.param(RETURN, RETURNED, LOADED - 1, id="two accounts that differ"),
        pytest.param(RETURN, replace(RETURNED, first_token_s=0.0), LOADED, id="no text at all"),
        pytest.param(RETURN, replace(RETURNED, prompt_tokens=None), LOADED, id="no usage"),
        pytest.param(RETURN, replace(RETURNED, prompt_tokens=1_900), LOADED, id="a prompt of another size"),
        pytest.param(ONE_WAY, RETURNED, LOADED, id="a one-way turn that returned"),
        pytest.param(ONE_WAY, COMPUTED, LOADED, id="a one-way turn that loaded"),
        pytest.param(UPSTREAM, replace(RETURNED, reused_tokens=None), 0, id="upstream that loaded nothing"),
    ],
)
def test_a_sample_of_the_wrong_thing_does_not_count(way: Way, result: TurnResult, loaded: int) -> None:
    """Whatever is not the planned turn by the planned way is thrown away."""
    with pytest.raises(WrongSampleError):
        check(way, TOKENS, FIRST_TOKENS, result, loaded)


def made(ours: list[float], one_way: list[float], upstream: list[float], tokens: int) -> list[Row]:
    """The rows of one size."""
    samples = Samples()
    for name, values in ((ttft.RETURN, ours), (ttft.ONE_WAY, one_way), (ttft.UPSTREAM, upstream)):
        samples.of(name, tokens).extend(values)
    return ttft.rows(samples, [tokens])


@pytest.mark.parametrize(("tokens", "least"), list(ttft.LEAST_SPEED_UP.items()))
def test_ratios_are_of_medians(tokens: int, least: float) -> None:
    """One outlier among three moves no verdict."""
    _, one_way, upstream = made([1.0, 1.0, 9.0], [least, least, 0.1], [2.0, 2.0, 0.1], tokens)
    assert one_way.figure == least
    assert one_way.met is True
    assert upstream.figure == 0.5
    assert upstream.met is True


def test_slow_returns_miss() -> None:
    """Targets are missed on either side: too little faster, and too near to upstream."""
    _, one_way, upstream = made([1.0], [3.4], [1.6], 570)
    assert one_way.met is False
    assert upstream.met is False


def test_what_was_not_measured_is_missed() -> None:
    """No samples: no verdict in favour."""
    assert [row.met for row in made([1.0], [], [], 570)] == [None, False, False]


def test_a_size_without_a_target_has_no_verdict_against_one_way() -> None:
    """A size of one's own is measured for information."""
    _, one_way, _ = made([1.0], [2.0], [2.0], 1_000)
    assert one_way.met is None


SIZES = (570, 1_900)
REPETITIONS = Counter({570: 3, 1_900: 2})
CONVERSATION_S = 100.0


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, tuple[Way, ...]]]:
    """Conversations are noted, not held: their sizes, with the order of ways; each takes 100 s."""
    noted: list[tuple[int, tuple[Way, ...]]] = []
    monkeypatch.setattr(ttft, "served_model", lambda _url: "tiny")
    monkeypatch.setattr(ttft, "counter", lambda _url, _model: None)
    monkeypatch.setattr(ttft.time, "monotonic", lambda: len(noted) * CONVERSATION_S)

    def conversation(_: Bench, tokens: int, ways: Sequence[Way], _samples: Samples) -> None:
        noted.append((tokens, tuple(ways)))

    monkeypatch.setattr(Bench, "_conversation", conversation)
    return noted


def bench(ways: Sequence[Way] = (RETURN, ONE_WAY)) -> Bench:
    """A bench on engines that nobody asks."""
    engine: Any = SimpleNamespace(url="http://127.0.0.1:4")
    stack: Any = SimpleNamespace(url=engine.url, prefill=[engine])
    return Bench(stack, ways, "seed", lambda _: None)


def test_sizes_take_turns_and_so_do_ways(taken: list[tuple[int, tuple[Way, ...]]]) -> None:
    """A machine that becomes slower meanwhile is slower for every size and way alike."""
    bench().run(SIZES, REPETITIONS.__getitem__, Samples())
    assert [tokens for tokens, _ in taken[1:]] == [570, 1_900, 570, 1_900, 570]
    assert [ways[0] for _, ways in taken[1:]] == [RETURN, RETURN, ONE_WAY, ONE_WAY, RETURN]


@pytest.mark.parametrize(("budget_s", "counts"), [(50, [1, 1]), (250, [2, 2]), (10_000, [3, 2])])
def test_time_ends_the_rounds_but_not_the_first(
    budget_s: float, counts: list[int], taken: list[tuple[int, tuple[Way, ...]]]
) -> None:
    """Each size has a sample, however slow; no round begins after the budget."""
    bench().run(SIZES, REPETITIONS.__getitem__, Samples(), budget_s=budget_s)
    assert [sum(tokens == size for tokens, _ in taken[1:]) for size in SIZES] == counts


def test_a_sample_that_fails_is_taken_again_and_too_many_fail_the_part(
    monkeypatch: pytest.MonkeyPatch, taken: list[tuple[int, tuple[Way, ...]]]
) -> None:
    """`MAX_DISCARDED` of a size may go wrong; the next one is an error."""
    allowed = ttft.MAX_DISCARDED
    failures = [False] + [True] * allowed + [False] * 5 + [True] * (allowed + 1)

    def conversation(_: Bench, tokens: int, _ways: Sequence[Way], _samples: Samples) -> None:
        taken.append((tokens, ()))
        if failures.pop(0):
            raise WrongSampleError("loaded nothing")

    monkeypatch.setattr(Bench, "_conversation", conversation)
    bench().run(SIZES, REPETITIONS.__getitem__, Samples())
    assert len(taken) == 1 + 5 + allowed
    failures.insert(0, False)
    with pytest.raises(UserError, match="loaded nothing"):
        bench().run(SIZES, REPETITIONS.__getitem__, Samples())
