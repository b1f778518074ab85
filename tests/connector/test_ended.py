"""Many leases end at once: each step gives some back, and whoever needs blocks or a lease waits for none."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloop.connector import leases as module
from kvloop.connector import lend
from kvloop.connector.ended import LEASE_COST_BLOCKS, EndedLeases
from kvloop.core.chain import Chain
from kvloop.core.handle import Handle
from kvloop.core.lease import FreedLease, LeaseState
from kvloop.wire.control import Drop, Dropped, Release, Renew, Renewed
from tests.connector.decode import Decode, granted, stop_time
from tests.connector.fakes import Clock, Pool, S

LEASES, BLOCKS = 20, 7
STEP_LEASES = 3
STEP_COST = STEP_LEASES * (BLOCKS + LEASE_COST_BLOCKS) + 1
CHAIN = Chain(bytes(16), b"", b"", 0)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time for decode's side; a step gives three leases back."""
    monkeypatch.setattr(module, "STEP_COST_BLOCKS", STEP_COST)
    return stop_time(monkeypatch)


@pytest.fixture
def decode() -> Iterator[Decode]:
    """Decode with 200 blocks. Whatever the test does, its books are right."""
    made = Decode(Pool(200))
    yield made
    made.check()


def ended(decode: Decode, count: int = LEASES) -> list[Handle]:
    """So many leases, dropped in one message and not yet given back."""
    before = decode.pool.held()
    handles = [decode.kept(list(range(number, number + 101))) for number in range(count)]
    assert decode.serve(Drop([handle.lease_id for handle in handles])) == Dropped(count)
    assert decode.pool.held() == before + count * BLOCKS
    return handles


def tokens_of(handles: list[Handle], number: int) -> list[int]:
    """What this one was granted for."""
    assert 0 <= number < len(handles)
    return list(range(number, number + 101))


def test_each_step_gives_some_back(decode: Decode) -> None:
    """Three leases of twenty with each, in the order in which they ended; the books balance after each."""
    handles = ended(decode)
    for step in range(1, 8):
        assert decode.leases.give_back() is (step < 7)
        left = max(0, LEASES - step * STEP_LEASES)
        assert decode.pool.held() == left * BLOCKS
        assert [len(blocks) for blocks in decode.leases.held()] == [BLOCKS] * left
        assert decode.stat()['leases{state="soft"}'] == LEASES
        decode.check()
    assert not decode.leases.give_back()
    for number in range(LEASES):
        granted(decode.claim_soft(handles[number], tokens_of(handles, number)))


def test_one_that_is_larger_than_a_step_is_given_back_in_one(decode: Decode) -> None:
    """A lease's blocks come back together, and no step does nothing."""
    large = decode.kept(list(range(1000)))
    decode.serve(Drop([large.lease_id]))
    handle = decode.kept()
    decode.serve(Drop([handle.lease_id]))
    assert decode.leases.give_back()
    assert decode.pool.held() == BLOCKS
    assert not decode.leases.give_back()
    assert decode.pool.held() == 0


def test_one_that_waits_is_had_again_once(decode: Decode) -> None:
    """A claim on it is answered as on any soft lease: its blocks are held once, and come back once."""
    handles = ended(decode)
    assert decode.leases.table.state(handles[-1].lease_id) is None, "it is held for nobody"
    again = granted(decode.claim_soft(handles[-1], tokens_of(handles, LEASES - 1)))
    assert again.matched_tokens == 100
    assert decode.pool.held() == LEASES * BLOCKS
    assert decode.leases.table.state(handles[-1].lease_id) is LeaseState.CLAIMED
    while decode.leases.give_back():
        decode.check()
    assert decode.pool.held() == BLOCKS
    decode.serve(Drop([handles[-1].lease_id]))
    decode.serve(Release(again.claim_id))
    decode.leases.give_back()
    assert decode.pool.held() == 0


def test_renewed_in_vain_while_it_waits(decode: Decode) -> None:
    """To a router it is soft; once its conversation is over, it is gone."""
    first, second = ended(decode, 2)
    decode.serve(Drop([second.lease_id], is_over=True))
    answer = decode.serve(Renew([(one.lease_id, 60_000, 500) for one in (first, second)]))
    assert answer == Renewed(gone=[second.lease_id], soft=[first.lease_id])
    assert decode.pool.held() == 2 * BLOCKS


def test_live_work_takes_what_it_lacks_and_no_more(decode: Decode) -> None:
    """Out of what has ended first, without regard to steps; no lease that is held has to go."""
    held = decode.kept(list(range(500, 601)))
    ended(decode)
    free = decode.pool.get_num_free_blocks()
    assert decode.leases.make_room(5 * BLOCKS - 1)
    assert decode.pool.get_num_free_blocks() == free + 5 * BLOCKS
    assert decode.leases.make_room((LEASES - 5) * BLOCKS)
    assert decode.pool.held() == BLOCKS
    granted(decode.claim(held, list(range(500, 601))))


def test_what_waits_counts_towards_the_share() -> None:
    """A new lease finds room in what has ended, just enough, before another lease is reclaimed for it."""
    decode = Decode(Pool(200), max_retained_share=(LEASES * BLOCKS + BLOCKS) / 201)
    held = decode.kept(list(range(500, 601)))
    ended(decode)
    decode.kept(list(range(700, 801)))
    assert decode.pool.held() == (LEASES + 1) * BLOCKS
    granted(decode.claim(held, list(range(500, 601))))
    decode.check()


def test_all_at_once_where_memory_or_weights_change(decode: Decode) -> None:
    """vLLM resets its cache only where no block is held."""
    ended(decode)
    decode.kept(list(range(500, 601)))
    decode.leases.drop_all()
    assert decode.pool.held() == 0
    assert decode.stat()['leases{state="soft"}'] == 0


def test_what_expires_together_comes_back_in_steps_too(decode: Decode, clock: Clock) -> None:
    """As when the router that renewed it all is gone."""
    for number in range(LEASES):
        decode.kept(list(range(number, number + 101)))
    clock.now_ns += 60 * S
    assert decode.leases.give_back()
    assert decode.pool.held() == (LEASES - STEP_LEASES) * BLOCKS


def test_live_work_gets_what_is_due_before_anything_that_is_not(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where more is due than expires with one call, and the first of it is still being read."""
    monkeypatch.setattr(module, "MAX_EXPIRIES", 1)
    decode = Decode(Pool(200), claim_term_ns=100 * S)
    handles = [decode.kept(list(range(number, number + 101))) for number in range(5)]
    for number in range(3):
        granted(decode.claim(handles[number], tokens_of(handles, number)))
    clock.now_ns += 30 * S
    young = decode.kept(list(range(500, 601)))
    clock.now_ns += 30 * S
    free = decode.pool.get_num_free_blocks()
    assert decode.leases.make_room(2 * BLOCKS)
    assert decode.pool.get_num_free_blocks() == free + 2 * BLOCKS
    assert decode.stat()['leases_ended_total{state="expired"}'] == 2
    granted(decode.claim(young, list(range(500, 601))))
    decode.check()


def test_a_soft_grant_waits_for_no_queue(decode: Decode) -> None:
    """While live work lacks blocks a turn's are free at once, whatever has ended before."""
    ended(decode)
    blocks = tuple(decode.pool.allocate(BLOCKS))
    lease_id = decode.leases.grant_soft(CHAIN, blocks)
    assert lease_id is not None
    assert decode.leases.is_soft(lease_id)
    decode.pool.free(blocks)
    assert decode.pool.held() == LEASES * BLOCKS


def test_an_engine_is_woken_for_more_than_a_step(decode: Decode) -> None:
    """What one step takes waits for one."""
    ended(decode, STEP_LEASES)
    assert decode.woken == 0
    decode.leases.give_back()
    ended(decode, STEP_LEASES + 1)
    assert decode.woken == 1


def test_between_two_turns_of_a_long_message_the_lock_is_free(
    decode: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler's thread gets in; every lease is dropped or renewed all the same."""
    free: list[bool] = []
    monkeypatch.setattr(lend, "TURN_LEASES", 6)
    monkeypatch.setattr(lend, "sleep", lambda _: free.append(not decode.leases.lock.locked()))
    handles = [decode.kept(list(range(number, number + 101))) for number in range(LEASES)]
    renewed = [(handle.lease_id, 60_000, 500) for handle in handles]
    assert decode.serve(Renew([*renewed, ("never was", 1, 1)])) == Renewed(gone=["never was"], soft=[])
    assert free == [True] * 3
    assert decode.stat()['renewals_total{outcome="renewed"}'] == LEASES
    ended_now = decode.serve(Drop([handle.lease_id for handle in handles]))
    assert ended_now == Dropped(LEASES)
    assert free == [True] * 6


STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "take", "some", "void", "all"]), st.integers(0, 9), st.integers(0, 30)),
    max_size=60,
)


@given(STEPS)
def test_the_queue_gives_each_once_in_order(steps: list[tuple[str, int, int]]) -> None:
    """Against a naive list: who ended first comes first, within the cost but one in any case."""
    queue = EndedLeases()
    naive: list[FreedLease] = []
    for kind, number, size in steps:
        lease_id = str(number)
        known = [freed for freed in naive if freed.lease_id == lease_id]
        if kind == "add" and not known:
            freed = FreedLease(lease_id, LeaseState.EXPIRED, (tuple(range(size)),), CHAIN)
            queue.add(freed)
            naive.append(freed)
        elif kind == "take":
            assert queue.take(lease_id) == (known[0] if known else None)
            naive = [freed for freed in naive if freed not in known]
        elif kind == "void":
            queue.void(lease_id)
            naive = [
                FreedLease(one.lease_id, one.state, one.blocks, one.chain, is_void=True)
                if one in known
                else one
                for one in naive
            ]
        elif kind == "all":
            assert queue.take_all() == naive
            naive = []
        elif kind == "some":
            count, left = 0, size
            for freed in naive:
                left -= len(freed.blocks[0]) + LEASE_COST_BLOCKS
                if count and left < 0:
                    break
                count += 1
            assert queue.take_some(size) == naive[:count]
            naive = naive[count:]
        queue.check_integrity()
        assert len(queue) == len(naive)
        assert queue.get(lease_id) == next((one for one in naive if one.lease_id == lease_id), None)


def test_a_lease_that_ends_twice_is_a_bug() -> None:
    """Its blocks would be given back twice."""
    queue = EndedLeases()
    freed = FreedLease("one", LeaseState.EXPIRED, ((1, 2),), CHAIN)
    queue.add(freed)
    with pytest.raises(AssertionError, match="twice"):
        queue.add(freed)
