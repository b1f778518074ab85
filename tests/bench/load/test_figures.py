"""Figures of raw files small enough to reckon by hand."""

import pytest

from kvloop.bench.load.figures import figures_of, is_sound
from kvloop.bench.load.leg import LegFigures
from kvloop.bench.load.lengths import bucket_of, bucket_text
from kvloop.bench.load.record import End, Record
from kvloop.bench.load.spread import quantile, spread_of, told, told_of
from tests.bench.load.made_up import MIB, asked, held, run_of, window


def only(*records: Record) -> LegFigures:
    """The figures of the one leg that these records are of."""
    (leg,) = figures_of([run_of("a"), *records, End("done")]).legs
    return leg


def test_spread() -> None:
    """Quantiles lie between their neighbours in proportion; what cannot be is passed over."""
    spread = spread_of([4.0, None, 1.0, -5.0, 2.0, float("nan"), 3.0, float("inf"), 5.0])
    assert spread is not None
    assert (spread.n, spread.mean, spread.q1, spread.median, spread.q3, spread.most) == (5, 3, 2, 3, 4, 5)
    assert (spread.p90, spread.p99) == (pytest.approx(4.6), pytest.approx(4.96))
    assert quantile([1.0, 2.0], 0.25) == 1.25
    assert spread_of([None, 10**400]) is None
    odd = [None, 0.0, 1e-12, -1e-12, 1e15, 1.1e15, 7, 10**400, float("nan"), float("-inf")]
    assert told_of(odd) == [one for one in map(told, odd) if one is not None] == [0.0, 0.0, 1e15, 7.0]


def test_warm_up_is_left_out_of_times_and_counted() -> None:
    """Neither its time nor its tokens; nor are those of requests that failed."""
    leg = only(
        asked("a", first_ms=9000.0, warm_up=True, prompt_tokens=100, cached_tokens=100),
        asked("a", 1, first_ms=10.0, prompt_tokens=100, cached_tokens=50),
        asked("a", 2, first_ms=30.0),
        asked("a", 3, first_ms=5000.0, status=500),
        asked("a", 4, first_ms=5000.0, error="the stream broke"),
    )
    assert (leg.asked, leg.warm_up, leg.failed) == (4, 1, 2)
    assert leg.ttft_ms is not None
    assert (leg.ttft_ms.n, leg.ttft_ms.median) == (2, 20.0)
    assert leg.tokens.prompt == 100


def test_turns_after_the_first_have_a_figure_of_their_own() -> None:
    """Turn 0 has nothing to come back to."""
    leg = only(asked("a", 0, first_ms=100.0), asked("a", 1, first_ms=10.0), asked("a", 2, first_ms=20.0))
    assert leg.later_ttft_ms is not None
    assert (leg.later_ttft_ms.n, leg.later_ttft_ms.median) == (2, 15.0)


def test_by_route_and_by_length() -> None:
    """A prompt is in the bucket of its length as counted, else as planned; what is not told has no row."""
    leg = only(
        asked("a", 0, first_ms=10.0, route="return", prompt_tokens=1023, planned_tokens=4000),
        asked("a", 1, first_ms=20.0, route="return", planned_tokens=1024),
        asked("a", 2, first_ms=40.0, prompt_tokens=511),
        asked("a", 3, first_ms=80.0),
    )
    assert {route: (some.n, some.median) for route, some in leg.by_route.items()} == {"return": (2, 15.0)}
    ttft = {bucket: some.ttft_ms and some.ttft_ms.median for bucket, some in leg.by_bucket.items()}
    assert ttft == {0: 40.0, 512: 10.0, 1024: 20.0}


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (0, "below 0.5k"),
        (511, "below 0.5k"),
        (512, "0.5k-1k"),
        (1900, "1k-2k"),
        (5600, "4k-8k"),
        (2**20, "1M-2M"),
    ],
)
def test_buckets_double(tokens: int, text: str) -> None:
    """From 512 tokens on, each goes to twice where it begins."""
    assert bucket_text(bucket_of(tokens)) == text


def test_after_the_first_token() -> None:
    """Gaps of all requests together; a token's time is the stream's by the tokens after the first."""
    leg = only(
        asked("a", 0, first_ms=10.0, took_ms=40.0, answer_tokens=4, between_ms=[10.0, 10.0, 10.0]),
        asked("a", 1, first_ms=10.0, took_ms=50.0, answer_tokens=2, between_ms=[40.0]),
        asked("a", 2, first_ms=10.0, took_ms=50.0, answer_tokens=1),
    )
    assert leg.between_ms is not None
    assert (leg.between_ms.n, leg.between_ms.mean, leg.between_ms.median) == (4, 17.5, 10.0)
    assert leg.per_token_ms is not None
    assert (leg.per_token_ms.n, leg.per_token_ms.median) == (2, 25.0)


def test_rates_are_over_windows() -> None:
    """All that a window answered by the time it took; windows of warm-up alone are no part of either."""
    leg = only(
        asked("a", 0, round=0, warm_up=True, answer_tokens=1000),
        window("a", 100.0, 0, cpu_s=100.0),
        asked("a", 0, round=1, warm_up=True, answer_tokens=10),
        asked("a", 1, round=1, answer_tokens=10),
        asked("a", 2, round=1, answer_tokens=10, status=503),
        window("a", 4.0, 1, cpu_s=3.0, client_cpu_s=1.0, transferred_bytes=8e9, transfer_s=2.0),
        asked("a", 1, round=2, answer_tokens=20),
        asked("a", 2, round=2, answer_tokens=20),
        window("a", 4.0, 2, cpu_s=5.0, client_cpu_s=1.0),
        asked("a", 1, round=3, answer_tokens=1000),
    )
    rates = leg.rates
    assert (rates.windows, rates.took_s) == (2, 8.0)
    assert (rates.requests_per_s, rates.answer_tokens_per_s) == (0.5, 7.5)
    assert (rates.cpu_s_per_1000, rates.client_share) == (2000.0, 0.25)
    assert rates.transfer_bytes_per_s == 4e9


def test_cpu_of_processes_that_are_not_ours_is_not_told() -> None:
    """Half of the windows is not all of them."""
    leg = only(asked("a"), window("a", 4.0, cpu_s=1.0), window("a", 4.0))
    assert leg.rates.cpu_s_per_1000 is None


def test_tokens_and_their_share() -> None:
    """Of requests that tell both; no more is cached than there is."""
    leg = only(
        asked("a", 0, prompt_tokens=100, cached_tokens=0, reused_tokens=0),
        asked("a", 1, prompt_tokens=100, cached_tokens=60, reused_tokens=50),
        asked("a", 2, prompt_tokens=300),
        asked("a", 3, prompt_tokens=100, cached_tokens=400),
    )
    tokens = leg.tokens
    assert (tokens.prompt, tokens.computed, tokens.reused) == (600, 140, 50)
    assert tokens.share == pytest.approx(160 / 300)
    assert leg.share_by_turn == {0: 0.0, 1: 0.6, 3: 1.0}


def test_prefill_is_split_where_both_parts_are_told() -> None:
    """Means by length, which add up; spreads over all that tell the part."""
    leg = only(
        asked("a", 0, prompt_tokens=600, compute_ms=10.0, transfer_ms=2.0),
        asked("a", 1, prompt_tokens=700, compute_ms=20.0, transfer_ms=4.0),
        asked("a", 2, prompt_tokens=800, compute_ms=90.0),
    )
    bucket = leg.by_bucket[512]
    assert (bucket.split, bucket.compute_ms, bucket.transfer_ms) == (2, 15.0, 3.0)
    assert leg.compute_ms is not None
    assert (leg.compute_ms.n, leg.compute_ms.median) == (3, 20.0)


def test_memory_held() -> None:
    """Mean and most over all samples but those of warm-up."""
    leg = only(
        asked("a", warm_up=True),
        held("a", 1.0, 900.0 * MIB),
        asked("a", round=1),
        held("a", 1.0, 1.0 * MIB, 1),
        held("a", 2.0, 3.0 * MIB, 1),
        held("a", 3.0, None, 1),
    )
    assert (leg.held.samples, leg.held.mean_bytes, leg.held.most_bytes) == (3, 2.0 * MIB, 3.0 * MIB)
    assert leg.held.mean_usage is None


@pytest.mark.parametrize(
    ("records", "sound"),
    [
        ([asked("a")], True),
        ([asked("a", agrees=True)], True),
        ([asked("a"), asked("a", 1, agrees=False)], False),
        ([asked("a"), asked("a", 1, agrees=False, warm_up=True)], False),
        ([asked("a"), asked("a", 1, status=500)], False),
        ([asked("a"), asked("a", 1, status=0, error="refused")], False),
        ([asked("a"), asked("a", 1, error="cut")], False),
        ([asked("a", warm_up=True)], False),
        ([], False),
        ([asked("a"), asked("b", status=404)], False),
    ],
)
def test_sound(records: list[Record], sound: bool) -> None:
    """Something was measured, nothing failed and nothing differs, in warm-up neither."""
    assert is_sound(figures_of([run_of("a"), *records])) is sound


def test_a_run_without_legs_is_not_sound() -> None:
    """A benchmark that looked at nothing has found nothing."""
    assert not is_sound(figures_of([run_of(), End("done")]))
    assert not is_sound(figures_of([]))


def test_cut_off() -> None:
    """No last line, or one that gives a reason."""
    assert figures_of([run_of("a")]).cut_off == "the file ends before the run does"
    assert figures_of([run_of("a"), End("interrupted")]).cut_off == "interrupted"
    assert figures_of([run_of("a"), End("done")]).cut_off is None


def test_legs_are_in_the_order_of_the_run() -> None:
    """Those that nobody announced come behind, and none is lost."""
    figures = figures_of([run_of("a", "b"), asked("x"), asked("b"), asked("a")])
    assert [leg.name for leg in figures.legs] == ["a", "b", "x"]
