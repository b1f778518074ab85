"""What the return model learns, and what follows from it."""

from kvloop.core.returns import Ending, ReturnModel

S = 1_000_000_000
TTL = 480 * S


def test_traffic_that_never_returns_is_let_go_at_once() -> None:
    """Fifty turns of a caller that nobody came back for: the next lease is not worth holding."""
    model = ReturnModel(TTL, 100 * S)
    assert model.keep_until("batch", Ending.STOP, 0) > 0
    for _ in range(50):
        model.waited("batch", Ending.STOP, 0, TTL)
    assert model.keep_until("batch", Ending.STOP, 0) == 0
    assert model.chance("batch", Ending.STOP, 0, TTL) < 100
    model.check_integrity()


def test_traffic_that_returns_is_kept_until_it_has() -> None:
    """A caller that always comes back in 10 s is held for that long, and not to the end of the TTL."""
    model = ReturnModel(TTL, 100 * S)
    for _ in range(50):
        model.returned("agent", Ending.TOOL_CALLS, 0, 10 * S)
    assert 10 * S < model.keep_until("agent", Ending.TOOL_CALLS, 0) < TTL
    assert model.chance("agent", Ending.TOOL_CALLS, 0, 60 * S) > 900
    model.check_integrity()
