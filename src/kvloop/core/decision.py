"""Which way a turn goes: append, return or recompute, and through which engines.

Each way is predicted as the parts of its time to first token, from learned costs (`cost`), from what the
router has under way (`load`) and from how much of the prompt is believed to be where:

    append     decode's queue + computing the suffix at decode
    return     prefill's queue + reading back + computing what is in neither cache + the handover
    recompute  prefill's queue + computing what prefill has not in its own cache + the handover

The shortest wins, after what it costs others. Appending stops the answers that run on the same decode engine
for as long as the suffix is computed: that time, times their number, times a weight, is added to it, and a
budget bounds how many tokens may be appended at one engine at a time. A fuller decode engine makes every
later token of an answer slower, so each request that runs there adds a share of the handover's fixed part.
So a warm engine is preferred for what it saves and no further: affinity is soft. Ways that are predicted to
take nearly the same are equal, and the engine that is named first is taken.

What is believed may be wrong; then the choice costs time, for the engines prove every reuse themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, TypeVar

from kvloop.core.cost import Costs
from kvloop.core.load import Load

PRESSURE_PARTS = 8  # so many requests more on a decode engine weigh as much as a handover's fixed part
MAX_TARGETS = 2
PARTS = 20  # a prediction is not better than a twentieth; engines that differ by less take turns
LEAST_READ_TOKENS = 64  # kv_recompute_threshold's default: prefill computes fewer, whatever it is offered
PREFILL, DECODE = "prefill", "decode"
_made = tuple.__new__  # of a NamedTuple, from its fields: in a third of the time that calling it takes


Found = TypeVar("Found")


class Route(StrEnum):
    """How a turn is served, as the response header and the metrics say it.

    `decode`: alone and whole, for want of another way.
    """

    APPEND = "append"
    RETURN = "return"
    RECOMPUTE = "recompute"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class AppendLimits:
    """What may be computed at decode. `turn_tokens`: of one turn, 0 for none; `budget_tokens`: of all turns
    under way at one engine; `stall_permille`: what a second for which one running answer stands still weighs
    against a second of the turn's own time to first token."""

    turn_tokens: int = 1024
    budget_tokens: int = 2048
    stall_permille: int = 125


class Ask(NamedTuple):
    """A turn as it is believed to be. Counts are of tokens.

    `held`: of the prompt's `tokens` from its beginning, what decode engine `holder` has kept; `can_return`:
    there is a handle for it. `local`: what prefill engine `computed_at` computed of it the last time.
    """

    tokens: int
    held: int = 0
    holder: str | None = None
    can_return: bool = False
    local: int = 0
    computed_at: str | None = None


class Parts(NamedTuple):
    """A prediction, in nanoseconds. The first four make the time to first token."""

    queue_ns: int = 0
    read_ns: int = 0
    compute_ns: int = 0
    handover_ns: int = 0
    stall_ns: int = 0
    pressure_ns: int = 0

    @property
    def ttft_ns(self) -> int:
        """Time to first token."""
        return self.queue_ns + self.read_ns + self.compute_ns + self.handover_ns


class Option(NamedTuple):
    """One way. `computed`: tokens that it leaves to compute; `read`: tokens that come back from decode.

    `expected_ns`: the time to first token of `parts`, corrected by how far such predictions were off lately.
    """

    route: Route
    prefill: str | None
    decode: str
    computed: int
    read: int
    parts: Parts
    expected_ns: int

    @property
    def score_ns(self) -> int:
        """What the choice goes by: the first token's time, and what it costs others."""
        return self.expected_ns + self.parts.stall_ns + self.parts.pressure_ns


def options(
    ask: Ask,
    prefill: Sequence[Load],
    decode: Sequence[Load],
    costs: Costs,
    limits: AppendLimits,
    now_ns: int,
) -> list[Option]:
    """Every way that these engines allow, the best first, each prefill engine with the decode engine that
    suits it best; empty without a decode engine."""
    found: list[Option] = []
    scores: list[int] = []
    targets = _targets(ask, decode, costs) if prefill else []
    for one in prefill if decode else ():
        target, handover_ns, pressure_ns = _joined(ask, one.name, targets, costs)
        local = _local(ask, one, costs)
        wait_ns = one.wait_ns(now_ns)
        for route, read in _reads(ask, local):
            suffix = max(1, ask.tokens - local - read)
            read_ns = costs.read_ns(ask.holder or "", one.name, read) if read else 0
            compute_ns = costs.compute_ns(PREFILL, one.name, suffix, ask.tokens - suffix)
            parts = _made(Parts, (wait_ns, read_ns, compute_ns, handover_ns, 0, pressure_ns))
            expected_ns = costs.corrected_ns(route, wait_ns + read_ns + compute_ns + handover_ns)
            found.append(_made(Option, (route, one.name, target, suffix, read, parts, expected_ns)))
            scores.append(expected_ns + pressure_ns)
    for one in decode:
        suffix = max(1, ask.tokens - found_at(ask, one.name, costs))
        way = Route.APPEND if _may_append(ask, one, suffix, limits) else Route.DECODE
        if way is Route.APPEND or not prefill:
            found.append(_whole(way, ask, one, suffix, costs, limits, now_ns))
            scores.append(found[-1].score_ns)
    return _ordered(found, scores)


def _ordered(found: list[Found], scores: list[int]) -> list[Found]:
    """The least score first. What is nearly the least is as good: of those, what was named first."""
    if len(found) < 2:
        return found
    nearly = min(scores) * (PARTS + 1) // PARTS
    ranked = sorted([(score if score > nearly else nearly, place) for place, score in enumerate(scores)])
    return [found[place] for _, place in ranked]


def found_at(ask: Ask, decode: str, costs: Costs) -> int:
    """Of the prompt, what `decode` is expected to find in its own cache: whole blocks, less what it lost."""
    return costs.local_tokens(decode, ask.held) if decode == ask.holder else 0


def _reads(ask: Ask, local: int) -> list[tuple[Route, int]]:
    """What may be read back. Where prefill is believed to lack nothing that is worth a read, the handle goes
    along in case it does: that costs a claim, and a lost cache would cost the whole prompt."""
    if not ask.can_return or ask.holder is None or not ask.held:
        return [(Route.RECOMPUTE, 0)]
    read = max(0, ask.held - local)
    if local and read < LEAST_READ_TOKENS:
        return [(Route.RETURN, 0)]
    return [(Route.RETURN, read), (Route.RECOMPUTE, 0)]


def _may_append(ask: Ask, decode: Load, suffix: int, limits: AppendLimits) -> bool:
    return (
        decode.name == ask.holder
        and ask.held > 0
        and suffix <= limits.turn_tokens
        and decode.appended_tokens + suffix <= limits.budget_tokens
    )


def _whole(
    route: Route, ask: Ask, decode: Load, suffix: int, costs: Costs, limits: AppendLimits, now_ns: int
) -> Option:
    compute_ns = costs.compute_ns(DECODE, decode.name, suffix, ask.tokens - suffix)
    stall_ns = compute_ns * decode.running * limits.stall_permille // 1000
    parts = Parts(decode.wait_ns(now_ns), 0, compute_ns, 0, stall_ns, 0)
    return Option(route, None, decode.name, suffix, 0, parts, costs.corrected_ns(route, parts.ttft_ns))


def _local(ask: Ask, prefill: Load, costs: Costs) -> int:
    believed = min(ask.local, ask.tokens) if prefill.name == ask.computed_at else 0
    return costs.local_tokens(prefill.name, believed)


def _targets(ask: Ask, decode: Sequence[Load], costs: Costs) -> list[Load]:
    """The decode engines that are best for a prompt from anywhere; from where decides between them."""
    if len(decode) <= MAX_TARGETS:
        return list(decode)
    joined = [_handover(ask, "", one, costs) for one in decode]
    return _ordered(list(decode), [cost + price for _, cost, price in joined])[:MAX_TARGETS]


def _joined(ask: Ask, prefill: str, targets: list[Load], costs: Costs) -> tuple[str, int, int]:
    """The decode engine that suits this prefill engine best, as `_handover` says it."""
    joined = [_handover(ask, prefill, target, costs) for target in targets]
    if len(joined) == 1:
        return joined[0]
    scores = [cost + price for _, cost, price in joined]
    nearly = min(scores) * (PARTS + 1) // PARTS
    return next(one for one, score in zip(joined, scores, strict=True) if score <= nearly)


def _handover(ask: Ask, prefill: str, decode: Load, costs: Costs) -> tuple[str, int, int]:
    """The way from prefill's answer to `decode`'s first token; and what joining that batch costs."""
    name, running, pulled = decode.name, decode.running, ask.tokens
    if name == ask.holder:
        pulled = max(0, pulled - ask.held)
    handover_ns, fixed_ns = costs.handover_ns(prefill, name, pulled, running)
    return name, handover_ns, fixed_ns * running // PRESSURE_PARTS
