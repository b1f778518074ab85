"""The control channel between two network namespaces, over a cable that loses packets, and is cut."""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from kvloop.wire.handle import decode_handle, encode_handle
from tests.e2e.leases.network import Cable, far_away
from tests.e2e.test_histories import assistant, check, opening, two_turns, user
from tests.e2e.turns import Pair

SEED = 5
LOST_SHARE = 0.08
JITTER_S = 0.03
TURNS = 5
HEALED_TURNS = 20


Far = tuple[tuple[str, int], Cable]


@pytest.fixture
def far(pair: Pair) -> Iterator[Far]:
    """Decode's control port at the other end of the cable, and the cable."""
    with ExitStack() as stack:
        away = far_away(
            pair.decode.control_port, random=Random(SEED), lost_share=LOST_SHARE, jitter_s=JITTER_S
        )
        try:
            found = stack.enter_context(away)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"this machine lets nobody make a network of his own: {error}")
        yield found


def test_turns_over_a_bad_cable(pair: Pair, secret: bytes, far: Far) -> None:
    """Every answer is right; most turns return while packets are lost, none while the cable is cut, and again
    when it is whole."""
    (host, port), cable = far

    def moved(filed: dict[str, Any] | None) -> dict[str, Any]:
        handle = decode_handle((filed or {})["kvloop_handle"], secret)
        return {"kvloop_handle": encode_handle(replace(handle, control_host=host, control_port=port), secret)}

    messages = opening("cable", words=30)
    turn = pair.turn(messages)
    returned = 0
    for number in range(TURNS):
        messages = [*messages, assistant(turn.text), user(f"And {number}?")]
        turn = pair.turn(messages, moved(turn.filed))
        check(pair, turn, messages)
        returned += turn.returned > 0
    assert returned > TURNS // 2
    assert cable.lost > 0, "nothing was lost: nothing is shown"
    history, last = two_turns(pair, "cut")
    cable.cut = True
    messages = [*history, user("Are you there?")]
    turn = pair.turn(messages, moved(last.filed))
    check(pair, turn, messages)
    assert turn.reason == "no_reply"
    cable.cut = False
    for number in range(HEALED_TURNS):
        messages = [*messages, assistant(turn.text), user(f"And {number}?")]
        turn = pair.turn(messages, moved(turn.filed))
        check(pair, turn, messages)
        if turn.returned:
            return
    pytest.fail("nothing came back once the cable was whole")
