"""Slow start: the share of load that an engine may have grows with its age.

A new engine is the least loaded one, so that without this it would get every request until its queue is as
long as the others', with cold caches and kernels still to be compiled. Its share grows linearly from a tenth
to the whole over the ramp; a placement that multiplies loads by the inverse sees a new engine as ten times as
busy as it is.
"""

FIRST_SHARE_PERMILLE = 100


def share_permille(age_ns: int, ramp_ns: int) -> int:
    """The share of an engine that has been there for `age_ns`, from 100 to 1000."""
    if age_ns >= ramp_ns:
        return 1000
    return max(FIRST_SHARE_PERMILLE, 1000 * max(0, age_ns) // ramp_ns)
