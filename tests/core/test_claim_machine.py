"""Whatever is called in whatever order, the read book holds its promises.

What a poll should say is worked out anew each time, from a record of what was sent and heard when.
"""

from collections import Counter
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from kvloop.core.chain import Identity, build_chain, root_digest
from kvloop.core.claim import Keep, Pending, ReadBook, Ready, Recompute, SendClaim, SendRelease
from kvloop.core.handle import HANDLE_VERSION, Handle
from tests.reach import explore_until_reached

KEY = bytes(32)
WANTED = build_chain(KEY, root_digest(KEY, Identity("m", "", "", "", "")), range(200))
HANDLE = Handle(HANDLE_VERSION, "e", "i", "l", "localhost", 1, 1, 1, 1, 200, 1000)
BLOCKS = (tuple(range(13)),)
REPLY_TIMEOUT, MARGIN, TERM, QUESTIONS = 10, 5, 60, 3
MUST_REACH = {"claim", "ready", "recompute", "started", "kept", "discarded", "released", "overdue", "stale"}
MUST_REACH |= {"pending", "sendclaim", "kept after a second question", "no more questions"}
REACHED = Counter[str]()

COMMON = ["ask", "grant", "poll", "start", "finish", "advance", "begin", "begin"]
RARE = ["stale", "refuse", "fail", "give up", "forget", "retry", "finish late", "brief", "lapse", "lapse"]
PLOTS = {
    "begin": ("ask", "advance", "grant", "poll", "start"),
    "retry": ("forget", "ask", "stale", "poll", "start"),
    "finish late": ("oversleep", "finish"),
    "lapse": ("ask", "grant", "oversleep", "poll", "stale", "grant", "poll"),
}
calls = st.tuples(
    st.sampled_from([*COMMON, *COMMON, *RARE]),
    st.sampled_from("rrs"),
    st.sampled_from([0, 1, 3, 9, 54, 60]),
)


@dataclass
class Question:
    """What was sent, and the first grant that came in time, by when it ends; `refused`: or a refusal."""

    number: int
    sent_ns: int
    ends_ns: int | None = None
    refused: bool = False


class Driver:
    """Calls a book, and keeps its own record of what was asked, granted, released and said."""

    def __init__(self) -> None:
        self.book = ReadBook(REPLY_TIMEOUT, 2, MARGIN, QUESTIONS)
        self.now = 0
        self.asks: dict[str, list[Question]] = {}
        self.sent_at: dict[int, int] = {}
        self.granted: dict[str, int] = {}
        self.released: list[str] = []
        self.started: dict[str, Question] = {}
        self.moved_on: set[str] = set()

    def ask(self, request_id: str) -> None:
        """Each request once."""
        command = self.book.ask(request_id, HANDLE, WANTED, self.now)
        if isinstance(command, SendClaim):
            assert request_id not in self.asks
            self.send(command)
            REACHED["claim"] += 1

    def send(self, command: SendClaim) -> None:
        """A question goes out: it has a number of its own."""
        assert command.ask_id == len(self.sent_at) + 1
        self.asks.setdefault(command.request_id, []).append(Question(command.ask_id, self.now))
        self.sent_at[command.ask_id] = self.now

    def expected(self, request_id: str) -> type[object]:
        """What a poll says, from the record: nothing but the last question counts."""
        questions = self.asks.get(request_id)
        if not questions or request_id in self.moved_on or request_id in self.started:
            return Recompute
        last = questions[-1]
        if last.refused:
            return Recompute
        if last.ends_ns is None:
            return Pending if self.now < last.sent_ns + REPLY_TIMEOUT else Recompute
        if self.now < last.ends_ns:
            return Ready
        return SendClaim if len(questions) < QUESTIONS else Recompute

    def grant(self, request_id: str, ask_id: int, term_ns: int = TERM) -> None:
        """An answer, to whatever question. What is not for the last one, or late, is released at once."""
        claim_id = f"c{len(self.granted)}"
        self.granted[claim_id] = ask_id
        sent = self.book.on_granted(request_id, claim_id, 200, BLOCKS, term_ns, self.now, ask_id=ask_id)
        self.note(sent)
        last = self.asks[request_id][-1] if request_id in self.asks else None
        taken = last is not None and last.number == ask_id and self.expected(request_id) is Pending
        if taken and last is not None:
            last.ends_ns = last.sent_ns + term_ns - MARGIN
            taken = self.now < last.ends_ns
        assert [release.claim_id for release in sent] == ([] if taken else [claim_id])

    def refuse(self, request_id: str, ask_id: int) -> None:
        """A refusal, of whatever question."""
        self.book.on_refused(request_id, "no_match", ask_id=ask_id)
        last = self.asks[request_id][-1]
        if last.number == ask_id and self.expected(request_id) is Pending:
            last.refused = True

    def poll(self, request_id: str) -> None:
        """It says what the record says; after one Recompute there is no other answer."""
        expected = self.expected(request_id)
        answer = self.book.poll(request_id, self.now)
        assert type(answer) is expected
        if isinstance(answer, Ready):
            assert answer.deadline_ns == self.asks[request_id][-1].ends_ns
        if isinstance(answer, SendClaim):
            self.send(answer)
        if isinstance(answer, Recompute) and request_id in self.asks:
            self.moved_on.add(request_id)
            questions = self.asks[request_id]
            REACHED["no more questions"] += answer.reason == "deadline" and len(questions) == QUESTIONS
        REACHED[type(answer).__name__.lower()] += 1

    def start(self, request_id: str) -> None:
        """Only what was granted, and once."""
        if self.book.start(request_id):
            question = self.asks[request_id][-1]
            assert request_id not in self.moved_on
            assert request_id not in self.started
            assert question.ends_ns is not None
            self.started[request_id] = question
            REACHED["started"] += 1

    def finish(self, request_id: str, *, failed: bool) -> None:
        """Kept is only what was started, still waited for, and in time."""
        verdict, sent = self.book.finish(request_id, self.now, failed=failed)
        self.note(sent)
        REACHED["kept" if isinstance(verdict, Keep) else "discarded"] += 1
        if isinstance(verdict, Keep):
            assert not failed
            assert request_id not in self.moved_on
            ends_ns = self.started[request_id].ends_ns
            assert ends_ns is not None
            assert self.now < ends_ns
            self.moved_on.add(request_id)
            REACHED["kept after a second question"] += len(self.asks[request_id]) > 1

    def forget(self, request_id: str) -> None:
        """The id may come back as another request."""
        self.note(self.book.forget(request_id))
        self.asks.pop(request_id, None)
        self.started.pop(request_id, None)
        self.moved_on.discard(request_id)

    def advance(self, step: int) -> None:
        """Who is overdue is told once, and reads."""
        self.now += step
        for request_id in self.book.advance(self.now):
            assert request_id in self.started
            assert request_id not in self.moved_on
            self.moved_on.add(request_id)
            REACHED["overdue"] += 1

    def note(self, sent: tuple[SendRelease, ...]) -> None:
        """No claim is released twice."""
        self.released += [release.claim_id for release in sent]
        assert len(self.released) == len(set(self.released))
        REACHED["released"] += len(sent)

    def call(self, name: str, request_id: str, number: int) -> None:
        """One of the calls above, or several that belong together."""
        for part in PLOTS.get(name, ()):
            self.call(part, request_id, number if number < REPLY_TIMEOUT else 0)
        last = self.asks[request_id][-1].number if request_id in self.asks else None
        if name in ("grant", "brief") and last is not None:
            self.grant(request_id, last, TERM if name == "grant" else MARGIN)
        elif name == "stale" and self.sent_at and last != 1:
            REACHED["stale"] += 1
            stale = last - 1 if last else len(self.sent_at)
            self.grant(request_id, stale)
            if last:
                self.refuse(request_id, stale)
        elif name == "refuse" and last is not None:
            self.refuse(request_id, last)
        elif name == "give up":
            self.note(self.book.give_up(request_id, "aborted", self.now))
            if request_id in self.asks:
                self.moved_on.add(request_id)
        elif name in ("finish", "fail"):
            self.finish(request_id, failed=name == "fail")
        elif name == "advance":
            self.advance(number)
        elif name == "oversleep":
            self.now += TERM - MARGIN
        elif name in ("ask", "poll", "start", "forget"):
            getattr(self, name)(request_id)


@settings(deadline=None, max_examples=300)
@given(st.lists(calls, min_size=5, max_size=60))
def explore(script: list[tuple[str, str, int]]) -> None:
    """Play a script; then let decode grant and time pass until nobody asks; then forget everything: each
    claim was released, or is past the time it counts."""
    driver = Driver()
    for call in script:
        driver.call(*call)
        driver.book.check_integrity()
    for request_id in "rs":
        for name in ("poll", "grant", "oversleep") * QUESTIONS + ("poll",):
            driver.call(name, request_id, 0)
        assert driver.expected(request_id) is Recompute, "somebody asks for ever"
        assert len(driver.asks.get(request_id, ())) <= QUESTIONS
        driver.forget(request_id)
    assert len(driver.book) == 0
    assert driver.book.next_deadline_ns() is None
    for claim_id in driver.granted.keys() - set(driver.released):
        assert driver.now >= driver.sent_at[driver.granted[claim_id]] + TERM - MARGIN, "a claim was lost"


def test_any_order_of_calls_is_survived() -> None:
    """Nothing raises; each claim is released once or lapses; a read is kept only in time and while somebody
    waits for it; after one Recompute a request hears nothing else; nobody asks more often than he may, nor
    after his read began. And the scripts reach all of that."""
    explore_until_reached(explore, REACHED, MUST_REACH)
