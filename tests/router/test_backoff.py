"""A pause is made only before an engine that has failed a turn is asked again; it is short, and differs."""

import random

import pytest

from kvloop.router.backoff import JITTER, PAUSE_S, Backoff
from tests.router.fake_engine import decode_plan
from tests.router.harness import HELLO, in_loop, stack
from tests.router.test_fallbacks import dies, refuses_handover


@in_loop
async def test_pauses_are_short_and_differ() -> None:
    """Between half and one and a half times the mean, as chance has it."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    backoff = Backoff(random.Random(1).random, sleep)
    for _ in range(100):
        await backoff.pause()
    assert all(PAUSE_S * (1 - JITTER) <= seconds <= PAUSE_S * (1 + JITTER) for seconds in slept)
    assert len({*slept}) == 100
    await Backoff(lambda: 0.5, sleep).pause()
    assert slept[-1] == pytest.approx(PAUSE_S)


@pytest.mark.parametrize(
    ("decode", "pauses"),
    [
        ([refuses_handover], 1),
        ([dies], 1),
        ([refuses_handover, refuses_handover], 0),
        ([dies, decode_plan], 0),
        ([decode_plan], 0),
    ],
)
def test_only_the_last_one_is_waited_for(
    decode: list[object], pauses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lone engine is asked again after one pause; another one, or after an answer, at once."""
    counted = []

    async def pause(_: Backoff) -> None:
        counted.append(1)

    monkeypatch.setattr(Backoff, "pause", pause)

    @in_loop
    async def run() -> None:
        async with stack(decode=decode) as router:  # type: ignore[arg-type]
            await router.chat([HELLO])

    run()
    assert len(counted) == pauses
