"""What peers are answered, on which thread, and when."""

from collections.abc import Iterator
from typing import Any

import pytest

from kvloop.connector import lend as module
from kvloop.wire.control import (
    Claim,
    Drop,
    Failed,
    Message,
    Refused,
    Release,
    Released,
    Renew,
    Renewed,
    Stat,
    StatReply,
)
from tests.connector.decode import BLOCK_BYTES, TOKENS, Decode, granted, stop_time
from tests.connector.fakes import Clock, Pool, S, make_source

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


def test_a_claim_gets_what_is_proven(decode: Decode) -> None:
    """To the token where the history goes on, to the segment where it does not; blocks for just that."""
    handle = decode.kept()
    (lease,) = decode.leases.held()
    whole = granted(decode.claim(handle, TOKENS + [5] * 50))
    assert (whole.matched_tokens, whole.term_ms) == (100, 5_000)
    assert whole.block_ids == [list(lease)]
    assert whole.source == make_source(f"kvloop:{whole.claim_id}")
    part = granted(decode.claim(handle, TOKENS[:80] + [5] * 50))
    assert (part.matched_tokens, part.block_ids) == (64, [list(lease[:4])])
    assert part.claim_id != whole.claim_id
    assert decode.woken == 0, "no step is needed for it"


@pytest.mark.parametrize(
    ("tokens", "salt", "reason"),
    [([7, *TOKENS[1:]], "", "no_match"), (TOKENS, "another tenant", "wrong_root")],
)
def test_what_is_not_proven_is_refused(decode: Decode, tokens: list[int], salt: str, reason: str) -> None:
    """Another history, another tenant's root."""
    handle = decode.kept()
    assert decode.claim(handle, tokens, salt) == Refused(reason)
    assert decode.stat()[f'claims_total{{outcome="{reason}"}}'] == 1


def test_a_claim_whose_chain_is_no_chain_is_refused(decode: Decode) -> None:
    """Its lengths come from a peer. On a soft lease, too."""
    handle = decode.kept()
    bad = Claim(handle.lease_id, "i1", bytes(16), bytes(16), b"", 1000)
    assert decode.serve(bad) == Refused("malformed")
    decode.serve(Drop([handle.lease_id]))
    assert decode.serve(bad) is None
    decode.lender.answer_deferred(starved=False)
    assert decode.late == [Refused("malformed")]
    assert decode.stat()['claims_total{outcome="malformed"}'] == 2


def test_a_claim_on_a_soft_lease_waits_for_the_scheduler_s_thread_and_wakes_it(decode: Decode) -> None:
    """Once for all that come before it has looked."""
    handle = decode.kept()
    decode.serve(Drop([handle.lease_id]))
    for _ in range(3):
        assert decode.claim(handle) is None
    assert decode.woken == 1
    decode.lender.answer_deferred(starved=False)
    assert len([granted(answer) for answer in decode.late]) == 3
    decode.lender.answer_deferred(starved=False)
    assert len(decode.late) == 3, "each once"
    decode.serve(Drop([handle.lease_id]))
    assert decode.claim(handle) == Refused("released"), "it is still read, so it is not soft"
    assert decode.woken == 1


def test_without_anybody_to_wake_soft_leases_are_gone(decode: Decode) -> None:
    """An engine core that cannot be woken would answer with its next request, or never."""
    decode.lender.wake_with(None)
    handle = decode.kept()
    decode.serve(Drop([handle.lease_id]))
    assert decode.claim(handle) == UNKNOWN
    assert decode.serve(Renew([(handle.lease_id, 1_000, 500)])) == Renewed([handle.lease_id], [])


def test_a_claim_that_nobody_waits_for_takes_nothing(decode: Decode, clock: Clock) -> None:
    """A step may take longer than a reader's patience; the grant would only pin blocks."""
    handle = decode.kept()
    decode.serve(Drop([handle.lease_id]))
    decode.claim(handle)
    clock.now_ns += S
    decode.lender.answer_deferred(starved=False)
    decode.leases.give_back()
    assert decode.late == [UNKNOWN]
    assert decode.pool.held() == 0


def test_live_work_that_lacks_blocks_is_not_made_to_lack_more(decode: Decode) -> None:
    """The claim is refused, and may be made again."""
    handle = decode.kept()
    decode.serve(Drop([handle.lease_id]))
    assert decode.claim_soft(handle, starved=True) == UNKNOWN
    decode.leases.give_back()
    assert decode.pool.held() == 0
    granted(decode.claim_soft(handle))


def test_so_many_claims_wait_and_no_more(decode: Decode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next is refused at once."""
    monkeypatch.setattr(module, "MAX_DEFERRED_CLAIMS", 2)
    handle = decode.kept()
    decode.serve(Drop([handle.lease_id]))
    assert [decode.claim(handle) for _ in range(3)] == [None, None, UNKNOWN]


def test_a_handle_from_before_a_restart_wakes_nobody(decode: Decode) -> None:
    """It is refused, whatever else is called so now."""
    handle = decode.kept()
    decode.serve(Drop([handle.lease_id]))
    stale = Claim(handle.lease_id, "i0", bytes(16), bytes(16), b"", 64)
    assert decode.serve(stale) == Refused("wrong_incarnation")
    assert decode.woken == 0


def test_a_renewal_says_what_was_not_renewed_and_why(decode: Decode) -> None:
    """Gone for good, or soft: also one that is ending but still read, which will be."""
    live, dropped, read = (decode.kept() for _ in range(3))
    granted(decode.claim(read))
    decode.serve(Drop([dropped.lease_id, read.lease_id]))
    asked = [(handle.lease_id, 60_000, 700) for handle in (live, dropped, read)] + [("never was", 1, 0)]
    expected = Renewed(["never was"], [dropped.lease_id, read.lease_id])
    assert decode.serve(Renew(asked)) == expected
    decode.leases.give_back()
    assert decode.serve(Renew(asked)) == expected
    counts = decode.stat()
    assert counts['renewals_total{outcome="renewed"}'] == 2
    assert counts['renewals_total{outcome="lost"}'] == 6


def test_a_renewal_s_chance_decides_who_goes_first(decode: Decode) -> None:
    """What the router has learned of their return."""
    handles = [decode.kept() for _ in range(3)]
    decode.serve(Renew([(handle.lease_id, 60_000, 100 * (3 - i)) for i, handle in enumerate(handles)]))
    for handle in reversed(handles):
        decode.leases.make_room(1)
        assert decode.claim(handle) is None, "soft"


def test_stat_says_who_answers_and_all_that_is_counted(decode: Decode, clock: Clock) -> None:
    """Leases, blocks and for how long, claims, and how leases have ended; what never was is counted as 0."""
    one, _, three, four = (decode.kept() for _ in range(4))
    clock.now_ns += 3 * S
    granted(decode.claim(one))
    decode.claim(one, [5] * 101)
    decode.serve(Drop([three.lease_id]))
    decode.leases.give_back()
    granted(decode.claim_soft(three))
    decode.leases.make_room(1)
    decode.serve(Drop([four.lease_id]))
    answer = decode.serve(Stat())
    assert isinstance(answer, StatReply)
    assert (answer.engine_id, answer.incarnation) == ("decode-0", "i1")
    counts = decode.stat()
    assert {name: count for name, count in counts.items() if count} == {
        'leases{state="claimed"}': 2,
        'leases{state="soft"}': 2,
        "lease_blocks": 14,
        "lease_bytes": 14 * BLOCK_BYTES,
        "lease_block_seconds_total": 4 * 7 * 3,
        "leases_granted_total": 5,
        'leases_ended_total{state="released"}': 2,
        'leases_ended_total{state="reclaimed"}': 1,
        'claims_total{outcome="granted"}': 2,
        'claims_total{outcome="no_match"}': 1,
        'control_frames_dropped_total{reason="forged"}': 3,
    }
    assert counts['leases{state="granted"}'] == counts["unbalanced_blocks"] == 0


@pytest.mark.parametrize("message", [Released(True), Failed("x"), Refused("x"), Renewed([], [])])
def test_an_answer_is_no_question(decode: Decode, message: Message) -> None:
    """It is answered, but not acted on."""
    assert decode.serve(message) == Failed("not a question")


def test_a_release_that_never_was_is_harmless(decode: Decode) -> None:
    """As one that comes twice."""
    claim: Any = granted(decode.claim(decode.kept()))
    answers = [decode.serve(Release(claim_id)) for claim_id in (claim.claim_id, claim.claim_id, "x")]
    assert answers == [Released(True), Released(False), Released(False)]
