"""Each rule broken on purpose is found by the checker of the promise that it breaks.

The seeds with which it does stand here, up to three of the first 1,000 each: a change elsewhere may move
what one seed does. Where none of them catches a mutation any more,

    python -m tests.sim.fleet.runs NAME

looks for new ones and prints its line.
"""

import pytest

from tests.sim.fleet import broken_leases, broken_use
from tests.sim.fleet.runs import MAX_SEEDS, MUTATIONS, caught_by, outcome

CAUGHT = {
    "claim_granted_without_proof": (1, 2, 4),
    "claim_granted_by_length": (1, 10, 12),
    "proof_rounded_up": (1, 4, 10),
    "tail_not_compared": (1, 4, 9),
    "tenant_root_left_out": (19, 49, 66),
    "segments_not_chained": (124, 128, 242),
    "lease_reclaimed_under_a_claim": (2, 6, 8),
    "lease_dropped_under_a_claim": (2, 4, 11),
    "lease_expires_under_a_claim": (76, 146, 508),
    "claim_that_never_ends": (0, 1, 2),
    "lease_given_back_twice": (0, 1, 2),
    "lease_never_given_back": (0, 1, 2),
    "term_that_is_not_kept": (1, 4, 11),
    "renewal_beyond_the_ttl": (1, 14, 16),
    "engine_that_polls": (0, 1, 2),
    "retention_that_does_not_yield": (2, 6, 7),
    "retention_that_yields_a_block_too_few": (2, 6, 7),
    "deadline_not_kept": (2, 8, 15),
    "deadline_counted_from_the_answer": (22, 56),
    "margin_not_taken_off": (423,),
    "lapsed_claim_not_asked_for_again": (8, 56, 76),
    "asked_again_while_it_reads": (2, 8, 9),
    "asked_without_end": (0, 2, 4),
    "grant_not_checked": (1, 4, 10),
    "fence_left_out": (8, 40, 46),
    "soft_lease_not_compared": (7, 12, 29),
    "soft_lease_without_proof": (1, 2, 4),
    "cache_that_does_not_forget": (0, 1, 2),
    "block_freed_twice": (150, 252, 327),
    "tenant_left_out_of_the_lookup": (5, 7, 8),
    "use_that_is_never_over": (0, 1, 2),
    "superseded_turns_forgotten": (0, 1, 2),
    "lineage_that_never_forgets": (0, 1, 2),
    "handle_shown_to_the_client": (0, 1, 2),
    "metadata_taken_from_the_client": (3, 5, 7),
    "router_that_reads": (0, 1, 2),
    "turn_that_gives_up": (9, 81, 272),
}


def test_every_mutation_is_in_the_table() -> None:
    """None is left out, and none of those in it is gone."""
    assert broken_leases
    assert broken_use
    assert set(CAUGHT) == set(MUTATIONS)
    assert all(0 <= seed < MAX_SEEDS for seeds in CAUGHT.values() for seed in seeds)


@pytest.mark.parametrize("name", CAUGHT)
def test_a_mutation_is_caught(name: str) -> None:
    """By its own checker, with one of its seeds; and that seed has nothing to say of the code as it is."""
    caught = caught_by(name, CAUGHT[name])
    assert caught, f"python -m tests.sim.fleet.runs {name}"
    assert outcome(caught[0]).held
