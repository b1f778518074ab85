"""A token bucket in its virtual form: one number says how full it is.

A bucket of `burst` tokens that fills one every `interval_ns` is as good as a theoretical arrival time (ITU-T
I.371's GCRA): each request moves it on by an interval, and none may move it further ahead of the clock than
the bucket is deep.
"""

_NS_PER_MINUTE = 60_000_000_000


class TokenBucket:
    """So many requests a minute; as many at once as come in a minute without a pause before."""

    __slots__ = ("_depth_ns", "_full_at_ns", "_interval_ns", "per_minute")

    def __init__(self, per_minute: int) -> None:
        assert per_minute > 0
        self.per_minute = per_minute
        self._interval_ns = max(1, _NS_PER_MINUTE // per_minute)
        self._depth_ns = self._interval_ns * per_minute
        self._full_at_ns = 0

    def take(self, now_ns: int) -> int:
        """Take a token: 0 if there was one, else how many nanoseconds are left until there is."""
        full_at_ns = max(self._full_at_ns, now_ns) + self._interval_ns
        wait_ns = full_at_ns - now_ns - self._depth_ns
        if wait_ns > 0:
            return wait_ns
        self._full_at_ns = full_at_ns
        return 0
