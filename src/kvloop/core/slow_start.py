"""Slow start: the share of turns that an engine may have grows with its age.

A new engine is the least loaded one, so that without this it would get every request until its queue is as
long as the others', with cold caches and kernels still to be compiled. Its share grows linearly from a tenth
to the whole over the ramp.
"""

FIRST_SHARE_PERMILLE = 100
_STRIDE = 617  # prime to 1000


def share_permille(age_ns: int, ramp_ns: int) -> int:
    """The share of an engine that has been there for `age_ns`, from 100 to 1000."""
    if age_ns >= ramp_ns:
        return 1000
    return max(FIRST_SHARE_PERMILLE, 1000 * max(0, age_ns) // ramp_ns)


def takes_part(turn: int, permille: int) -> bool:
    """Whether a turn is one of those that an engine with this share takes part in.

    Evenly spread, and out of step with whoever goes round by turn number: a multiplicative sequence near the
    golden section (Knuth, The Art of Computer Programming, 6.4).
    """
    return turn * _STRIDE % 1000 < permille
