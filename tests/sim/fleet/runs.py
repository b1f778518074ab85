"""Runs of seeds as the code is now, and the mutations that tests run them under.

python -m tests.sim.fleet.runs [NAME...]      the first seeds that catch each mutation, as a table
"""

import sys
from collections.abc import Callable, Iterable

import pytest

from kvloop.local.fleet_turns import RouterTurn
from kvloop.sim.fleet.plan import draw
from kvloop.sim.fleet.world import Outcome, World

Mutation = Callable[[pytest.MonkeyPatch], None]
MUTATIONS: dict[str, tuple[Mutation, str]] = {}
MAX_SEEDS = 1000
KEPT_SEEDS = 3


def mutation(checker: str) -> Callable[[Mutation], Mutation]:
    """Enter a mutation under its name, with the checker whose promise it breaks."""

    def enter(patch: Mutation) -> Mutation:
        MUTATIONS[patch.__name__] = patch, checker
        return patch

    return enter


def outcome(seed: int) -> Outcome:
    """A run of a seed, as the code is now."""
    return World(draw(seed), RouterTurn).run()


def caught_by(name: str, seeds: Iterable[int], most: int = 1) -> list[int]:
    """The first `most` of the seeds with which the mutation's own checker finds it."""
    patch_code, checker = MUTATIONS[name]
    caught: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch_code(patch)
        for seed in seeds:
            if outcome(seed).name == checker:
                caught.append(seed)
                if len(caught) == most:
                    break
    return caught


def table(names: list[str]) -> None:
    """Print which seeds catch what."""
    from tests.sim.fleet import broken_leases, broken_use, runs

    assert broken_leases
    assert broken_use
    for name in names or runs.MUTATIONS:
        caught = tuple(runs.caught_by(name, range(MAX_SEEDS), KEPT_SEEDS))
        sys.stdout.write(f'    "{name}": {caught},\n')
        sys.stdout.flush()


if __name__ == "__main__":
    table(sys.argv[1:])
