"""Passive health: how long an engine is left out, and what clears it."""

import asyncio
import errno
from unittest import mock

import pytest

from kvloop.core.breaker import BreakerRules
from kvloop.core.decision import AppendLimits, Ask
from kvloop.core.policy import Kv
from kvloop.router.engine import LOG_EVERY_S, Engine
from kvloop.router.fleet import Fleet
from kvloop.router.pool import OUT_OF_FILES
from kvloop.router.turn import Failure
from kvloop.router.upstream import EngineFailureError
from tests.router.harness import in_loop

BACKOFF_FIRST_S = BreakerRules().backoff_first_ns / 1e9
BACKOFF_MAX_S = BreakerRules().backoff_max_ns / 1e9


def engine() -> Engine:
    """An engine that nobody connects to."""
    return Engine("http://127.0.0.1:1", "prefill", 1.0)


def left_out_s(one: Engine, now_s: float) -> float:
    """Let it fail at `now_s`; for how long it is left out then."""
    one.failed(now_s)
    low_s, high_s = now_s, now_s + 1000.0
    for _ in range(60):
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (low_s, middle_s) if one.available(middle_s) else (middle_s, high_s)
    return round(high_s - now_s, 6)


def test_backoff() -> None:
    """Each outage after another without an answer is twice as long, up to a bound; an answer clears all."""
    one, now_s, spells = engine(), 100.0, []
    for _ in range(8):
        spells.append(left_out_s(one, now_s))
        now_s += spells[-1]
    assert spells[:3] == [BACKOFF_FIRST_S, 2 * BACKOFF_FIRST_S, 4 * BACKOFF_FIRST_S]
    assert spells[-1] == BACKOFF_MAX_S
    one.answered()
    assert one.available(now_s)
    assert left_out_s(one, now_s) == BACKOFF_FIRST_S


def test_one_outage_counts_once() -> None:
    """Requests that fail together do not make the spell longer."""
    one = engine()
    for _ in range(10):
        one.failed(100.0)
    assert left_out_s(one, 100.0) == BACKOFF_FIRST_S


def test_log_lines_bounded() -> None:
    """An outage leaves a line now and then, not one per request."""
    one = engine()
    lines = [one.worth_a_line(now_s) for now_s in (0.0, 1.0, LOG_EVERY_S - 0.1, LOG_EVERY_S)]
    assert lines == [True, False, False, True]


def test_last_resort() -> None:
    """A decode engine that just failed is named only as a last resort, and never an excluded one."""
    one = Engine("http://127.0.0.1:1", "decode", 1.0)
    fleet = Fleet([], [one], lambda: 100_000_000_000, Kv(), AppendLimits())
    ask = Ask(100)
    one.failed(100.0)
    assert not fleet.healthy()
    assert fleet.choose_decode(ask, None, (), last_resort=False) is None
    assert fleet.choose_decode(ask, None, (), last_resort=True) == one.url
    assert fleet.choose_decode(ask, None, (one.url,), last_resort=True) is None
    assert fleet.choose_prefill(ask, ()) is None


def test_a_router_out_of_files_blames_no_engine() -> None:
    """It cannot open a connection, whoever's it would be."""
    one = engine()
    one.hop_failed(EngineFailureError(OUT_OF_FILES, Failure.UNREACHED), 100.0)
    assert one.available(100.0)
    one.hop_failed(EngineFailureError("connect", Failure.UNREACHED), 100.0)
    assert not one.available(100.0)


@in_loop
async def test_a_name_that_is_none_is_an_engine_that_is_not_reached() -> None:
    """No resolver is asked for a label of seventy letters; the turn goes elsewhere."""
    one = Engine("http://" + "x" * 70, "decode")
    with pytest.raises(EngineFailureError) as caught:
        await one.ask([b"GET / HTTP/1.1\r\n\r\n"], 1.0)
    assert caught.value.failure is Failure.UNREACHED


def test_too_many_open_files_are_seen_as_such() -> None:
    """By the error's number."""

    async def ask() -> None:
        refused = OSError(errno.EMFILE, "too many")
        loop = asyncio.get_running_loop()
        with mock.patch.object(loop, "create_connection", side_effect=refused):
            await engine().ask([b"GET / HTTP/1.1\r\n\r\n"], 1.0)

    with pytest.raises(EngineFailureError) as caught:
        asyncio.run(ask())
    assert caught.value.kind == OUT_OF_FILES
