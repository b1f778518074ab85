"""Property tests that must also come upon everything there is to come upon, or they have shown nothing."""

from collections import Counter
from collections.abc import Callable, Iterator, Set

from hypothesis import seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

MAX_ROUNDS = 32
"""One to three are enough, unless something cannot be reached any more."""


def explore_until_reached(explore: Callable[[], None], reached: Counter[str], must_reach: Set[str]) -> None:
    """Run a property until `reached`, which it counts in, has all of `must_reach`."""
    for number in rounds_until(reached, must_reach):
        seed(number)(explore)()


def run_machine_until_reached(
    machine: type[RuleBasedStateMachine], schedules: settings, reached: Counter[str], must_reach: Set[str]
) -> None:
    """The same for a state machine, with so many schedules a round."""
    for number in rounds_until(reached, must_reach):
        run_state_machine_as_test(seed(number)(machine), settings=schedules)


def rounds_until(reached: Counter[str], must_reach: Set[str]) -> Iterator[int]:
    """The seeds of the rounds. Each has its own: with hypothesis' profile for CI, which takes chance out,
    they would else all be the same round."""
    reached.clear()
    for number in range(MAX_ROUNDS):
        yield number
        if set(+reached) >= must_reach:
            return
    missing = sorted(must_reach - set(+reached))
    raise AssertionError(f"not reached in {MAX_ROUNDS} rounds: {missing}")
