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
from kvloop.core.claim_state import FINAL, IN_FLIGHT
from kvloop.core.handle import HANDLE_VERSION, Handle
from kvloop.core.lease import RefusalReason

KEY = bytes(32)
ROOT = root_digest(KEY, Identity("m", "", "", "", ""))
WANTED = build_chain(KEY, ROOT, range(200))
HANDLE = Handle(HANDLE_VERSION, "e", "i", "l", "localhost", 1, 1, 1, 1, 200, 1000)
BLOCKS = (tuple(range(13)),)
REPLY_TIMEOUT, MARGIN, TERM = 10, 5, 100
DEADLINE = TERM - MARGIN  # of a claim sent at 0
QUESTIONS = 3
RELEASE = (SendRelease("r", "c", HANDLE),)


def asked_book() -> ReadBook:
    """A book whose request "r" asked at time 0, as its first question."""
    book = ReadBook(REPLY_TIMEOUT, 4, MARGIN, QUESTIONS)
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
    """A claim that does not outlive the margin is not read from, given back once, and asked for again."""
    book = asked_book()
    assert book.on_granted("r", "c", 200, BLOCKS, MARGIN, 1, ask_id=1) == RELEASE
    assert not book.start("r")
    assert book.on_granted("r", "c", 200, BLOCKS, MARGIN, 1, ask_id=1) == ()
    assert book.poll("r", 1) == SendClaim("r", 2, HANDLE, WANTED)


def lapsed_book() -> ReadBook:
    """A book whose request "r" was granted a claim that ended before its turn came."""
    book = asked_book()
    granted(book, 1)
    assert book.advance(DEADLINE) == []
    assert book.state("r") is ReadState.LAPSED
    assert book.next_deadline_ns() is None
    book.check_integrity()
    return book


def test_a_claim_that_lapsed_in_the_queue_is_asked_for_again() -> None:
    """When the request's turn has come: another question, and a deadline that is counted from it."""
    book, turn = lapsed_book(), 10 * DEADLINE
    assert not book.start("r")
    assert book.poll("r", turn) == SendClaim("r", 2, HANDLE, WANTED)
    assert book.poll("r", turn) == Pending()
    assert not book.start("r")
    assert granted(book, turn + 1, "c2", ask_id=2) == ()
    assert book.poll("r", turn + 2) == Ready(200, BLOCKS, turn + DEADLINE)
    assert book.start("r")
    assert book.finish("r", turn + DEADLINE - 1) == (Keep(), (SendRelease("r", "c2", HANDLE),))


def test_a_lapse_that_nobody_noticed_is_noticed_by_the_poll() -> None:
    """Without a call to `advance`, a request that could not be scheduled before the deadline asks again."""
    book = asked_book()
    granted(book, 1)
    assert book.poll("r", DEADLINE) == SendClaim("r", 2, HANDLE, WANTED)
    book.check_integrity()


def test_questions_come_to_an_end() -> None:
    """Whose turn never comes within a claim's time computes, after so many questions."""
    book, now, sent = asked_book(), 0, 1
    while True:
        granted(book, now, f"c{sent}", ask_id=sent)
        now += DEADLINE
        answer = book.poll("r", now)
        if not isinstance(answer, SendClaim):
            break
        sent += 1
        assert answer.ask_id == sent
    assert sent == QUESTIONS
    assert answer == Recompute(RecomputeReason.DEADLINE)
    assert book.state("r") is ReadState.DISCARDED
    assert granted(book, now, "late", ask_id=sent) == (SendRelease("r", "late", HANDLE),)
    assert book.poll("r", now) == Recompute(RecomputeReason.DEADLINE)


def test_answers_to_the_question_before_are_not_taken() -> None:
    """Once it has asked again: a late grant goes back to who granted it, a late refusal is ignored."""
    book = lapsed_book()
    book.poll("r", DEADLINE)
    assert granted(book, DEADLINE + 1, "old") == (SendRelease("r", "old", None),)
    book.on_refused("r", RefusalReason.NO_MATCH, ask_id=1)
    assert book.poll("r", DEADLINE + 1) == Pending()


def test_another_grant_for_a_lapsed_question_is_released() -> None:
    """Nobody reads from it; the one that lapsed ends by itself."""
    book = lapsed_book()
    assert granted(book, DEADLINE + 1) == ()
    assert granted(book, DEADLINE + 1, "c2") == (SendRelease("r", "c2", HANDLE),)
    book.on_refused("r", RefusalReason.NO_MATCH, ask_id=1)
    assert book.state("r") is ReadState.LAPSED


def test_each_question_is_waited_for_as_long() -> None:
    """One asked again times out by itself; and where no reply came, nothing is asked again."""
    book = lapsed_book()
    book.poll("r", 200)
    assert book.next_deadline_ns() == 200 + REPLY_TIMEOUT
    assert book.poll("r", 200 + REPLY_TIMEOUT - 1) == Pending()
    assert book.poll("r", 200 + REPLY_TIMEOUT) == Recompute(RecomputeReason.NO_REPLY)
    assert granted(book, 200 + REPLY_TIMEOUT, ask_id=2) == RELEASE
    assert book.poll("r", 900) == Recompute(RecomputeReason.NO_REPLY)


def test_a_refusal_of_the_second_question_is_the_reason() -> None:
    """The lease has ended meanwhile: that, and not the first claim's deadline, is why it computes."""
    book = lapsed_book()
    book.poll("r", 200)
    book.on_refused("r", RefusalReason.EXPIRED, ask_id=2)
    assert book.poll("r", 201) == Recompute(RefusalReason.EXPIRED)


def test_a_lapsed_claim_is_released_by_nobody() -> None:
    """Aborted or forgotten while it waits for its turn, a request has nothing to give back, and is silent."""
    book = lapsed_book()
    assert book.give_up("r", "aborted", DEADLINE) == ()
    assert book.poll("r", DEADLINE) == Recompute("aborted")
    assert lapsed_book().forget("r") == ()
    assert lapsed_book().finish("r", DEADLINE) == (Discard(RecomputeReason.TRIED), ())


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


@pytest.mark.parametrize("bounds", [(0, 1, 0), (1, 0, 0), (1, 1, -1), (1, 1, 0, 0)])
def test_bounds_must_be_positive(bounds: tuple[int, ...]) -> None:
    """A book without time, room or questions is a mistake in the configuration."""
    with pytest.raises(ValueError, match="positive"):
        ReadBook(*bounds)


def test_no_event_leads_out_of_a_final_state() -> None:
    """Done is done, and only a read that was started can be."""
    for state, event in product(FINAL, ReadEvent):
        assert (state, event) not in TRANSITIONS
    ways = [move for move, after in TRANSITIONS.items() if after is ReadState.DONE]
    assert ways == [(ReadState.READING, ReadEvent.FINISH)]


def test_no_question_is_asked_once_a_read_has_begun() -> None:
    """From a read no way of the table leads back to a question; from a lapse only the one through it."""
    reached = set(IN_FLIGHT)
    while more := {after for (before, _), after in TRANSITIONS.items() if before in reached} - reached:
        reached |= more
    assert reached == {*IN_FLIGHT, *FINAL}
    into = {move for move, after in TRANSITIONS.items() if after in (ReadState.ASKED, ReadState.LAPSED)}
    assert into == {(ReadState.GRANTED, ReadEvent.LAPSE), (ReadState.LAPSED, ReadEvent.ASK_AGAIN)}
