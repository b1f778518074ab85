"""What a turn is believed to be, before any engine has seen it: how many tokens, and which of them are where.

The filed turn that it goes on from is known by count: decode's handle says how many tokens are held. What was
added since, or is shared where the history was edited, is for the caller to estimate. All of it only decides
which way the turn goes: the engines prove every reuse themselves.
"""

from collections.abc import Callable

from kvloop.core.decision import Ask
from kvloop.core.lineage import Match

TokensTo = Callable[[int], int]


def believed(match: Match | None, total: int, before: TokensTo, added: TokensTo | None) -> Ask:
    """A turn of `total` tokens, as far as that is known without its past.

    `match`: what it goes on from and may reuse, None for nothing. `before(n)`: tokens in its first n units.
    `added(n)`: those after the answer that stands at unit n, where answers are units; else None.
    """
    if match is None:
        return Ask(total)
    turn, depth, held = match.turn, match.depth, match.turn.held_tokens
    if not depth:  # found by its name: nobody knows what is left of its history
        held = min(held, total) // 2
    elif depth < turn.depth:
        held = min(held, before(depth))
    elif added is not None:
        total = held + added(depth)
    held = min(held, total)
    prompt = turn.prompt
    return Ask(total, held, turn.engine, True, min(held, prompt.computed), prompt.computed_at)
