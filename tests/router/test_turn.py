"""The turn machine: every sequence of outcomes ends, within its bounds, and asks nobody what it must not."""

from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloop.core.decision import Option, Parts, Route
from kvloop.router.turn import AskDecode, AskPrefill, Failure, GiveUp, Step, Turn
from kvloop.wire.openai import ALONE

HANDOVER = b'{"remote":1}'
HANDLE = b'{"kvloop_handle":"h"}'


def turn(
    prefill: str = "pq",
    decode: str = "de",
    handle: bytes | None = HANDLE,
    alone: bool = False,
    append: bool = False,
) -> Turn:
    """A turn among engines of one letter each, taken in order."""

    def choose(engines: str, excluded: Collection[str]) -> str | None:
        return next((engine for engine in engines if engine not in excluded), None)

    way = None
    if prefill and not alone:
        way = Option(Route.RETURN if handle else Route.RECOMPUTE, prefill[0], decode[:1], 0, 0, Parts(), 0)
    if append and decode:
        way = Option(Route.APPEND, None, decode[0], 0, 0, Parts(), 0)
    return Turn(
        lambda excluded: choose(prefill, excluded),
        lambda _prefill, excluded, _last: choose(decode, excluded),
        handle,
        way,
    )


def test_return() -> None:
    """A handle that brings tokens back makes a returned turn."""
    one = turn()
    assert one.start() == AskPrefill("p", HANDLE)
    assert one.prefilled(HANDOVER, 64) == AskDecode("d", HANDOVER)
    assert one.route is Route.RETURN


def test_failed_before() -> None:
    """A decode engine that failed the turn before it began is not asked."""
    one = Turn(lambda _: None, lambda _, excluded, __: min({"d", "e"} - set(excluded)), None, None, ("d",))
    assert one.start() == AskDecode("e", ALONE)


@pytest.mark.parametrize(("handle", "returned"), [(HANDLE, 0), (None, 0), (None, None)])
def test_recompute(handle: bytes | None, returned: int | None) -> None:
    """A turn without a handle, or whose handle brought nothing, is recomputed."""
    one = turn(handle=handle)
    one.start()
    one.prefilled(HANDOVER, returned)
    assert one.route is Route.RECOMPUTE


def test_unknown_counts_as_returned() -> None:
    """An engine that does not report (upstream's connector) is believed."""
    one = turn()
    one.start()
    one.prefilled(HANDOVER, None)
    assert one.route is Route.RETURN


def test_every_arrow() -> None:
    """The longest way there is, step by step."""
    one = turn()
    assert one.start() == AskPrefill("p", HANDLE)
    assert one.prefill_failed(Failure.ANSWERED) == AskPrefill("p", None)
    assert one.prefill_failed(Failure.ANSWERED) == AskPrefill("q", HANDLE)
    assert one.prefill_failed(Failure.ANSWERED) == AskDecode("d", ALONE)
    assert one.decode_failed(Failure.ANSWERED) == AskDecode("e", ALONE)
    assert isinstance(one.decode_failed(Failure.ANSWERED), GiveUp)
    assert one.route is Route.DECODE


def test_handle_under_suspicion() -> None:
    """A handle over which an engine died is not given to the next one; one that nobody saw is."""
    one = turn()
    one.start()
    assert one.prefill_failed(Failure.BROKEN) == AskPrefill("q", None)
    other = turn()
    other.start()
    assert other.prefill_failed(Failure.UNREACHED) == AskPrefill("q", HANDLE)


def test_a_handle_may_be_what_a_4xx_is_about() -> None:
    """It is asked once without it; what is said then, or of a request that had none, is the client's."""
    one = turn()
    one.start()
    assert one.prefill_refused() == AskPrefill("p", None)
    assert one.prefill_refused() is None
    plain = turn(handle=None)
    plain.start()
    assert plain.prefill_refused() is None


def test_a_handle_that_was_refused_is_given_to_nobody() -> None:
    """Neither when the engine fails without it, too, nor on the second engine after the first one's 5xx."""
    one = turn()
    one.start()
    one.prefill_refused()
    assert one.prefill_failed(Failure.ANSWERED) == AskPrefill("q", None)
    assert one.prefill_refused() is None
    other = turn()
    other.start()
    assert other.prefill_failed(Failure.ANSWERED) == AskPrefill("p", None)
    assert other.prefill_failed(Failure.ANSWERED) == AskPrefill("q", HANDLE)
    assert other.prefill_refused() == AskPrefill("q", None)
    assert other.prefill_refused() is None


def test_lone_decode_engine() -> None:
    """A lone decode engine is asked again without the handover, but not twice for the same."""
    one = turn(decode="d")
    one.start()
    assert one.prefilled(HANDOVER, 64) == AskDecode("d", HANDOVER)
    assert not one.repeats
    assert one.decode_failed(Failure.ANSWERED) == AskDecode("d", ALONE)
    assert one.repeats
    assert isinstance(one.decode_failed(Failure.ANSWERED), GiveUp)
    alone = turn(decode="d", alone=True)
    assert alone.start() == AskDecode("d", ALONE)
    assert isinstance(alone.decode_failed(Failure.ANSWERED), GiveUp)


def test_nobody_there() -> None:
    """Without prefill engines decode serves alone; without decode engines nobody does."""
    assert turn(prefill="").start() == AskDecode("d", ALONE)
    assert isinstance(turn(prefill="", decode="").start(), GiveUp)


def test_append() -> None:
    """One hop, to the engine that holds the history."""
    one = turn(append=True)
    assert one.start() == AskDecode("d", ALONE)
    assert one.route is Route.APPEND
    assert one.asked == [("decode", "d")]


@pytest.mark.parametrize("failure", list(Failure))
def test_a_failed_append_takes_the_plain_way(failure: Failure) -> None:
    """Prefill without the handle, whose engine is in trouble, and another decode engine; itself if it is the
    only one."""
    one = turn(append=True)
    one.start()
    assert one.decode_failed(failure) == AskPrefill("p", None)
    assert one.prefilled(HANDOVER, 0) == AskDecode("e", HANDOVER)
    assert one.route is Route.RECOMPUTE
    lone = turn(decode="d", append=True)
    lone.start()
    lone.decode_failed(failure)
    assert lone.prefilled(HANDOVER, 0) == AskDecode("d", HANDOVER)


def test_what_nobody_came_for_is_for_another() -> None:
    """A decode engine that was not reached has not pulled, so another one gets the same handover."""
    one = turn()
    one.start()
    one.prefilled(HANDOVER, 64)
    assert one.decode_failed(Failure.UNREACHED) == AskDecode("e", HANDOVER)
    assert one.route is Route.RETURN
    lone = turn(decode="d")
    lone.start()
    lone.prefilled(HANDOVER, 64)
    assert lone.decode_failed(Failure.UNREACHED) == AskDecode("d", ALONE)


@given(
    st.lists(st.sampled_from([*Failure, "fine", "4xx"]), min_size=9, max_size=9),
    st.sampled_from(["", "p", "pq", "pqr"]),
    st.sampled_from(["", "d", "de", "def"]),
    st.sampled_from([None, HANDLE]),
    st.booleans(),
    st.booleans(),
)
def test_any_outcomes(
    outcomes: list[Failure | str],
    prefill: str,
    decode: str,
    handle: bytes | None,
    alone: bool,
    append: bool,
) -> None:
    """However hops end, at most four prefill hops and two decode hops after an append are made, and none
    twice the same."""
    append = append and not alone
    one = turn(prefill, decode, handle, alone, append)
    steps: list[Step] = [one.start()]
    for outcome in outcomes:
        step = steps[-1]
        if isinstance(step, GiveUp):
            break
        if isinstance(step, AskDecode) and outcome in ("fine", "4xx"):
            break
        if isinstance(step, AskPrefill) and outcome == "4xx":
            again = one.prefill_refused()
            assert (again is None) is (step.handle is None), "no error but those of the plain path"
            if again is None:
                break
            done: Step = again
        elif isinstance(step, AskPrefill):
            done = one.prefilled(HANDOVER, 1) if outcome == "fine" else one.prefill_failed(Failure(outcome))
        else:
            assert isinstance(outcome, Failure)
            done = one.decode_failed(outcome)
        steps.append(done)
    else:
        raise AssertionError("the turn does not end")
    asked = [step for step in steps if not isinstance(step, GiveUp)]
    assert len(set(asked)) == len(asked)
    assert sum(isinstance(step, AskPrefill) for step in asked) <= 4
    assert sum(isinstance(step, AskDecode) for step in asked) <= 2 + append
    if alone:
        assert all(isinstance(step, AskDecode) for step in asked)
