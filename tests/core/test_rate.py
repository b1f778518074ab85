"""The token bucket lets through what a bucket of tokens would, and says when it will again."""

from hypothesis import given
from hypothesis import strategies as st

from kvloop.core.rate import TokenBucket

MINUTE = 60_000_000_000


@given(st.integers(1, 20), st.lists(st.integers(0, MINUTE // 4), max_size=80))
def test_as_a_bucket_of_tokens(per_minute: int, gaps: list[int]) -> None:
    """Exactly the requests that find a whole token get through; the wait is the time to the next token."""
    bucket, now_ns = TokenBucket(per_minute), MINUTE
    interval_ns = MINUTE // per_minute
    depth_ns = interval_ns * per_minute
    level_ns = depth_ns  # a token is an interval's worth
    for gap_ns in gaps:
        now_ns += gap_ns
        level_ns = min(depth_ns, level_ns + gap_ns)
        wait_ns = bucket.take(now_ns)
        assert wait_ns == max(0, interval_ns - level_ns)
        if not wait_ns:
            level_ns -= interval_ns


def test_after_the_wait_there_is_a_token() -> None:
    """Who comes back when he was told to is let in, and a nanosecond earlier is not."""
    bucket = TokenBucket(3)
    assert [bucket.take(0) for _ in range(3)] == [0, 0, 0]
    wait_ns = bucket.take(0)
    assert wait_ns == MINUTE // 3
    assert bucket.take(wait_ns - 1) == 1
    assert bucket.take(wait_ns) == 0
