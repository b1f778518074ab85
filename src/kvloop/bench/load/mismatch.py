"""What must not be: requests that failed, and answers of one leg that another leg gave otherwise.

Both are counted without end and told one by one up to a bound for each leg.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvloop.bench.load.pairs import FLOOR, Key, key_of
from kvloop.bench.load.plain import plain
from kvloop.bench.load.record import Request

MAX_TOLD_EACH = 10  # of a leg
MAX_TOLD_OF_ALL = 100
BEFORE, AFTER = 16, 40  # characters around the place where texts part


@dataclass(frozen=True, slots=True)
class Mismatch:
    """An answer that is not the one that `against` gave. `at`: the first character that differs, counted from
    0; None where a text was not kept. `same` is what both said just before it, `here` and `there` how they
    went on."""

    leg: str
    against: str | None
    round: int
    conversation: str
    turn: int
    at: int | None = None
    same: str = ""
    here: str = ""
    there: str = ""


@dataclass(frozen=True, slots=True)
class Failure:
    """A request without an answer. `status` 0: none came."""

    leg: str
    round: int
    conversation: str
    turn: int
    status: int
    error: str


def is_answered(request: Request) -> bool:
    """Whether an answer came, and whole."""
    return request.error is None and 200 <= request.status < 300


def mismatches_of(by_leg: Mapping[str, Sequence[Request]]) -> list[Mismatch]:
    """The first of each leg, with where the texts part."""
    differing = _first(by_leg, lambda request: request.agrees is False)
    wanted = {key_of(request) for request in differing}
    others: dict[Key, list[Request]] = {key: [] for key in wanted}
    for requests in by_leg.values():
        for request in requests:
            if (key := key_of(request)) in wanted and is_answered(request):
                others[key].append(request)
    return [_mismatch(request, others[key_of(request)]) for request in differing]


def failures_of(by_leg: Mapping[str, Sequence[Request]]) -> list[Failure]:
    """The first of each leg, with why."""
    return [
        Failure(
            plain(one.leg),
            one.round,
            plain(one.conversation),
            one.turn,
            one.status,
            plain(one.error or "no error was told"),
        )
        for one in _first(by_leg, lambda request: not is_answered(request))
    ]


def _first(by_leg: Mapping[str, Sequence[Request]], wanted: Callable[[Request], bool]) -> list[Request]:
    told: Counter[str] = Counter()
    found: list[Request] = []
    for leg, requests in by_leg.items():
        for request in requests:
            if told[leg] == MAX_TOLD_EACH or len(found) == MAX_TOLD_OF_ALL:
                break
            if wanted(request):
                told[leg] += 1
                found.append(request)
    return found


def _mismatch(request: Request, group: Sequence[Request]) -> Mismatch:
    others = [one for one in group if one.leg != request.leg]
    # The floor is what all are measured by; else one that nobody says is wrong; else one that kept its text.
    others.sort(key=lambda one: (one.leg != FLOOR, one.agrees is False, one.text is None))
    other = others[0] if others else None
    found = Mismatch(
        plain(request.leg),
        None if other is None else plain(other.leg),
        request.round,
        plain(request.conversation),
        request.turn,
    )
    if other is None or request.text is None or other.text is None or request.text == other.text:
        return found
    at = parting(request.text, other.text)
    return Mismatch(
        found.leg,
        found.against,
        found.round,
        found.conversation,
        found.turn,
        at,
        plain(request.text[max(0, at - BEFORE) : at]),
        plain(request.text[at : at + AFTER]),
        plain(other.text[at : at + AFTER]),
    )


def parting(one: str, other: str) -> int:
    """Where two texts that are not the same part: the first character that differs, or that one has alone."""
    for place, (here, there) in enumerate(zip(one, other, strict=False)):
        if here != there:
            return place
    return min(len(one), len(other))
