"""Any list of records that has the types comes to figures, text, page and JSON, and each is well-formed."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvloop.bench.load.figures import figures_of, is_sound
from kvloop.bench.load.html import page
from kvloop.bench.load.plots import plots_of
from kvloop.bench.load.record import End, Leg, Record, Request, Run, Sample, Window, line_of
from kvloop.bench.load.record import read as read_lines
from kvloop.bench.load.report_command import as_json
from kvloop.bench.load.summary import summary_text
from tests.bench.load.test_html import assert_harmless, read
from tests.bench.test_plot import assert_legible

names = st.sampled_from(["aggregated", "kvloop", "one-way", "", "<b>&"]) | st.text(max_size=5)
words = st.text(max_size=12)
times = st.sampled_from([0.0, 1.0, 12.5, 3000.0, -1.0, 1e15, 1e-12]) | st.floats(
    allow_nan=False, allow_infinity=False
)
counts = st.sampled_from([0, 1, 20, 700, 5000, -3, 10**60]) | st.integers(-(2**63), 2**63 - 1)
turns = st.integers(0, 3) | counts


def perhaps(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """It, or null."""
    return st.none() | strategy


requests = st.builds(
    Request,
    leg=names,
    round=turns,
    conversation=words,
    turn=turns,
    what=words,
    warm_up=st.booleans(),
    at_s=times,
    late_ms=times,
    status=st.sampled_from([200, 200, 0, 500]) | counts,
    took_ms=times,
    first_ms=perhaps(times),
    between_ms=st.lists(times, max_size=3),
    planned_tokens=perhaps(counts),
    prompt_tokens=perhaps(counts),
    cached_tokens=perhaps(counts),
    answer_tokens=perhaps(counts),
    route=perhaps(words),
    reused_tokens=perhaps(counts),
    transfer_ms=perhaps(times),
    compute_ms=perhaps(times),
    answer=perhaps(words),
    text=perhaps(words),
    agrees=perhaps(st.booleans()),
    error=st.sampled_from([None, None, "broken"]),
)
samples = st.builds(Sample, names, turns, times, perhaps(times), perhaps(times))
windows = st.builds(Window, names, turns, times, perhaps(times), times, perhaps(times), perhaps(times))
anything = st.recursive(
    st.none() | st.booleans() | times | counts | words,
    lambda inner: st.dictionaries(words, inner, max_size=2),
)
runs = st.builds(
    Run,
    format=st.just(1),
    kvloop=words,
    started=words,
    command=words,
    workload=words,
    source=words,
    model=words,
    seed=counts,
    legs=st.lists(st.builds(Leg, names, words, words), max_size=3),
    settings=st.dictionaries(words, anything, max_size=2),
    machine=st.dictionaries(words, anything, max_size=2),
)
files = st.tuples(
    runs,
    st.lists(requests | samples | windows, max_size=10),
    st.lists(st.builds(End, words | st.just("done")), max_size=1),
).map(lambda parts: [parts[0], *parts[1], *parts[2]])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(files)
def test_anything_can_be_reported(records: list[Record]) -> None:
    """Nothing raises; the page is XML and harmless, the plots legible, the JSON strict, the text plain."""
    figures = figures_of(records)
    assert figures == figures_of(records)
    assert_harmless(read(page(figures, records)))
    for svg in plots_of(figures, records):
        assert_legible(svg)
    text = summary_text(figures)
    assert all(letter == "\n" or letter.isprintable() for letter in text)
    told = json.loads(as_json(figures), parse_constant=pytest.fail)
    assert told["sound"] is is_sound(figures)
    asked = [one for one in records if isinstance(one, Request)]
    assert sum(leg.asked + leg.warm_up for leg in figures.legs) == len(asked)
    if any(one.agrees is False or one.error for one in asked):
        assert not told["sound"]
        assert "NOT SOUND" in text


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(files)
def test_a_file_tells_what_its_records_told(records: list[Record]) -> None:
    """Written and read again, the figures are the same."""
    lines = [line_of(one) for one in records]
    assert figures_of(list(read_lines(lines, "x"))) == figures_of(records)
