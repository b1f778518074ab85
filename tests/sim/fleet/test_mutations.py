"""Each rule broken on purpose is found by the seed, and the checker, that stand here.

`KeyError` and `ValueError` are the code under test finding itself out. After a change that moves what seeds
do, `python -m tests.sim.fleet.runs` looks for new ones among the first 1,000 and prints this table.
"""

import pytest

from tests.sim.fleet import broken_leases, broken_use
from tests.sim.fleet.runs import MAX_SEEDS, MUTATIONS, caught_by, outcome

CAUGHT = {
    "claim_granted_without_proof": (1, "NeverAWrongToken"),
    "claim_granted_by_length": (1, "NeverAWrongToken"),
    "proof_rounded_up": (1, "NeverAWrongToken"),
    "tail_not_compared": (1, "NeverAWrongToken"),
    "tenant_root_left_out": (3, "TenantsAreApart"),
    "segments_not_chained": (62, "NeverAWrongToken"),
    "lease_reclaimed_under_a_claim": (4, "ReadersHoldClaims"),
    "lease_dropped_under_a_claim": (4, "ReadersHoldClaims"),
    "lease_expires_under_a_claim": (91, "ReadersHoldClaims"),
    "claim_that_never_ends": (0, "BlocksBalance"),
    "lease_given_back_twice": (0, "KeyError"),
    "lease_never_given_back": (0, "BlocksBalance"),
    "term_that_is_not_kept": (1, "TermsEnd"),
    "renewal_beyond_the_ttl": (1, "TermsEnd"),
    "engine_that_polls": (0, "IdleIsIdle"),
    "retention_that_does_not_yield": (2, "RetentionYields"),
    "retention_that_yields_a_block_too_few": (2, "RetentionYields"),
    "deadline_not_kept": (0, "ReadersHoldClaims"),
    "deadline_counted_from_the_answer": (544, "ReadersHoldClaims"),
    "margin_not_taken_off": (46, "ReadersHoldClaims"),
    "grant_not_checked": (1, "NeverAWrongToken"),
    "fence_left_out": (8, "LateReadsAreFenced"),
    "soft_lease_not_compared": (2, "NeverAWrongToken"),
    "soft_lease_without_proof": (1, "NeverAWrongToken"),
    "cache_that_does_not_forget": (0, "NeverAWrongToken"),
    "block_freed_twice": (6, "BlocksBalance"),
    "tenant_left_out_of_the_lookup": (3, "TenantsAreApart"),
    "use_that_is_never_over": (0, "BlocksBalance"),
    "superseded_turns_forgotten": (0, "BlocksBalance"),
    "lineage_that_loses_count": (0, "BlocksBalance"),
    "handle_shown_to_the_client": (0, "ClientsSeeNoMetadata"),
    "metadata_taken_from_the_client": (1, "ClientsSeeNoMetadata"),
    "router_that_reads": (0, "TensorsGoDirectly"),
    "turn_that_gives_up": (272, "LossCostsTime"),
}


def test_every_mutation_is_in_the_table() -> None:
    """None is left out, and none of those in it is gone."""
    assert broken_leases
    assert broken_use
    assert set(CAUGHT) == set(MUTATIONS)
    assert max(seed for seed, _ in CAUGHT.values()) < MAX_SEEDS


@pytest.mark.parametrize("name", CAUGHT)
def test_a_mutation_is_caught(name: str) -> None:
    """By its seed and its checker; and the seed has nothing to say of the code as it is."""
    seed, checker = CAUGHT[name]
    assert caught_by(name, range(seed, seed + 1)) == (seed, checker)
    assert outcome(seed).held
