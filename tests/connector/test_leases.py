"""Leases and their blocks: the share, who makes way for whom, what comes back when, and what stays soft."""

from collections.abc import Iterator
from typing import Any

import pytest

from kvloop.connector import leases as module
from kvloop.wire.control import Drop, Dropped, Refused, Release, Released, Renew
from tests.connector.decode import TOKENS, Decode, chain, granted, stop_time
from tests.connector.fakes import BLOCK, Clock, Pool, S

UNKNOWN = Refused("unknown_lease")


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time for decode's side."""
    return stop_time(monkeypatch)


@pytest.fixture
def decode() -> Iterator[Decode]:
    """Decode with 100 blocks. Whatever the test does, its books are right."""
    made = Decode(Pool(100))
    yield made
    made.check()


def test_leases_of_least_worth_make_way_for_a_new_one() -> None:
    """Within the share, whatever is free beside it; but one that is claimed stays."""
    decode = Decode(Pool(100), max_retained_share=0.21)
    first, second, third = (decode.kept() for _ in range(3))
    decode.serve(Renew([(second.lease_id, 60_000, 10), (third.lease_id, 60_000, 900)]))
    assert decode.pool.held() == 21
    claimed = granted(decode.claim(first))
    fourth = decode.kept()
    assert decode.pool.held() == 21
    assert decode.claim(second) is None, "it has become soft"
    for handle in (third, fourth):
        granted(decode.claim(handle))
    assert decode.retain() is None, "all are claimed"
    assert decode.pool.held() == 21
    decode.serve(Release(claimed.claim_id))
    decode.kept()
    assert decode.pool.held() == 21
    decode.check()


def test_what_can_never_fit_drives_nothing_out() -> None:
    """A request larger than the whole share leaves the leases there are alone."""
    decode = Decode(Pool(100), max_retained_share=0.08)
    handle = decode.kept()
    assert decode.retain(list(range(200))) is None
    granted(decode.claim(handle))


def test_claimed_blocks_stay_until_the_last_claim_ends(decode: Decode, clock: Clock) -> None:
    """Dropped, reset or out of time: they come back when the reader is through, or its time is."""
    handle = decode.kept()
    one, other = (granted(decode.claim(handle)) for _ in range(2))
    decode.leases.drop_all()
    assert decode.pool.held() == 7
    assert decode.claim(handle) == Refused("released")
    assert decode.serve(Release(one.claim_id)) == Released(True)
    assert decode.serve(Release(one.claim_id)) == Released(False)
    decode.leases.give_back()
    assert decode.pool.held() == 7
    clock.now_ns += 5 * S
    decode.leases.give_back()
    assert decode.pool.held() == 0
    assert decode.serve(Release(other.claim_id)) == Released(False)


def test_what_ends_on_the_control_thread_comes_back_on_the_scheduler_s(decode: Decode) -> None:
    """Dropped there, the blocks are held until the scheduler next looks."""
    handle = decode.kept()
    assert decode.serve(Drop([handle.lease_id, "never was"])) == Dropped(1)
    assert decode.pool.held() == 7
    decode.check()
    decode.leases.give_back()
    assert decode.pool.held() == 0


def test_a_lease_lasts_its_term_and_no_longer_than_the_ttl_with_renewals(clock: Clock) -> None:
    """Without a router everything is free within one term."""
    decode = Decode(Pool(100), lease_term_ns=10 * S, lease_ttl_ns=25 * S)
    handle = decode.kept()
    for _ in range(3):
        clock.now_ns += 8 * S
        decode.serve(Renew([(handle.lease_id, 10_000, 500)]))
    decode.leases.give_back()
    assert decode.pool.held() == 7
    clock.now_ns += S
    decode.leases.give_back()
    assert decode.pool.held() == 0
    decode.kept()
    clock.now_ns += 10 * S
    decode.leases.give_back()
    assert decode.pool.held() == 0


def test_room_is_made_out_of_unclaimed_leases_only(decode: Decode) -> None:
    """The one of least worth first, no more than needed; live requests and claims keep theirs."""
    handles = [decode.kept() for _ in range(3)]
    granted(decode.claim(handles[0]))
    busy = decode.pool.allocate(70)
    assert decode.pool.get_num_free_blocks() == 9
    assert decode.leases.make_room(1)
    assert decode.pool.get_num_free_blocks() == 16
    assert decode.claim(handles[1]) is None, "soft"
    granted(decode.claim(handles[2]))
    assert not decode.leases.make_room(1)
    assert decode.pool.get_num_free_blocks() == 16
    assert len(busy) == 70


def test_room_counts_what_is_shared_only_once_it_is_free(decode: Decode) -> None:
    """A lease whose blocks a live request shares frees nothing; the next one has to go as well."""
    shared = decode.kept()
    (lease,) = decode.leases.held()
    decode.pool.touch([decode.pool.blocks[block] for block in lease])
    other = decode.kept(list(range(300, 401)))
    before = decode.pool.get_num_free_blocks()
    assert decode.leases.make_room(1)
    assert decode.pool.get_num_free_blocks() == before + 7
    for handle in (shared, other):
        assert decode.claim(handle) is None, "soft"


def test_without_a_pool_there_is_no_room_and_nothing_to_give_back() -> None:
    """Before vLLM has bound it."""
    decode = Decode(None)
    assert not decode.leases.make_room(5)
    decode.leases.give_back()
    decode.leases.drop_all()


def test_a_full_table_gives_the_references_back(decode: Decode) -> None:
    """Then there is no lease and no handle, and nothing that could be had again."""
    decode.leases.table.max_leases = 1
    decode.kept()
    assert decode.retain() is None
    assert decode.pool.held() == 7
    assert decode.stat()['leases{state="soft"}'] == 0


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("end", ["expired", "dropped", "reclaimed"])
def test_a_lease_that_has_ended_is_granted_again(clock: Clock, end: str, caching: bool) -> None:
    """However it ended: to the token, under the same id, as long as nobody needed its blocks."""
    decode = Decode(Pool(100, caching))
    handle = decode.kept()
    if end == "expired":
        clock.now_ns += 60 * S
    elif end == "dropped":
        decode.serve(Drop([handle.lease_id]))
    else:
        decode.leases.make_room(1)
    decode.leases.give_back()
    assert decode.pool.held() == 0
    again = granted(decode.claim_soft(handle))
    assert (again.matched_tokens, len(again.block_ids[0])) == (100, 7)
    assert decode.pool.held() == 7
    assert decode.stat()['leases{state="claimed"}'] == 1
    decode.serve(Release(again.claim_id))
    clock.now_ns += 59 * S
    decode.leases.give_back()
    assert decode.pool.held() == 7, "it has a new term"
    clock.now_ns += S
    decode.leases.give_back()
    assert decode.pool.held() == 0
    granted(decode.claim_soft(handle))
    decode.check()


@pytest.mark.parametrize(("reused", "matched"), [(1, 64), (2, 64), (3, 64), (4, 0), (7, 0)])
def test_what_was_handed_out_since_is_lost(decode: Decode, reused: int, matched: int) -> None:
    """A lease of 100 tokens in 7 blocks loses them from the end; whole segments of the rest are proven."""
    handle = decode.kept()
    decode.serve(Drop([handle.lease_id]))
    decode.leases.give_back()
    others = decode.pool.allocate(93 + reused)
    decode.pool.free(others)
    answer = decode.claim_soft(handle)
    if not matched:
        assert answer == UNKNOWN
        assert decode.pool.held() == 0
        return
    assert granted(answer).matched_tokens == matched
    assert decode.pool.held() == matched // BLOCK


def test_a_soft_lease_proves_no_more_than_it_did(decode: Decode) -> None:
    """Another history gets nothing, or the segments that it shares; another tenant never anything."""
    handle = decode.kept()
    decode.serve(Drop([handle.lease_id]))
    assert decode.claim_soft(handle, [9, *TOKENS[1:]]) == UNKNOWN
    assert decode.claim(handle, TOKENS, salt="another") is None
    decode.lender.answer_deferred(starved=False)
    assert decode.late.pop() == UNKNOWN
    assert decode.pool.held() == 0
    assert granted(decode.claim_soft(handle, TOKENS[:70] + [5] * 31)).matched_tokens == 64


def test_of_what_is_over_nothing_is_remembered(decode: Decode, clock: Clock) -> None:
    """Held, read, ended but not yet given back, or soft: dropped for good it cannot be claimed again."""
    held, read, ended, soft = (decode.kept() for _ in range(4))
    decode.serve(Drop([soft.lease_id]))
    decode.leases.give_back()
    decode.serve(Drop([ended.lease_id]))
    reader = granted(decode.claim(read))
    over = [handle.lease_id for handle in (held, read, ended, soft)]
    assert decode.serve(Drop(over, is_over=True)) == Dropped(2)
    decode.serve(Release(reader.claim_id))
    clock.now_ns += S
    decode.leases.give_back()
    assert decode.pool.held() == 0
    assert decode.stat()['leases{state="soft"}'] == 0
    decode.check()


def test_after_a_reset_nothing_is_soft(decode: Decode) -> None:
    """Weights or memory are others: neither what was soft, nor what a reader still held when it happened."""
    soft, claimed = decode.kept(), decode.kept(list(range(500, 601)))
    decode.serve(Drop([soft.lease_id]))
    reader = granted(decode.claim(claimed, list(range(500, 601))))
    decode.leases.drop_all()
    decode.serve(Release(reader.claim_id))
    decode.leases.give_back()
    assert decode.pool.held() == 0
    for handle in (soft, claimed):
        assert decode.claim(handle) == UNKNOWN
    assert decode.stat()['leases{state="soft"}'] == 0


def test_a_new_incarnation_voids_what_was_granted_before(decode: Decode) -> None:
    """The memory is another: leases end, their handles name nothing, new ones carry its name."""
    old = decode.kept()
    decode.leases.drop_all("i2")
    assert decode.pool.held() == 0
    assert decode.claim(old) == Refused("wrong_incarnation")
    new = decode.kept()
    assert new.incarnation == "i2"
    granted(decode.claim(new))


def test_what_is_had_again_stays_within_the_share() -> None:
    """Unclaimed leases make way for it, claimed ones do not; then the claim is refused."""
    decode = Decode(Pool(100), max_retained_share=0.14)
    first = decode.kept()
    decode.serve(Drop([first.lease_id]))
    second, third = decode.kept(list(range(200, 301))), decode.kept(list(range(400, 501)))
    granted(decode.claim(third, list(range(400, 501))))
    granted(decode.claim_soft(first))
    assert decode.pool.held() == 14
    assert decode.claim_soft(second, list(range(200, 301))) == UNKNOWN
    assert decode.pool.held() == 14
    decode.check()


def test_whoever_is_first_revives_for_all(decode: Decode) -> None:
    """Several claims on one soft lease are each granted, and the blocks are held once."""
    handle = decode.kept()
    decode.serve(Drop([handle.lease_id]))
    assert [decode.claim(handle), decode.claim(handle)] == [None, None]
    decode.lender.answer_deferred(starved=False)
    assert len({granted(answer).claim_id for answer in decode.late}) == 2
    assert decode.pool.held() == 7
    assert not decode.leases.revive(handle.lease_id, chain(TOKENS[:100])), "it is there already"


def test_an_operator_hears_of_reclaims_now_and_then(
    decode: Decode, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line for all of ten seconds, with all that was taken."""
    lines: list[str] = []
    monkeypatch.setattr(module.logger, "info", lambda text, *values: lines.append(text % values))
    for _ in range(5):
        decode.kept()
    for _ in range(3):
        decode.leases.make_room(1)
    clock.now_ns += 10 * S
    decode.leases.make_room(1)
    assert lines == [
        "live work took 7 blocks back from 1 leases; 4 are left",
        "live work took 21 blocks back from 3 leases; 1 are left",
    ]


def test_an_operator_hears_of_a_full_table(decode: Decode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Now and then."""
    lines: list[Any] = []
    monkeypatch.setattr(module.logger, "warning", lambda *text: lines.append(text))
    decode.leases.table.max_leases = 1
    decode.kept()
    for _ in range(3):
        decode.retain()
    assert len(lines) == 1
