"""The choice of settings, on runs whose outcome is made up."""

from collections.abc import Callable

from kvloop.bench.planning.arrangement import Arrangement, kvloop
from kvloop.bench.planning.choose import best, most_runs, search
from kvloop.bench.planning.run import Came
from tests.bench.planning.small import came

Rule = Callable[[Arrangement], tuple[float, float]]


def searched(rule: Rule, start: Arrangement, *, change: bool = True, quick: bool = False) -> tuple[Came, int]:
    """What is chosen where `rule` says p90 and memory, and how many runs that took."""
    played: dict[Arrangement, Came] = {}

    def play(arrangement: Arrangement) -> Came:
        if arrangement not in played:
            p90_ms, held = rule(arrangement)
            played[arrangement] = came(p90_ms, held, arrangement)
        return played[arrangement]

    chosen = search(start, play, may_change_ratio=change, is_quick=quick)
    assert len(played) <= most_runs(start, may_change_ratio=change, is_quick=quick)
    return chosen[-1].came, len(played)


def test_the_faster_one_is_taken_whatever_it_holds() -> None:
    """By more than 3 %."""
    slow, fast = came(104, 10), came(100, 1000)
    assert best([slow, fast]) is fast
    assert best([fast, slow]) is fast


def test_among_equally_fast_ones_the_less_held_decides() -> None:
    """Within 3 %, also where the one that holds less is the slower one."""
    more, less = came(100, 1000), came(102, 800)
    assert best([more, less]) is less
    assert best([less, more]) is less


def test_what_there_is_stays_where_nothing_is_better_by_enough() -> None:
    """Neither by 3 % of the time nor by a tenth of the memory."""
    first, other = came(102, 1000), came(100, 950)
    assert best([first, other]) is first


def test_what_does_not_keep_up_is_not_chosen() -> None:
    """However fast it was until then; unless nothing does."""
    fast, slow = came(10, 0, is_through=False), came(1000, 0)
    assert best([fast, slow]) is slow
    nothing = came(None, 0, is_through=False)
    assert best([nothing, fast]) is nothing


def test_each_setting_is_found_from_the_one_before() -> None:
    """A case that demands 1:3, a TTL of 120 s and a threshold of 256."""

    def rule(one: Arrangement) -> tuple[float, float]:
        p90_ms = 100 + 50 * abs(one.prefill - 1)
        p90_ms += 0 if one.ttl_s == 120 else 20
        return p90_ms, 100 if one.threshold_tokens == 256 else 1000

    found, runs = searched(rule, kvloop(2, 2))
    assert found.arrangement == Arrangement(found.arrangement.way, 1, 3, 256, 120)
    assert runs == 3 + 3 + 2


def test_the_ratio_that_was_given_stays() -> None:
    """And with two engines there is no other."""

    def rule(one: Arrangement) -> tuple[float, float]:
        return 100 * one.prefill, 0

    assert searched(rule, kvloop(3, 1), change=False)[0].arrangement.ratio == "3:1"
    assert searched(rule, kvloop(1, 1))[0].arrangement.ratio == "1:1"


def test_of_many_engines_ratios_are_tried_while_they_help() -> None:
    """On both sides of the given one, and not all of them."""

    def rule(one: Arrangement) -> tuple[float, float]:
        return 100 + 10 * abs(one.prefill - 13), 0

    found, runs = searched(rule, kvloop(10, 10))
    assert found.arrangement.ratio == "13:7"
    assert runs <= 8 + 5


def test_a_quick_plan_tries_little() -> None:
    """Two kinds of leases, two thresholds."""
    assert searched(lambda _: (100, 100), kvloop(1, 1), quick=True)[1] == 3


def test_reasons_have_the_numbers_that_decided() -> None:
    """Of each that was tried; and that an idle fleet says nothing about ratios."""

    def play(one: Arrangement) -> Came:
        return came(100 + one.prefill, 5000, one, busy_share=0.01)

    ratio, leases, threshold = search(kvloop(2, 1), play, may_change_ratio=True, is_quick=False)
    assert (ratio.what, leases.what) == ("prefill:decode", "leases")
    assert "2:1: p90 102 ms, 5,000 tokens held; 1:2: p90 101 ms" in ratio.why
    assert "prefill is busy 1.0 % of the time at most" in ratio.why
    assert threshold.why.startswith("64 is what there is")
    assert "1024: p90 102 ms" in threshold.why
