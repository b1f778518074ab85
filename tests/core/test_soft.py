"""Ended leases that may be had again, and what of them."""

from kvloop.core.chain import Identity, build_chain, cut_chain, root_digest
from kvloop.core.lease_state import FreedLease, LeaseState
from kvloop.core.soft import SoftTable

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
    assert table.surviving("l", HELD, lambda block, _: block != 3) is None
    table.check_integrity()
