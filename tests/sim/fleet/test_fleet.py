"""The fleet simulation: what a seed is, that it repeats, and that seeds put the promises to the test."""

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest

from kvloop.local.fleet_turns import RouterTurn
from kvloop.sim.fleet.plan import draw
from kvloop.sim.fleet.world import World
from tests.sim.fleet.runs import outcome

FIXED_SEEDS = range(100)
FAILED_SEEDS = (439310095, 439310419, 4157823879)  # each that ever did; none is taken out again
FRESH_SEEDS = 5
MUST_REACH = {
    "asked again",
    "granted whole",
    "granted in part",
    "several claims at a time",
    "claimed read ended",
    "claimed read failed",
    "handed over read failed",
    "refused no_match",
    "refused wrong_root",
    "refused unknown_lease",
    "refused wrong_incarnation",
    "refused too_many_claims",
    "returned something",
    "returned something at last",
    "returned deadline",
    "returned no_reply",
    "returned local_hit",
    "returned below_threshold",
    "late_reads",
    "preemptions",
    "aborted",
    "lease expired",
    "lease released",
    "lease reclaimed",
    "lease revived",
    "keeper renewed",
    "keeper let_go",
    "keeper superseded",
    "keeper lost",
    "answer refused: the router is gone",
}
REPEAT = "from tests.sim.fleet.runs import outcome; print(outcome(%d).trace.digest())"


def test_every_promise_holds_and_is_put_to_the_test() -> None:
    """A hundred seeds, and those that failed once: no checker complains, and between them they reach what
    can happen to claims, reads, leases, conversations and clients."""
    reached: Counter[str] = Counter()
    for seed in (*FIXED_SEEDS, *FAILED_SEEDS):
        ended = outcome(seed)
        assert ended.held, f"kvloop sim replay {seed}: {ended.finding}"
        assert ended.turns
        reached += ended.census
    assert not MUST_REACH - reached.keys()


def test_seeds_that_nobody_has_had_hold() -> None:
    """Each run of the tests goes where none has been. A failure says which seed it was."""
    first = int.from_bytes(os.urandom(4))
    for seed in range(first, first + FRESH_SEEDS):
        ended = outcome(seed)
        assert ended.held, f"new in FAILED_SEEDS; kvloop sim replay {seed}: {ended.finding}"


@pytest.mark.parametrize("seed", [3, 17])
def test_a_seed_is_one_run(seed: int) -> None:
    """Two processes with different hash seeds see the same events at the same times, line by line."""
    digests = set()
    for hash_seed in ("1", "2"):
        env = dict(os.environ) | {"PYTHONHASHSEED": hash_seed}
        argv = [sys.executable, "-c", REPEAT % seed]
        digests.add(subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout)
    assert len(digests) == 1
    assert digests == {outcome(seed).trace.digest() + "\n"}


def test_seeds_differ() -> None:
    """Every option is drawn: of twenty seeds no two have the same plan, and most options vary."""
    plans = [draw(seed) for seed in range(20)]
    assert len({replace(plan, seed=0) for plan in plans}) == 20
    varying = [line.split(" = ")[0] for line in plans[0].lines()]
    fixed = {name for name in varying if len({getattr(plan, name) for plan in plans}) == 1}
    never = {"sealed", "break_even_parts", "pinned_leases", "returns", "wishes", "settle_ms", "calm_ms"}
    assert fixed <= never


def test_a_fault_that_is_not_planned_does_not_happen() -> None:
    """With nothing that goes wrong there is no fault, no refusal, no late read; and turns are read back."""
    quiet = replace(
        draw(5),
        loss=0,
        duplicate=0,
        reorder=0,
        slow_reads=0,
        crash_ms=0,
        stop_ms=0,
        cut_ms=0,
        router_crash_ms=0,
        wall_step_ms=0,
        reset_ms=0,
        clock_ppm=0,
        leaves=0,
        confused=0,
    )
    ended = World(quiet, RouterTurn).run()
    assert ended.held
    assert ended.faults == 0
    assert ended.returned_tokens > 0
    assert not [name for name in ended.census if "refused:" in name and ended.census[name]]
    assert not ended.census["late_reads"]
    assert not ended.census["aborted"]
