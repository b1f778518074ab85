"""Which engine takes a hop: the one with the least in flight, unless another one is worth a short queue.

Decode holds most of a conversation's blocks, so the next turn is cheapest where the last one ran. But
affinity has to be bounded by load: in a published replay of agent traffic plain sticky sessions had a mean
TTFT of 5.05 s where round-robin had 1.78 s. So the preferred engine is taken only while it is at most a few
requests busier than the least busy one (consistent hashing with bounded loads, Mirrokni et al. 2018, in its
additive form). Ties go round by turn number, which the caller counts.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

AFFINITY_SLACK_REQUESTS = (
    4  # the blocks that another engine would have to pull cost less than a queue of five
)


class Candidate(NamedTuple):
    """An engine as placement sees it: requests in flight, and whether it is worth trying now."""

    name: str
    in_flight: int
    available: bool = True


def choose(
    candidates: Sequence[Candidate],
    turn_number: int,
    preferred: str | None = None,
    excluded: Collection[str] = (),
    slack_requests: int = AFFINITY_SLACK_REQUESTS,
) -> str | None:
    """The name of the engine to ask, or None where every available one is excluded."""
    usable = [one for one in candidates if one.available and one.name not in excluded]
    if not usable:
        return None
    least = min([one.in_flight for one in usable])
    if preferred is not None:
        for one in usable:
            if one.name == preferred and one.in_flight <= least + slack_requests:
                return one.name
    idlest = [one for one in usable if one.in_flight == least]
    return idlest[turn_number % len(idlest)].name
