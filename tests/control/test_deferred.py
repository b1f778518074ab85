"""Answers that come later, on their own and through two real channels."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from queue import Empty, Queue

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloop.control import channel as control
from kvloop.control.channel import ControlChannel
from kvloop.control.deferred import Answer, Asker, DeferredAnswers
from kvloop.wire.control import Failed, Message, Release, Released
from kvloop.wire.seal import Seal
from tests.control.peer import AT_ONCE_S, KEY, WAIT_S, free_port


def asker(number: int) -> Asker:
    """One of many."""
    return Asker(b"peer", bytes([number]))


@given(st.lists(st.tuples(st.sampled_from(["open", "close", "answer"]), st.integers(0, 9)), max_size=60))
def test_each_asker_gets_the_first_answer_and_the_oldest_are_forgotten(steps: list[tuple[str, int]]) -> None:
    """Against a naive list: one answer each at most, none after `close`, never more than the bound wait."""
    woken: list[None] = []
    deferred = DeferredAnswers(3, lambda: woken.append(None))
    waiting: list[Asker] = []
    ready: list[tuple[Asker, Message]] = []
    askers = [asker(number) for number in range(10)]
    answers: dict[int, Answer] = {}
    for kind, number in steps:
        one = askers[number]
        if kind == "open" and number not in answers:
            answers[number] = deferred.open(one)
            waiting = [*waiting, one][-3:]
        elif kind == "close":
            assert deferred.close(one) is (one in waiting)
            waiting = [other for other in waiting if other is not one]
        elif kind == "answer" and number in answers:
            message = Failed(str(len(ready)))
            answers[number](message)
            if one in waiting:
                waiting.remove(one)
                ready.append((one, message))
        assert len(deferred) == len(waiting)
        deferred.check_integrity()
    assert len(woken) == len(ready)
    assert deferred.take() == ready
    assert deferred.take() == []


class Late:
    """A channel that leaves every question open, and an asker that listens nowhere."""

    def __init__(self, stack: ExitStack) -> None:
        self.open: Queue[tuple[Message, Answer]] = Queue()
        self.replies: Queue[tuple[object, Message]] = Queue()
        self.address = ("127.0.0.1", free_port())
        self.owner = ControlChannel(
            self.address, Seal(KEY, "decode"), serve=self.serve, on_reply=lambda *_: None
        )
        self.asker = ControlChannel(
            None, Seal(KEY, "router"), on_reply=lambda *reply: self.replies.put(reply)
        )
        for one in (self.owner, self.asker):
            one.start()
            stack.callback(one.stop)

    def serve(self, message: Message, answer: Answer) -> None:
        """Runs on the owner's channel's thread."""
        self.open.put((message, answer))

    def ask(self, number: int) -> Answer:
        """Ask, and return what answers it."""
        assert self.asker.send(self.address, Release(str(number)), number)
        message, answer = self.open.get(timeout=WAIT_S)
        assert message == Release(str(number))
        return answer

    def silent(self) -> bool:
        """Whether no answer comes within a moment."""
        try:
            self.replies.get(timeout=AT_ONCE_S)
        except Empty:
            return True
        return False


@pytest.fixture
def late() -> Iterator[Late]:
    """Two channels, stopped afterwards."""
    with ExitStack() as stack:
        yield Late(stack)


def test_answers_come_from_other_threads_in_any_order(late: Late) -> None:
    """Each under its own question's tag, and an owner whose thread is asleep is woken to send it."""
    answers = [late.ask(number) for number in range(20)]
    threads = [
        threading.Thread(target=answers[number], args=(Failed(str(number)),))
        for number in reversed(range(20))
    ]
    for thread in threads:
        thread.start()
    heard = [late.replies.get(timeout=WAIT_S) for _ in range(20)]
    assert sorted(heard, key=repr) == sorted(
        [(number, Failed(str(number))) for number in range(20)], key=repr
    )
    for thread in threads:
        thread.join()


def test_the_first_answer_counts(late: Late) -> None:
    """Whatever is said after it goes nowhere."""
    answer = late.ask(0)
    answer(Released(True))
    answer(Released(False))
    assert late.replies.get(timeout=WAIT_S) == (0, Released(True))
    assert late.silent()


@pytest.mark.parametrize("returned", [Released(False), None])
def test_an_answer_may_come_before_serve_returns(late: Late, returned: Message | None) -> None:
    """Another thread may be faster than the one that asked it; the peer hears one answer only."""

    def serve(_: Message, answer: Answer) -> Message | None:
        answer(Released(True))
        return returned

    late.owner._serve = serve
    assert late.asker.send(late.address, Release("0"), 0)
    assert late.replies.get(timeout=WAIT_S) == (0, Released(True))
    assert late.silent()


def test_of_too_many_open_questions_the_oldest_get_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their askers have given up long ago; the memory for them is bounded."""
    monkeypatch.setattr(control, "MAX_DEFERRED_ANSWERS", 2)
    with ExitStack() as stack:
        late = Late(stack)
        answers = [late.ask(number) for number in range(3)]
        for number, answer in enumerate(answers):
            answer(Failed(str(number)))
        heard = {late.replies.get(timeout=WAIT_S) for _ in range(2)}
        assert heard == {(1, Failed("1")), (2, Failed("2"))}
        assert late.silent()


def test_an_answer_after_the_end_does_nothing(late: Late) -> None:
    """The thread that owes it may live longer than the channel."""
    answer = late.ask(0)
    late.owner.stop()
    answer(Released(True))
    assert late.silent()


def test_who_only_asks_listens_nowhere(late: Late) -> None:
    """A router needs no port; who listens without answering, or the other way round, is a bug."""
    assert late.asker._router is None
    with pytest.raises(ValueError, match="listens"):
        ControlChannel(None, Seal(KEY, "a"), serve=lambda *_: None, on_reply=lambda *_: None)
    with pytest.raises(ValueError, match="listens"):
        ControlChannel(late.address, Seal(KEY, "a"), on_reply=lambda *_: None)


def test_what_is_dropped_is_counted_by_reason(late: Late) -> None:
    """An operator sees strangers, forged and late frames; questions that open count nowhere."""
    stranger = ControlChannel(None, Seal(bytes(32), "stranger"), on_reply=lambda *_: None)
    forger = ControlChannel(None, Seal(KEY, "forger"), on_reply=lambda *_: None)
    forger._seal = Seal(bytes(32), "forger")
    wanted = {"handshake", "forged"}
    try:
        for one in (stranger, forger):
            one.start()
            assert one.send(late.address, Release("0"), 0)
        late.ask(1)(Released(True))
        deadline_s = time.monotonic() + WAIT_S
        while late.owner.frames_dropped().keys() != wanted and time.monotonic() < deadline_s:
            time.sleep(0.001)
    finally:
        stranger.stop()
        forger.stop()
    assert late.owner.frames_dropped().keys() == wanted
    assert late.owner.frames_dropped()["forged"] == 1
    assert late.asker.frames_dropped() == {}
