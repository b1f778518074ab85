"""The settings to choose, found by trying: one factor at a time, from what is delivered.

What is best: the time to the first token that nine of ten turns keep (p90), for that is what people notice
and what a turn is retained for. Ways that are within 3 % of the best one are equal, for a simulation is no
better than that; of those, the one for which decode holds the least memory, which is there for other work.
And a setting is left as it is unless another one is faster by as much, or as fast and holds a tenth less.

First the ratio of engines, which weighs most, then how long leases last, then the threshold, each with what
was chosen before. What helps only together with another change is not found that way.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvloop.bench.planning.arrangement import DEFAULT_THRESHOLD_TOKENS, Arrangement
from kvloop.bench.planning.run import Came

EQUAL, EQUALLY_HELD = 1.03, 1.1
THRESHOLDS_TOKENS = (DEFAULT_THRESHOLD_TOKENS, 256, 1024)
TTLS_S = (None, 60, 120, 480)
ALL_RATIOS = 5  # engines up to which every ratio is tried; beyond, from the given one on while it helps
MAX_RATIOS = 8
IDLE_SHARE = 0.2  # of busy time: below, no prompt waits for long

Play = Callable[[Arrangement], Came]


@dataclass(frozen=True, slots=True)
class Chosen:
    """What was chosen of some, and why, in a sentence with the numbers."""

    came: Came
    what: str
    why: str


def search(start: Arrangement, play: Play, *, may_change_ratio: bool, is_quick: bool) -> list[Chosen]:
    """The choice of each setting in turn; the last one's arrangement has all of them."""
    chosen: list[Chosen] = []
    at = start
    if may_change_ratio and start.prefill + start.decode > 2:
        tried = list(_ratios(start, play))
        chosen.append(_chosen("prefill:decode", tried, lambda one: one.ratio))
        busiest = max(came.busy_share for came in tried)
        if busiest < IDLE_SHARE:
            idle = (
                f"; prefill is busy {100 * busiest:.1f} % of the time at most: fewer engines would do, and "
            )
            idle += "with more traffic another ratio may be better"
            chosen[-1] = replace(chosen[-1], why=chosen[-1].why + idle)
        at = chosen[-1].came.arrangement
    leases = [replace(at, ttl_s=ttl_s) for ttl_s in TTLS_S]
    thresholds = THRESHOLDS_TOKENS[:: len(THRESHOLDS_TOKENS) - 1] if is_quick else THRESHOLDS_TOKENS
    chosen.append(
        _chosen("leases", [play(one) for one in leases[:: 3 if is_quick else 1]], lambda one: one.leases)
    )
    at = chosen[-1].came.arrangement
    tried = [play(replace(at, threshold_tokens=tokens)) for tokens in thresholds]
    chosen.append(_chosen("kv_recompute_threshold", tried, lambda one: str(one.threshold_tokens)))
    return chosen


def most_runs(start: Arrangement, *, may_change_ratio: bool, is_quick: bool) -> int:
    """So many arrangements are tried at most, the first one too."""
    engines = start.prefill + start.decode
    ratios = min(engines - 1, MAX_RATIOS) if may_change_ratio else 1
    return ratios + (2 if is_quick else len(TTLS_S) + len(THRESHOLDS_TOKENS) - 2)


def best(tried: Sequence[Came]) -> Came:
    """Of some, the first of which is what there is: see above."""
    fit = [came for came in tried if came.is_through and came.p90_ms is not None] or list(tried)
    least_ms = min(_p90(came) for came in fit)
    equal = [came for came in fit if _p90(came) <= EQUAL * least_ms]
    least = min(equal, key=lambda came: came.held_tokens)
    first = tried[0]
    return first if first in equal and first.held_tokens <= EQUALLY_HELD * least.held_tokens else least


def _ratios(start: Arrangement, play: Play) -> Iterator[Came]:
    """What is given, and other ratios of as many engines."""
    engines = start.prefill + start.decode
    yield play(start)
    if engines <= ALL_RATIOS:
        for prefill in range(1, engines):
            if prefill != start.prefill:
                yield play(replace(start, prefill=prefill, decode=engines - prefill))
        return
    left = MAX_RATIOS - 1
    for step in (-1, 1):
        at, prefill = play(start), start.prefill + step
        while 0 < prefill < engines and left:
            came = play(replace(start, prefill=prefill, decode=engines - prefill))
            left -= 1
            yield came
            if best([at, came]) is at:
                break
            at, prefill = came, prefill + step


def _chosen(what: str, tried: Sequence[Came], name: Callable[[Arrangement], str]) -> Chosen:
    came = best(tried)
    told = "; ".join(
        f"{name(one.arrangement)}: p90 {_told(one)}, {one.held_tokens:,.0f} tokens held" for one in tried
    )
    if len(tried) == 1:
        return Chosen(came, what, f"{name(came.arrangement)} is all there is to choose ({told})")
    if came is tried[0]:
        rule = "is what there is, and nothing else is better by more than 3 %"
        if any(_p90(one) <= EQUAL * _p90(came) and one is not came for one in tried):
            rule = "is what there is; others are as fast within 3 %, and none of them holds a tenth less"
    elif _p90(came) * EQUAL < _p90(tried[0]):
        rule = f"has a lower p90 than {name(tried[0].arrangement)}"
    else:
        rule = "is as fast as the best within 3 %, and holds the least memory of such"
    return Chosen(came, what, f"{name(came.arrangement)} {rule} ({told})")


def _p90(came: Came) -> float:
    return float("inf") if came.p90_ms is None or not came.is_through else came.p90_ms


def _told(came: Came) -> str:
    if came.p90_ms is None:
        return "none"
    return f"{came.p90_ms:,.0f} ms" + ("" if came.is_through else " (it does not keep up)")
