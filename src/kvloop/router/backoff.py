"""A short pause before an engine that has just failed a turn is asked again for it.

Another engine is asked at once: nothing says that it is in trouble, too. The only one that is left is another
matter. What failed a moment ago fails again in the same moment, and the turns that it failed are many, all at
the same time; so each waits a little, and not all the same.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable

PAUSE_S = 0.1  # mean: next to what computing a prompt anew takes, nothing
JITTER = 0.5  # of it, either way

Sleep = Callable[[float], Awaitable[object]]


class Backoff:
    """Waits. `chance` draws from 0 up to 1."""

    def __init__(self, chance: Callable[[], float] = random.random, sleep: Sleep = asyncio.sleep) -> None:
        self._chance = chance
        self._sleep = sleep

    async def pause(self) -> None:
        """Once, before asking again."""
        await self._sleep(PAUSE_S * (1 - JITTER + 2 * JITTER * self._chance()))
