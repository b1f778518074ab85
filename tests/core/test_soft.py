"""Ended leases that may be had again, and what of them. Under any schedule: test_soft_machine.py."""

import pytest

from kvloop.core.chain import Identity, build_chain, cut_chain, root_digest
from kvloop.core.lease_state import FreedLease, LeaseState
from kvloop.core.soft import BLOCK_COST_BYTES, LEASE_COST_BYTES, SoftTable

KEY = bytes(32)
ROOT = root_digest(KEY, Identity("m", "", "", "", "a"))
TOKENS = list(range(200))
HELD = build_chain(KEY, ROOT, TOKENS)
BLOCKS = (tuple(range(13)),)
FREED = FreedLease("l", LeaseState.EXPIRED, BLOCKS, HELD)
PROOFS = (tuple(100 + block for block in range(13)),)


def soft_table() -> SoftTable:
    """A table that remembers the lease "l"."""
    table = SoftTable(16)
    assert table.keep(FREED, PROOFS)
    return table


def test_what_is_unchanged_is_had_again() -> None:
    """All of it, the partly filled last block included."""
    table = soft_table()
    assert table.surviving("l", HELD, lambda block, proof: proof == 100 + block) == (HELD, BLOCKS)


def test_up_to_the_first_block_that_changed() -> None:
    """Then to whole segments; and of another history, no more than it shares."""
    table = soft_table()
    assert table.surviving("l", HELD, lambda block, _: block != 9) == (cut_chain(HELD, 128), (BLOCKS[0][:8],))
    edited = build_chain(KEY, ROOT, [*TOKENS[:100], 9, *TOKENS[101:]])
    assert table.surviving("l", edited, lambda *_: True) == (cut_chain(HELD, 64), (BLOCKS[0][:4],))
    assert table.surviving("l", edited, lambda block, _: block < 8) == (cut_chain(HELD, 64), (BLOCKS[0][:4],))
    assert table.surviving("l", HELD, lambda block, _: block != 3) is None
    table.check_integrity()


def test_a_hybrid_model_gets_everything_or_nothing() -> None:
    """Its groups may have fewer blocks than the tokens need, and each of them counts."""
    uneven = ((1, 2, 3), (9,))
    table = SoftTable(16)
    table.keep(FreedLease("h", LeaseState.EXPIRED, uneven, HELD, exact_only=True), ((0, 0, 0), (0,)))
    assert table.surviving("h", HELD, lambda *_: True) == (HELD, uneven)
    for changed in (3, 9):
        assert table.surviving("h", HELD, lambda block, _, changed=changed: block != changed) is None
    assert table.surviving("h", build_chain(KEY, ROOT, TOKENS[:199]), lambda *_: True) is None


def test_asking_changes_nothing() -> None:
    """Whoever takes the blocks says so; until then, others may ask too."""
    table = soft_table()
    for _ in range(2):
        assert table.surviving("l", HELD, lambda *_: True) is not None
    table.forget("l")
    assert table.surviving("l", HELD, lambda *_: True) is None


def test_what_is_void_is_not_remembered() -> None:
    """Nor what was known of the lease before."""
    table = soft_table()
    assert not table.keep(FreedLease("l", LeaseState.RELEASED, BLOCKS, HELD, is_void=True), PROOFS)
    assert table.get("l") is None
    assert len(table) == table.used_bytes == 0


def test_a_lease_larger_than_the_table_is_not_remembered() -> None:
    """It does not push everything else out first."""
    table = SoftTable(16, max_bytes=LEASE_COST_BYTES + 14 * BLOCK_COST_BYTES)
    assert table.keep(FREED, PROOFS)
    long = build_chain(KEY, ROOT, range(240))
    large = FreedLease("m", LeaseState.EXPIRED, (tuple(range(15)),), long)
    assert not table.keep(large, (tuple(range(15)),))
    assert table.get("l") is not None


def test_each_block_has_a_proof() -> None:
    """Fewer, or more, are a mistake of the owner's, and so is a table without room."""
    with pytest.raises(ValueError, match="proof"):
        SoftTable(16).keep(FREED, (PROOFS[0][:-1],))
    with pytest.raises(ValueError, match="positive"):
        SoftTable(0)
