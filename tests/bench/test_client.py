"""How fast the benchmark's client is: that it is measured, and judged as it should be."""

import os

import pytest

from kvloop.bench.client import Measured, measure, rows_of
from kvloop.bench.router_load import compiler


def test_a_median_is_judged_and_its_cost_is_shown() -> None:
    """One slow round among three decides nothing."""
    rounds = [Measured(100.0, 5.0), Measured(6000.0, 7.0), Measured(7000.0, 6.0)]
    judged, cost = rows_of("requests", "request", rounds, 5000.0)
    assert (judged.figure, judged.met) == (6000.0, True)
    assert (cost.figure, cost.met) == (6.0, None)
    assert not rows_of("requests", "request", rounds, 6001.0)[0].met


@pytest.mark.skipif(compiler() is None, reason="there is no C compiler")
def test_it_is_measured_with_whole_answers() -> None:
    """Against the engine in C: four figures, none of them none; other tests get their cores back."""
    cores = os.sched_getaffinity(0)
    try:
        rows = measure(is_quick=True)
    finally:
        os.sched_setaffinity(0, cores)
    assert len(rows) == 4
    assert all(row.figure > 0 for row in rows)
