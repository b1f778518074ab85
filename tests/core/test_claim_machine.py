"""Whatever is called in whatever order, the read book holds its promises."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from kvloop.core.chain import Identity, build_chain, root_digest
from kvloop.core.claim import Keep, ReadBook, Ready, Recompute, SendClaim, SendRelease
from kvloop.core.handle import HANDLE_VERSION, Handle

KEY = bytes(32)
WANTED = build_chain(KEY, root_digest(KEY, Identity("m", "", "", "", "")), range(200))
HANDLE = Handle(HANDLE_VERSION, "e", "i", "l", "localhost", 1, 1, 1, 1, 200, 1000)
BLOCKS = (tuple(range(13)),)
REPLY_TIMEOUT, MARGIN, TERM = 10, 5, 60
MUST_REACH = {"claim", "ready", "recompute", "started", "kept", "discarded", "released", "overdue", "stale"}
REACHED = Counter[str]()

COMMON = ["ask", "grant", "poll", "start", "finish", "advance", "begin", "begin"]
RARE = ["stale", "refuse", "fail", "give up", "forget", "retry", "finish late"]
PLOTS = {
    "begin": ("ask", "advance", "grant", "poll", "start"),
    "retry": ("forget", "ask", "stale", "poll", "start"),
    "finish late": ("oversleep", "finish"),
}
calls = st.tuples(
    st.sampled_from([*COMMON, *COMMON, *RARE]),
    st.sampled_from("rrs"),
    st.sampled_from([0, 1, 3, 9, 54, 60]),
)


class Driver:
    """Calls a book, and keeps its own record of what was asked, granted, released and said."""

    def __init__(self) -> None:
        self.book = ReadBook(REPLY_TIMEOUT, 2, MARGIN)
        self.now = 0
        self.asks: dict[str, SendClaim] = {}
        self.sent_at: dict[int, int] = {}
        self.granted: dict[str, int] = {}
        self.released: list[str] = []
        self.started: dict[str, int] = {}
        self.moved_on: set[str] = set()

    def ask(self, request_id: str) -> None:
        """Each request once."""
        command = self.book.ask(request_id, HANDLE, WANTED, self.now)
        if isinstance(command, SendClaim):
            assert request_id not in self.asks
            self.asks[request_id] = command
            self.sent_at[command.ask_id] = self.now
            REACHED["claim"] += 1

    def grant(self, request_id: str, ask_id: int) -> None:
        """An answer, to whatever question."""
        claim_id = f"c{len(self.granted)}"
        self.granted[claim_id] = ask_id
        self.note(self.book.on_granted(request_id, claim_id, 200, BLOCKS, TERM, self.now, ask_id=ask_id))

    def poll(self, request_id: str) -> None:
        """After one Recompute there is no other answer."""
        answer = self.book.poll(request_id, self.now)
        assert isinstance(answer, Recompute) or request_id not in self.moved_on
        if isinstance(answer, Ready):
            assert answer.deadline_ns == self.sent_at[self.asks[request_id].ask_id] + TERM - MARGIN > self.now
        if isinstance(answer, Recompute) and request_id in self.asks:
            self.moved_on.add(request_id)
        REACHED[type(answer).__name__.lower()] += 1

    def start(self, request_id: str) -> None:
        """Only what was granted, and once."""
        if self.book.start(request_id):
            ask_id = self.asks[request_id].ask_id
            assert request_id not in self.moved_on
            assert request_id not in self.started
            assert ask_id in self.granted.values()
            self.started[request_id] = ask_id
            REACHED["started"] += 1

    def finish(self, request_id: str, *, failed: bool) -> None:
        """Kept is only what was started, still waited for, and in time."""
        verdict, sent = self.book.finish(request_id, self.now, failed=failed)
        self.note(sent)
        REACHED["kept" if isinstance(verdict, Keep) else "discarded"] += 1
        if isinstance(verdict, Keep):
            assert not failed
            assert request_id not in self.moved_on
            assert self.now < self.sent_at[self.started[request_id]] + TERM - MARGIN
            self.moved_on.add(request_id)

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
        ask = self.asks.get(request_id)
        if name == "grant" and ask is not None:
            self.grant(request_id, ask.ask_id)
        elif name == "stale" and self.sent_at and (ask is None or ask.ask_id > 1):
            REACHED["stale"] += 1
            self.grant(request_id, ask.ask_id - 1 if ask else len(self.sent_at))
        elif name == "refuse" and ask is not None:
            self.book.on_refused(request_id, "no_match", ask_id=ask.ask_id)
        elif name == "give up":
            self.note(self.book.give_up(request_id, "aborted", self.now))
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
    """Play a script; then forget everything: each claim was released, or is past the time it counts."""
    driver = Driver()
    for call in script:
        driver.call(*call)
        driver.book.check_integrity()
    for request_id in "rs":
        driver.forget(request_id)
    assert len(driver.book) == 0
    assert driver.book.next_deadline_ns() is None
    for claim_id in driver.granted.keys() - set(driver.released):
        assert driver.now >= driver.sent_at[driver.granted[claim_id]] + TERM - MARGIN, "a claim was lost"


def test_any_order_of_calls_is_survived() -> None:
    """Nothing raises; each claim is released once or lapses; a read is kept only in time and while somebody
    waits for it; after one Recompute a request hears nothing else. And the scripts reach all of that."""
    REACHED.clear()
    for _ in range(4):
        explore()
        if set(+REACHED) >= MUST_REACH:
            return
    assert set(+REACHED) >= MUST_REACH
