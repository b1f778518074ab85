"""Whether legs say the same: under greedy decoding an answer depends on its prompt alone.

The answers to one turn are compared where every leg had the same history before it; from a turn on whose
answers differ, prompts differ too, and nothing can be said of what follows. The reference is the first leg,
in the order of `REFERENCES`, that answered: one that reuses nothing, where there is one.
"""

import hashlib
from collections.abc import Mapping, Sequence

from kvloop.bench.workload.turns import Answer, Conversation

REFERENCES = ("one-way", "aggregated", "return", "kvloop")
"""Those that reuse nothing or only what is theirs, then those that prove what they reuse; then all others."""


def digest(text: str) -> str:
    """An answer's name in a record."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def compared(
    conversation: Conversation, answers: Mapping[tuple[str, int], str], legs: Sequence[str]
) -> dict[tuple[str, int], bool]:
    """For each leg and turn, whether its answer is the reference's. `answers`: texts by leg and turn."""
    order = [*(leg for leg in REFERENCES if leg in legs), *(leg for leg in legs if leg not in REFERENCES)]
    verdicts: dict[tuple[str, int], bool] = {}
    same: dict[tuple[str, int], bool] = {}
    for number, turn in enumerate(conversation.turns):
        history = {said.turn for said in turn.messages if isinstance(said, Answer)}
        able = [
            leg
            for leg in order
            if (leg, number) in answers and all(same.get((leg, past), False) for past in history)
        ]
        for leg in able:
            is_same = answers[leg, number] == answers[able[0], number]
            same[leg, number] = is_same
            if len(able) > 1:
                verdicts[leg, number] = is_same
    return verdicts
