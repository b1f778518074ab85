"""The verdicts on routers beside one another: what is divided by what, and what a missing one does."""

from dataclasses import replace

import pytest

from kvloop.bench.peers import KVLOOP, SMG, VLLM_ROUTER
from kvloop.bench.report import Row
from kvloop.bench.router_cases import CASES, IDLE, MANY, PACED, QUICK, Samples, figures, rows_of
from kvloop.bench.router_load import Sample

SAMPLE = Sample(
    seconds=2.0,
    requests=2000,
    events=66_000,
    late=0,
    behind_ms=1.0,
    p50_ms=1.0,
    p99_ms=2.0,
    clients=16,
    cpu_s=1.0,
    rss_kib=40_960,
)
PLAIN, ALONE = "plain 2 KB, 16 clients", "plain 2 KB, 1 client"


def verdicts(samples: Samples, most_streams: int = 30_000) -> dict[str, Row]:
    """The rows of all cases, by what they say."""
    return {row.what: row for row in rows_of(CASES, samples, most_streams)}


def times(factor: float) -> Sample:
    """A router so many times as fast."""
    return replace(SAMPLE, requests=int(2000 * factor), events=int(66_000 * factor), p50_ms=1 / factor)


@pytest.mark.parametrize(("factor", "met"), [(2.0, True), (1.99, False)])
def test_requests_against_vllm_router(factor: float, met: bool) -> None:
    """Twice vllm-router's requests meet the target, and a little less does not."""
    row = verdicts({PLAIN: {KVLOOP: [times(factor)], VLLM_ROUTER: [SAMPLE]}})[
        f"{PLAIN}: requests/s, ÷ vllm-router's"
    ]
    assert row.met is met
    assert row.figure == pytest.approx(factor)


def test_medians_of_rounds() -> None:
    """One round that went badly decides nothing."""
    ours = [times(2.5), times(0.1), times(2.4)]
    row = verdicts({PLAIN: {KVLOOP: ours, VLLM_ROUTER: [SAMPLE] * 3}})[
        f"{PLAIN}: requests/s, ÷ vllm-router's"
    ]
    assert row.figure == pytest.approx(2.4)


def test_a_missing_peer_meets_nothing() -> None:
    """Without the other router there is no ratio, and no target is met by that."""
    rows = verdicts({PLAIN: {KVLOOP: [times(9)]}, ALONE: {KVLOOP: [times(9)]}})
    assert rows[f"{PLAIN}: requests/s, ÷ vllm-router's"].met is False
    assert rows[f"{ALONE}: median latency, ÷ the best other's (no other router)"].met is False


def test_latency_against_the_best() -> None:
    """Of the others, the one with the least latency is named and compared with."""
    rows = verdicts({ALONE: {KVLOOP: [times(2)], VLLM_ROUTER: [SAMPLE], SMG: [times(4)]}})
    assert rows[f"{ALONE}: median latency, ÷ the best other's (SMG)"].figure == pytest.approx(2.0)


def test_cpu_for_an_event() -> None:
    """Paced streams compare CPU for an event, not for a window."""
    half = replace(SAMPLE, events=33_000, cpu_s=0.4)
    case = next(case.name for case in CASES if case.part == PACED)
    row = verdicts({case: {KVLOOP: [half], SMG: [SAMPLE], VLLM_ROUTER: [replace(SAMPLE, cpu_s=3.0)]}})[
        "CPU for an event, paced streams, ÷ the best other's (SMG)"
    ]
    assert row.figure == pytest.approx(0.8)
    assert row.met


@pytest.mark.parametrize(
    ("late", "events", "met"), [(60, 60_000, [True, True]), (61, 59_000, [False, False])]
)
def test_falling_behind(late: int, events: int, met: list[bool]) -> None:
    """A thousandth of the events may be late, and a hundredth missing."""
    case = next(case for case in CASES if case.part == MANY)
    sample = replace(SAMPLE, late=late, events=events)
    rows = verdicts({case.name: {KVLOOP: [sample]}})
    assert [row.met for what, row in rows.items() if what.startswith("1,500 streams")] == met


def test_idle_streams_and_what_the_machine_allows() -> None:
    """Where a process may not have the files, the row asks for fewer streams and says why."""
    case = next(case for case in QUICK if case.part == IDLE).fitting(60)
    sample = replace(SAMPLE, clients=60, rss_kib=600)
    rows = {row.what: row for row in rows_of([case], {case.name: {KVLOOP: [sample]}}, 60)}
    held = rows["idle streams held open"]
    assert held.met
    assert "60 streams" in held.detail
    assert rows["memory of an idle stream, kvloop"].figure == pytest.approx(10.0)


def test_the_table_has_what_was_measured() -> None:
    """A line for each router of a case, with `-` where a figure has no meaning."""
    text = figures({PLAIN: {SMG: [replace(SAMPLE, events=0)], KVLOOP: [SAMPLE]}})
    heading, ours, theirs = text.splitlines()
    assert heading.split()[:2] == ["case", "router"]
    assert "kvloop" in ours
    assert theirs.split()[-5:] == ["2.00", "-", "0.500", "-", "40.0"]
