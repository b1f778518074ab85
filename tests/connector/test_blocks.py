"""Held blocks over vLLM's own pool: what proves that a freed block is still what it was, and the balance."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.block_pool import BlockPool

from kvloop.connector.blocks import PoolBlocks
from tests.connector.real_scheduler import BLOCK, Engine, make_config, make_scheduler

BLOCKS = 12


def make_pool(caching: bool = True) -> Any:
    """vLLM's pool. Block 0 is its null block."""
    return BlockPool(BLOCKS, caching, BLOCK)


def taken(pool: Any, count: int) -> list[int]:
    """So many blocks handed out."""
    return [block.block_id for block in pool.get_new_blocks(count)]


@pytest.mark.parametrize("caching", [False, True])
def test_a_freed_block_is_what_it_was_until_it_is_handed_out(caching: bool) -> None:
    """However often it is touched and freed meanwhile; afterwards never again."""
    pool = make_pool(caching)
    held = PoolBlocks(pool)
    one, other = taken(pool, 2)
    proofs = {block: held.proof(block) for block in (one, other)}
    held.give_back([one, other])
    held.touch([one])
    held.give_back([one])
    assert all(held.unchanged(block, proof) for block, proof in proofs.items())
    handed_out = taken(pool, BLOCKS - 2)
    assert one not in handed_out
    assert held.unchanged(one, proofs[one])
    assert not held.unchanged(other, proofs[other])
    held.discard(handed_out)
    assert not held.unchanged(other, proofs[other])


def test_the_same_hash_on_a_block_handed_out_since_proves_nothing(tmp_path: Path) -> None:
    """vLLM hashes a block when it schedules the step that fills it: the KV is not there yet."""
    engine = Engine(make_scheduler(make_config(tmp_path, caching=True), BLOCKS))
    held = PoolBlocks(engine.pool)
    tokens = list(range(4 * BLOCK))
    engine.add("first", tokens, 1)
    engine.run()
    before = {block.block_id: held.proof(block.block_id) for block in engine.pool.blocks}
    engine.add("hog", [7] * ((BLOCKS - 1) * BLOCK), 1)
    engine.run()
    engine.add("again", tokens, 1)
    engine.scheduler.schedule()
    same_hash = [
        block.block_id
        for block in engine.pool.blocks
        if block.block_hash is not None and block.block_hash == before[block.block_id][1]
    ]
    assert same_hash, "no block has its old hash again: the test shows nothing"
    assert not [block for block in same_hash if held.unchanged(block, before[block])]


def test_content_that_vllm_disowns_is_not_what_it_was(tmp_path: Path) -> None:
    """vLLM takes the hash from blocks whose load failed, and leaves them with their owner."""
    engine = Engine(make_scheduler(make_config(tmp_path, caching=True), BLOCKS))
    held = PoolBlocks(engine.pool)
    engine.add("first", list(range(2 * BLOCK)), 1)
    engine.run()
    hashed = [block.block_id for block in engine.pool.blocks if block.block_hash is not None]
    proofs = {block: held.proof(block) for block in hashed}
    engine.pool.evict_blocks({hashed[0]})
    assert not held.unchanged(hashed[0], proofs[hashed[0]])
    assert held.unchanged(hashed[1], proofs[hashed[1]])


@pytest.mark.parametrize("caching", [False, True])
def test_what_is_given_back_is_handed_out_last_and_from_its_end(caching: bool) -> None:
    """So that what survives of a lease is its beginning, with or without a prefix cache."""
    pool = make_pool(caching)
    held = PoolBlocks(pool)
    lease = taken(pool, 4)
    held.give_back(lease)
    assert taken(pool, BLOCKS - 1)[-4:] == lease[::-1]


@pytest.mark.parametrize("caching", [False, True])
def test_what_is_discarded_is_handed_out_first(caching: bool) -> None:
    """Nothing is lost with it."""
    pool = make_pool(caching)
    held = PoolBlocks(pool)
    late = taken(pool, 3)
    held.discard(late)
    assert set(taken(pool, 3)) == set(late)


HOLDERS = st.lists(st.lists(st.integers(1, BLOCKS - 1), max_size=6), max_size=5)


@given(holders=HOLDERS)
def test_balanced_references_are_0(holders: list[list[int]]) -> None:
    """Whoever holds what, a block twice too; and however much of it is given back."""
    pool = make_pool()
    held = PoolBlocks(pool)
    for block_ids in holders:
        held.touch(block_ids)
    assert held.unbalanced(holders) == 0
    for number, block_ids in enumerate(holders):
        held.give_back(block_ids)
        assert held.unbalanced(holders[number + 1 :]) == 0


def leak(_: Any, held: PoolBlocks) -> None:
    """A reference that nobody will give back."""
    held.touch([3])


def give_back_twice(_: Any, held: PoolBlocks) -> None:
    """One reference too few."""
    held.give_back([1])


def confuse(_: Any, held: PoolBlocks) -> None:
    """One too few here, one too many there: the sum is right."""
    held.give_back([1])
    held.touch([3])


def lose(pool: Any, _: PoolBlocks) -> None:
    """A block that is neither free nor held."""
    pool.free_block_queue.popleft()


@pytest.mark.parametrize("act", [leak, give_back_twice, confuse, lose])
def test_anything_else_is_seen(act: Callable[[Any, PoolBlocks], None]) -> None:
    """Too many, too few, both, and a block that has gone missing."""
    pool = make_pool()
    held = PoolBlocks(pool)
    holders = [[1, 2], [2]]
    for block_ids in holders:
        held.touch(block_ids)
    act(pool, held)
    assert held.unbalanced(holders) > 0
