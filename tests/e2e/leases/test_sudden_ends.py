"""SIGKILL, with a turn at every place where it can meet one: before the claim, during the read, after it.

One death meets several turns, for starting an engine takes longer than all that is shown here. What the dead
engine took with it is computed again; what it had borrowed from the living one comes back by itself.
"""

import http.client
import urllib.error
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest

from kvloop.local.stack import Stack
from kvloop.wire.control import Claim, Granted, Release
from tests.e2e.conftest import whole_again
from tests.e2e.counters import check_books, counters
from tests.e2e.leases.books import CLAIMED, check_all_home
from tests.e2e.leases.conftest import CLAIM_TIMEOUT_MS
from tests.e2e.link import Frame, Link
from tests.e2e.test_histories import Messages, assistant, check, two_turns, user
from tests.e2e.turns import Pair, Turn

READING_S = 0.5
BROKEN = (urllib.error.URLError, http.client.HTTPException, ConnectionError)


def history_of(pair: Pair, subject: str) -> tuple[Messages, Turn]:
    """A held history with the next question asked, and the turn whose lease holds it."""
    history, last = two_turns(pair, subject)
    return [*history, user("And?")], last


def reads(pair: Pair) -> int:
    """Reads back that have ended at prefill, well or not."""
    counts = counters(pair.prefill)
    return sum(count for name, count in counts.items() if name.startswith("kvloop_reads_total"))


def in_the_middle_of_a_read(
    pool: ThreadPoolExecutor, pair: Pair, link: Link, turn: Callable[[], Any]
) -> Future[Any]:
    """Begin a turn, and freeze decode after its grant: the read that follows waits for it."""
    granted = Event()

    def freeze(frame: Frame) -> Sequence[float]:
        if isinstance(frame.message, Granted):
            pair.decode.stop()
            granted.set()
        return (0.0,)

    link.weather = freeze
    begun = pool.submit(turn)
    assert granted.wait(CLAIM_TIMEOUT_MS / 1000)
    assert not begun.done()
    Event().wait(READING_S)
    return begun


def test_decode(pair: Pair, link: Link, lease_stack: Stack) -> None:
    """Whose claim it never sees, and whose read it breaks off, computes; who has read from it goes on from
    that with the next process."""
    early, middle, late = (history_of(pair, subject) for subject in ("early", "middle", "late"))
    lent = pair.prefill_hop(late[0], late[1].filed)
    assert lent["kvloop_turn"]["returned_tokens"] > 0
    before = reads(pair)
    with ThreadPoolExecutor(1) as pool:
        begun = in_the_middle_of_a_read(
            pool, pair, link, lambda: pair.prefill_hop(middle[0], link.through(middle[1].filed))
        )
        pair.decode.kill()
        broken = begun.result()["kvloop_turn"]
    assert (broken["returned_tokens"], broken["computed_tokens"]) == (0, broken["prompt_tokens"])
    assert broken["reason"] in ("read_failed", "deadline")
    assert reads(pair) == before + 1, "the read had not begun: nothing is shown"
    unheard = pair.prefill_hop(early[0], early[1].filed)["kvloop_turn"]
    assert (unheard["returned_tokens"], unheard["reason"]) == (0, "no_reply")
    check_books(pair.prefill)
    whole_again(lease_stack)
    assert pair.decode_hop(late[0], lent).tokens == pair.oracle(late[0])
    for messages, last in (early, middle):
        turn = pair.turn(messages, last.filed)
        check(pair, turn, messages)
        assert turn.reason == "wrong_incarnation"
    messages = [*messages, assistant(turn.text), user("More?")]
    turn = pair.turn(messages, turn.filed)
    check(pair, turn, messages)
    assert turn.returned > 0


def test_prefill(pair: Pair, link: Link) -> None:
    """The claim of a dead reader ends at its term, and its lease after it; a turn that it had handed over is
    computed by decode."""
    middle, late = (history_of(pair, subject) for subject in ("middle", "late"))
    oracle = pair.oracle(late[0])
    handed_over = pair.prefill_hop(late[0], late[1].filed)
    assert handed_over["kvloop_turn"]["returned_tokens"] > 0
    with ThreadPoolExecutor(1) as pool:
        begun = in_the_middle_of_a_read(
            pool, pair, link, lambda: pair.prefill_hop(middle[0], link.through(middle[1].filed))
        )
        pair.prefill.kill()
        pair.decode.cont()
        with pytest.raises(BROKEN):
            begun.result()
    assert counters(pair.decode)[CLAIMED] == 1
    assert (link.count(Claim), link.count(Release)) == (1, 0)
    assert pair.decode_hop(late[0], handed_over).tokens == oracle
    check_all_home(pair)
