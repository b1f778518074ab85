"""Runs of seeds as the code is now, and the mutations that tests run them under.

python -m tests.sim.fleet.runs [NAME...]      the first seeds that catch each mutation, as a table
"""

import sys
from collections.abc import Callable

import pytest

from kvloop.local.fleet_turns import RouterTurn
from kvloop.sim.fleet.plan import draw
from kvloop.sim.fleet.world import Outcome, World

Mutation = Callable[[pytest.MonkeyPatch], None]
MUTATIONS: dict[str, Mutation] = {}
MAX_SEEDS = 1000


def mutation(patch: Mutation) -> Mutation:
    """Enter a mutation under its name."""
    MUTATIONS[patch.__name__] = patch
    return patch


def outcome(seed: int) -> Outcome:
    """A run of a seed, as the code is now."""
    return World(draw(seed), RouterTurn).run()


def caught_by(name: str, seeds: range) -> tuple[int, str] | None:
    """The first of the seeds that finds a mutation, and which checker it is that does."""
    with pytest.MonkeyPatch.context() as patch:
        MUTATIONS[name](patch)
        for seed in seeds:
            found = outcome(seed)
            if not found.held:
                return seed, found.name
    return None


def table(names: list[str]) -> None:
    """Print who catches what."""
    from tests.sim.fleet import broken_leases, broken_use, runs

    assert broken_leases
    assert broken_use
    for name in names or runs.MUTATIONS:
        sys.stdout.write(f'    "{name}": {runs.caught_by(name, range(MAX_SEEDS))},\n')
        sys.stdout.flush()


if __name__ == "__main__":
    table(sys.argv[1:])
