"""The read machine, move by move. Any order of calls: test_claim_machine.py; two peers: tests/wire."""

from itertools import product

import pytest

from kvloop.core.chain import Identity, build_chain, root_digest
from kvloop.core.claim import (
    TRANSITIONS,
    Discard,
    Keep,
    Pending,
    ReadBook,
    ReadEvent,
    ReadState,
    Ready,
    Recompute,
    RecomputeReason,
    SendClaim,
    SendRelease,
)
from kvloop.core.claim_state import FINAL
from kvloop.core.handle import HANDLE_VERSION, Handle
from kvloop.core.lease import RefusalReason

KEY = bytes(32)
ROOT = root_digest(KEY, Identity("m", "", "", "", ""))
WANTED = build_chain(KEY, ROOT, range(200))
HANDLE = Handle(HANDLE_VERSION, "e", "i", "l", "localhost", 1, 1, 1, 1, 200, 1000)
BLOCKS = (tuple(range(13)),)
REPLY_TIMEOUT, MARGIN, TERM = 10, 5, 100
DEADLINE = TERM - MARGIN  # of a claim sent at 0
RELEASE = (SendRelease("r", "c", HANDLE),)


def asked_book() -> ReadBook:
    """A book whose request "r" asked at time 0, as its first question."""
    book = ReadBook(REPLY_TIMEOUT, 4, MARGIN)
    assert book.ask("r", HANDLE, WANTED, 0) == SendClaim("r", 1, HANDLE, WANTED)
    assert book.poll("r", 0) == Pending()
    return book


def granted(book: ReadBook, now_ns: int, claim_id: str = "c", ask_id: int = 1) -> tuple[SendRelease, ...]:
    """Decode grants all 200 tokens."""
    released = book.on_granted("r", claim_id, 200, BLOCKS, TERM, now_ns, ask_id=ask_id)
    book.check_integrity()
    return released


def reading_book() -> ReadBook:
    """A book whose request "r" reads."""
    book = asked_book()
    assert granted(book, 3) == ()
    assert book.poll("r", 4) == Ready(200, BLOCKS, DEADLINE)
    assert book.start("r")
    assert book.is_in_flight("r")
    return book


def test_a_read_in_time_is_kept_and_released() -> None:
    """Asked, granted, read: kept, the claim released, and never offered again."""
    book = reading_book()
    assert book.finish("r", DEADLINE - 1) == (Keep(), RELEASE)
    assert book.poll("r", DEADLINE - 1) == Recompute(RecomputeReason.TRIED)
    assert book.ask("r", HANDLE, WANTED, DEADLINE) == Recompute(RecomputeReason.TRIED)
    assert book.forget("r") == ()
    assert book.poll("r", DEADLINE) == Recompute(RecomputeReason.NOT_ASKED)


def test_a_read_that_ends_at_its_deadline_is_discarded() -> None:
    """The deadline, counted from the question, less the margin, is already too late."""
    book = reading_book()
    assert book.finish("r", DEADLINE) == (Discard(RecomputeReason.DEADLINE), ())
    assert book.poll("r", DEADLINE) == Recompute(RecomputeReason.DEADLINE)


def test_the_deadline_counts_from_the_question() -> None:
    """However late in time the answer came, the claim's term began when it was asked for."""
    book = asked_book()
    granted(book, REPLY_TIMEOUT - 1)
    assert book.poll("r", REPLY_TIMEOUT - 1) == Ready(200, BLOCKS, DEADLINE)


def test_no_answer_is_an_answer() -> None:
    """After the reply timeout the request recomputes; the grant that still comes is released at once."""
    book = asked_book()
    assert book.poll("r", REPLY_TIMEOUT) == Recompute(RecomputeReason.NO_REPLY)
    assert granted(book, REPLY_TIMEOUT + 1) == RELEASE
    assert granted(book, REPLY_TIMEOUT + 2) == ()
    assert book.poll("r", REPLY_TIMEOUT + 2) == Recompute(RecomputeReason.NO_REPLY)
    assert not book.start("r")


def test_a_late_grant_is_late_even_if_nobody_looked() -> None:
    """A grant after the timeout is released whether or not the request has polled meanwhile."""
    assert granted(asked_book(), REPLY_TIMEOUT) == RELEASE


def test_duplicate_grants_change_nothing() -> None:
    """The same grant twice is one; another claim for the same question is released."""
    book = reading_book()
    assert granted(book, 5) == ()
    assert granted(book, 5, "c2") == (SendRelease("r", "c2", HANDLE),)
    assert book.state("r") is ReadState.READING


def test_a_grant_to_an_earlier_question_is_not_taken() -> None:
    """A request id that comes back is another question: the old grant, with the old deadline, is released."""
    book = asked_book()
    book.forget("r")
    assert book.ask("r", HANDLE, WANTED, 50) == SendClaim("r", 2, HANDLE, WANTED)
    assert granted(book, 51, "old", ask_id=1) == (SendRelease("r", "old", None),)
    book.on_refused("r", RefusalReason.NO_MATCH, ask_id=1)
    assert book.poll("r", 51) == Pending()


def test_a_grant_to_a_request_that_is_gone_is_released() -> None:
    """Nobody knows the request any more, and still decode gets its claim back."""
    book = asked_book()
    assert book.forget("r") == ()
    assert granted(book, 1) == (SendRelease("r", "c", None),)


def test_refused_is_recomputed() -> None:
    """Decode's reason is the request's; one that we do not know is "refused"."""
    book = asked_book()
    book.on_refused("r", "expired", ask_id=1)
    assert book.poll("r", 1) == Recompute(RefusalReason.EXPIRED)
    assert granted(book, 2) == (SendRelease("r", "c", HANDLE),)
    newer = asked_book()
    newer.on_refused("r", "of a later version", ask_id=1)
    assert newer.poll("r", 1) == Recompute(RecomputeReason.REFUSED)


def test_a_refusal_after_the_timeout_keeps_the_first_reason() -> None:
    """What the request was told once it is told again."""
    book = asked_book()
    book.poll("r", REPLY_TIMEOUT)
    book.on_refused("r", RefusalReason.NO_MATCH, ask_id=1)
    assert book.poll("r", REPLY_TIMEOUT) == Recompute(RecomputeReason.NO_REPLY)


@pytest.mark.parametrize(
    ("matched", "blocks"), [(0, BLOCKS), (201, BLOCKS), (65, BLOCKS), (64, ()), (64, ((),)), (-64, BLOCKS)]
)
def test_an_impossible_grant_is_released(matched: int, blocks: tuple[tuple[int, ...], ...]) -> None:
    """More than was asked for, or no whole segment, or no blocks: no proof says so, so nothing is read."""
    book = asked_book()
    assert book.on_granted("r", "c", matched, blocks, TERM, 1, ask_id=1) == RELEASE
    assert book.poll("r", 1) == Recompute(RecomputeReason.BAD_GRANT)


def test_a_term_within_the_margin_is_no_grant() -> None:
    """A claim that does not outlive the margin is not read from, and given back."""
    book = asked_book()
    assert book.on_granted("r", "c", 200, BLOCKS, MARGIN, 1, ask_id=1) == RELEASE
    assert book.poll("r", 1) == Recompute(RecomputeReason.DEADLINE)


def test_a_grant_not_used_in_time_lapses() -> None:
    """A request that could not be scheduled before the deadline does not start to read."""
    book = asked_book()
    granted(book, 1)
    assert book.poll("r", DEADLINE) == Recompute(RecomputeReason.DEADLINE)
    assert not book.start("r")


def test_a_failed_read_is_discarded_and_released() -> None:
    """A transfer error costs the read, never the request."""
    book = reading_book()
    assert book.finish("r", 9, failed=True) == (Discard(RecomputeReason.READ_FAILED), RELEASE)
    assert book.poll("r", 9) == Recompute(RecomputeReason.READ_FAILED)


def test_a_hanging_read_does_not_hang_its_request() -> None:
    """At the deadline the request is told to go on; the blocks stay in flight until the transfer ends."""
    book = reading_book()
    assert book.next_deadline_ns() == DEADLINE
    assert book.advance(DEADLINE - 1) == []
    assert book.advance(DEADLINE) == ["r"]
    assert book.advance(DEADLINE) == []
    assert book.poll("r", DEADLINE) == Recompute(RecomputeReason.DEADLINE)
    assert book.is_in_flight("r")
    assert book.finish("r", DEADLINE + 99) == (Discard(RecomputeReason.DEADLINE), ())
    assert not book.is_in_flight("r")


def test_giving_up_releases_once() -> None:
    """Aborted while it reads, a request releases its claim at once; what then lands is discarded."""
    book = reading_book()
    assert book.give_up("r", "aborted", 9) == RELEASE
    assert book.give_up("r", "aborted", 9) == ()
    assert book.is_in_flight("r")
    assert book.finish("r", 10) == (Discard("aborted"), ())
    assert book.forget("r") == ()


def test_giving_up_before_the_answer_releases_the_answer() -> None:
    """A grant that was asked for and is not wanted any more goes back."""
    book = asked_book()
    assert book.give_up("r", "aborted", 1) == ()
    assert granted(book, 2) == RELEASE


def test_giving_up_what_was_granted_releases_it() -> None:
    """Not worth reading: the claim goes back at once, and the request is not asked again."""
    book = asked_book()
    granted(book, 1)
    assert book.give_up("r", "below_threshold", 2) == RELEASE
    assert book.poll("r", 2) == Recompute("below_threshold")


def test_polling_while_reading_gives_the_read_up() -> None:
    """A request that is scheduled anew while its read runs computes; what is read is discarded."""
    book = reading_book()
    assert book.poll("r", 9) == Recompute(RecomputeReason.TRIED)
    assert book.finish("r", 10) == (Discard(RecomputeReason.TRIED), RELEASE)


def test_forgetting_releases_what_is_held() -> None:
    """A request that goes away in mid-read takes no claim with it."""
    assert reading_book().forget("r") == RELEASE


def test_finishing_what_was_not_started_keeps_nothing() -> None:
    """A stray completion is never a reason to trust blocks."""
    book = asked_book()
    assert book.finish("r", 1) == (Discard(RecomputeReason.TRIED), ())
    assert book.finish("?", 1) == (Discard(RecomputeReason.NOT_ASKED), ())


def test_what_nothing_can_be_proven_of_is_not_asked_for() -> None:
    """A prompt shorter than one segment, unless it is all that decode holds, costs no round trip."""
    book = ReadBook(REPLY_TIMEOUT, 4, MARGIN)
    short = build_chain(KEY, ROOT, range(63))
    assert book.ask("r", HANDLE, short, 0) == Recompute(RecomputeReason.TOO_SHORT)
    all_of_it = Handle(HANDLE_VERSION, "e", "i", "l", "localhost", 1, 1, 1, 1, 63, 1000)
    assert isinstance(book.ask("r", all_of_it, short, 0), SendClaim)
    nothing = build_chain(KEY, ROOT, [])
    assert book.ask("s", HANDLE, nothing, 0) == Recompute(RecomputeReason.TOO_SHORT)


def test_reads_are_bounded() -> None:
    """One request more than `max_reads` recomputes, until one is forgotten."""
    book = ReadBook(REPLY_TIMEOUT, 1, MARGIN)
    book.ask("r", HANDLE, WANTED, 0)
    assert book.ask("s", HANDLE, WANTED, 0) == Recompute(RecomputeReason.TOO_MANY_READS)
    book.forget("r")
    assert isinstance(book.ask("s", HANDLE, WANTED, 0), SendClaim)


def test_bounds_must_be_positive() -> None:
    """A book without time or room is a mistake in the configuration."""
    with pytest.raises(ValueError, match="positive"):
        ReadBook(0, 1, 0)


def test_no_event_leads_out_of_a_final_state() -> None:
    """Done is done, and only a read that was started can be."""
    for state, event in product(FINAL, ReadEvent):
        assert (state, event) not in TRANSITIONS
    ways = [move for move, after in TRANSITIONS.items() if after is ReadState.DONE]
    assert ways == [(ReadState.READING, ReadEvent.FINISH)]
