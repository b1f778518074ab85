"""Adaptive leases beside others on the same traffic: the two figures that every lease benchmark judges, be it
`core` alone that plays the recorded sessions, a simulated fleet, or real engines.
"""

from kvloop.bench.report import Bound, Row, Target

MOST_HELD = 0.25
LEAST_REUSE = 0.98
JUDGED_TOKENS = 8_000_000
"""KV that an eight-H200 node holds beside a 32-billion-parameter model, twice over: memory is not short."""


def ratio(part: float, whole: float) -> float:
    """NaN, which meets no target, where there is nothing to compare with."""
    return part / whole if whole else float("nan")


def held_row(against: str, ours: float, theirs: float, detail: str, *, judged: bool = True) -> Row:
    """What is held for each token reused, ours of theirs."""
    target = Target(Bound.AT_MOST, MOST_HELD) if judged else None
    return Row(f"held per reused token, {against}", ratio(ours, theirs), "", target, detail)


def reuse_row(what: str, ours: float, theirs: float, detail: str, *, judged: bool = True) -> Row:
    """How much is reused, ours of theirs."""
    target = Target(Bound.AT_LEAST, LEAST_REUSE) if judged else None
    return Row(what, ratio(ours, theirs), "", target, detail)
