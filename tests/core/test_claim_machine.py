"""Whatever is called in whatever order, the read book holds its promises."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvloop.core.chain import Identity, build_chain, root_digest
from kvloop.core.claim import Keep, ReadBook, Recompute, SendClaim, SendRelease
from kvloop.core.handle import HANDLE_VERSION, Handle

KEY = bytes(32)
WANTED = build_chain(KEY, root_digest(KEY, Identity("m", "", "", "", "")), range(200))
HANDLE = Handle(HANDLE_VERSION, "e", "i", "l", "localhost", 1, 1, 1, 1, 200, 1000)
BLOCKS = (tuple(range(13)),)
REPLY_TIMEOUT, MARGIN, TERM = 10, 5, 100

calls = st.tuples(
    st.sampled_from(
        ["ask", "grant", "refuse", "poll", "start", "finish", "fail", "give_up", "forget", "advance"]
    ),
    st.sampled_from("rs"),
    st.integers(0, 40),
)


@settings(deadline=None, max_examples=300)
@given(st.lists(calls, max_size=40))
def test_any_order_of_calls_is_survived(script: list[tuple[str, str, int]]) -> None:
    """Nothing raises; a claim is released at most once; after one Recompute a request hears nothing else."""
    book, now = ReadBook(REPLY_TIMEOUT, 2, MARGIN), 0
    asks = {"r": 0, "s": 0}
    moved_on = {"r": False, "s": False}
    released: list[str] = []
    grants = 0
    for call, request_id, number in script:
        sent: tuple[SendRelease, ...] = ()
        now += number if call == "advance" else 0
        if call == "ask":
            command = book.ask(request_id, HANDLE, WANTED, now)
            if isinstance(command, SendClaim):
                asks[request_id] = command.ask_id
        elif call == "grant":
            grants += 1
            ask_id = asks[request_id] - number % 2
            sent = book.on_granted(request_id, f"c{grants}", 200, BLOCKS, TERM, now, ask_id=ask_id)
        elif call == "refuse":
            book.on_refused(request_id, "no_match", ask_id=asks[request_id])
        elif call == "poll":
            answer = book.poll(request_id, now)
            assert isinstance(answer, Recompute) or not moved_on[request_id]
            moved_on[request_id] |= isinstance(answer, Recompute) and book.state(request_id) is not None
        elif call == "start":
            assert not (book.start(request_id) and moved_on[request_id])
        elif call in ("finish", "fail"):
            verdict, sent = book.finish(request_id, now, failed=call == "fail")
            assert not (isinstance(verdict, Keep) and (moved_on[request_id] or call == "fail"))
        elif call == "give_up":
            sent = book.give_up(request_id, "aborted", now)
        elif call == "forget":
            sent = book.forget(request_id)
            moved_on[request_id] = False
        else:
            book.advance(now)
        released += [release.claim_id for release in sent]
        assert len(released) == len(set(released))
        book.check_integrity()
