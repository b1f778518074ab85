"""Legs against each other, turn by turn: the same turn of the same conversation in the same round.

The ratio is given twice: the median over the pairs of each pair's ratio, which no mix of short and long
prompts distorts, and the ratio of the medians, which is what a table of medians shows. Turn 0 has nothing to
come back to, so the turns after it are compared once more without it, and those by prompt length.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvloop.bench.load.lengths import bucket_of, bucket_text, length_of
from kvloop.bench.load.record import Request
from kvloop.bench.load.spread import quantile, told

FLOOR = "aggregated"
BASES = (FLOOR, "one-way", "upstream")
ALL_TURNS = "all turns"
LATER_TURNS = "later turns"

Key = tuple[int, str, int]


@dataclass(frozen=True, slots=True)
class Comparison:
    """TTFT of `leg` against that of `base` over the pairs of one part of the turns.

    `q1` and `q3`: half of the pairs' ratios lie between. `distance_ms`: the median of the differences.
    """

    leg: str
    base: str
    part: str
    n: int
    median_ratio: float
    q1: float
    q3: float
    ratio_of_medians: float
    distance_ms: float


@dataclass(frozen=True, slots=True)
class _Pair:
    ours_ms: float
    base_ms: float
    is_later: bool
    tokens: float | None


def compared(answered: Mapping[str, Sequence[Request]]) -> list[Comparison]:
    """Every leg against every base that there is; against the first leg where none of them is."""
    legs = list(answered)
    bases = [base for base in BASES if base in answered] or legs[:1]
    firsts = {base: _by_key(answered[base]) for base in bases}
    return [
        comparison
        for base in bases
        for leg in legs
        if leg != base
        for comparison in _parts(leg, base, list(_pairs(answered[leg], firsts[base])))
    ]


def key_of(request: Request) -> Key:
    """What a request has in common with those that other legs answered in its place."""
    return request.round, request.conversation, request.turn


def _by_key(requests: Sequence[Request]) -> dict[Key, float]:
    """The first answer's TTFT for each turn, where it is told and there is any."""
    found: dict[Key, float] = {}
    for request in requests:
        first_ms = told(request.first_ms)
        if first_ms:
            found.setdefault(key_of(request), first_ms)
    return found


def _pairs(ours: Sequence[Request], base: Mapping[Key, float]) -> Iterator[_Pair]:
    seen: set[Key] = set()
    for request in ours:
        first_ms, key = told(request.first_ms), key_of(request)
        if first_ms is not None and key in base and key not in seen:
            seen.add(key)
            yield _Pair(first_ms, base[key], request.turn > 0, length_of(request))


def _parts(leg: str, base: str, pairs: list[_Pair]) -> Iterator[Comparison]:
    later = [pair for pair in pairs if pair.is_later]
    by_bucket: dict[int, list[_Pair]] = {}
    for pair in later:
        if pair.tokens is not None:
            by_bucket.setdefault(bucket_of(pair.tokens), []).append(pair)
    parts = [(ALL_TURNS, pairs), (LATER_TURNS, later)]
    parts += [(bucket_text(bucket), some) for bucket, some in sorted(by_bucket.items())]
    for part, some in parts:
        if some:
            yield _comparison(leg, base, part, some)


def _comparison(leg: str, base: str, part: str, pairs: Sequence[_Pair]) -> Comparison:
    ratios = sorted(pair.ours_ms / pair.base_ms for pair in pairs)
    ours = statistics.median(pair.ours_ms for pair in pairs)
    return Comparison(
        leg=leg,
        base=base,
        part=part,
        n=len(pairs),
        median_ratio=quantile(ratios, 0.5),
        q1=quantile(ratios, 0.25),
        q3=quantile(ratios, 0.75),
        ratio_of_medians=ours / statistics.median(pair.base_ms for pair in pairs),
        distance_ms=statistics.median(pair.ours_ms - pair.base_ms for pair in pairs),
    )
