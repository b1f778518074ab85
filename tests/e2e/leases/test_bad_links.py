"""A control channel that loses, delays, repeats and reorders: that costs returns, never an answer or a block.

Everything that prefill and the router say to decode takes a link whose weather the test makes, and so does
everything that decode answers.
"""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random
from threading import Event

from kvloop.bench.control import ControlClient
from kvloop.wire.control import Claim, Drop, Dropped, Granted, Release
from kvloop.wire.handle import decode_handle
from tests.e2e.counters import counters, grown
from tests.e2e.leases.books import CLAIMED, CLAIMS_GRANTED, REFUSED, RELEASED, REPLAYED, check_all_home
from tests.e2e.leases.conftest import CLAIM_TIMEOUT_MS, StartRouter
from tests.e2e.leases.front import Front
from tests.e2e.link import HOST, Frame, Link, clear
from tests.e2e.test_histories import Messages, check, opening, two_turns, user
from tests.e2e.test_router import Answer, Client, grow
from tests.e2e.turns import Pair, until

SEED = 7
TALKS = 12
TURNS = 3
BURST, BURST_TOKENS = 12, 40  # requests and their answers' length: they need more blocks than there are
TOO_LATE_S = CLAIM_TIMEOUT_MS / 1000 + 0.5


class Storm:
    """Of seven frames about one is lost and one comes twice; a third is late, some later than anyone
    waits."""

    def __init__(self, seed: int) -> None:
        self.done: Counter[str] = Counter()
        self._random = Random(seed)

    def __call__(self, frame: Frame) -> Sequence[float]:
        """When the frame's copies arrive."""
        (copies,) = self._random.choices((0, 1, 2), (15, 70, 15))
        self.done[f"{type(frame.message).__name__} x{copies}"] += 1
        return self._random.choices((0.0, 0.02, 0.3, TOO_LATE_S), (65, 15, 12, 8), k=copies)


def test_a_storm(pair: Pair, front: Front, link: Link, start_router: StartRouter) -> None:
    """Conversations through it are answered exactly, some by what was read back; when it is over, every turn
    returns."""
    router = start_router(front.url)
    client = Client(router.url)
    link.weather = storm = Storm(SEED)

    def talk(number: int) -> list[tuple[Messages, Answer]]:
        messages = opening(f"storm{number}", words=30)
        said = [(messages, client.chat(messages))]
        for turn in range(1, TURNS):
            messages = grow(messages, said[-1][1], f"And {turn}?")
            said.append((messages, client.chat(messages)))
        return said

    with ThreadPoolExecutor(TALKS) as pool:
        talks = list(pool.map(talk, range(TALKS)))
        flat = [one for said in talks for one in said]
        for (messages, answer), oracle in zip(
            flat, pool.map(lambda one: pair.oracle(one[0]), flat), strict=True
        ):
            assert answer.tokens == oracle, (SEED, messages)
    assert Counter(answer.route for _, answer in flat)["return"] > 0, "nothing came back: nothing is shown"
    lost = sum(count for what, count in storm.done.items() if what.endswith("x0"))
    assert lost > 0, "nothing was lost: nothing is shown"
    assert counters(pair.decode)[REPLAYED] > 0, "nothing came twice: nothing is shown"
    link.weather = clear
    messages, answer = talks[0][-1]
    for question in ("Is it over?", "Is it?"):
        messages = grow(messages, answer, question)
        answer = client.chat(messages)
        assert answer.tokens == pair.oracle(messages)
    assert answer.route == "return"
    router.shut_down()
    check_all_home(pair)


def test_a_slow_reader_has_what_it_claimed(pair: Pair, link: Link, secret: bytes) -> None:
    """Between the grant and the read the lease is dropped and live work takes every block that it can get:
    the claimed ones hold what they held."""
    history, last = two_turns(pair, "slow-reader")
    messages = [*history, user("And?")]
    granted = Event()

    def slow(frame: Frame) -> Sequence[float]:
        if not isinstance(frame.message, Granted):
            return (0.0,)
        granted.set()
        return (1.5,)

    link.weather = slow
    lease_id = decode_handle((last.filed or {})["kvloop_handle"], secret).lease_id
    before = counters(pair.decode)
    with (
        ThreadPoolExecutor(1 + BURST) as pool,
        ControlClient(secret, HOST, pair.decode.control_port) as client,
    ):
        turn = pool.submit(pair.turn, messages, link.through(last.filed))
        assert granted.wait(CLAIM_TIMEOUT_MS / 1000)
        assert client.ask(Drop([lease_id], is_over=True)) == Dropped(1)
        burst = [opening(f"burst{number}", words=100) for number in range(BURST)]
        alone = Pair(pair.decode, pair.decode)
        for _ in pool.map(lambda one: alone.oracle(one, BURST_TOKENS, ignore_eos=True), burst):
            pass
        check(pair, turn.result(), messages)
    assert turn.result().returned > 0, turn.result().reason
    after = counters(pair.decode)
    assert grown(before, after, RELEASED) > 0
    assert grown(before, after, REFUSED) > 0, "there was room for everything: nothing is shown"


def test_a_release_that_is_lost(pair: Pair, link: Link) -> None:
    """The claim ends at its own deadline, and its lease after it."""
    history, last = two_turns(pair, "lost-release")
    link.weather = lambda frame: () if isinstance(frame.message, Release) else (0.0,)
    messages = [*history, user("And?")]
    turn = pair.turn(messages, link.through(last.filed))
    check(pair, turn, messages)
    assert turn.returned > 0
    until(lambda: link.count(Release), "no release was sent")
    assert counters(pair.decode)[CLAIMED] == 1
    check_all_home(pair)


def test_a_claim_that_comes_again(pair: Pair, link: Link) -> None:
    """Decode grants it once: the copy is dropped, and holds nothing."""
    history, last = two_turns(pair, "copied-claim")
    link.weather = lambda frame: (0.0, 0.05, 0.1) if isinstance(frame.message, Claim) else (0.0,)
    messages = [*history, user("And?")]
    before = counters(pair.decode)
    turn = pair.turn(messages, link.through(last.filed))
    check(pair, turn, messages)
    assert turn.returned > 0
    until(lambda: grown(before, counters(pair.decode), REPLAYED) == 2, "no copy arrived")
    after = counters(pair.decode)
    assert grown(before, after, CLAIMS_GRANTED) == 1
    assert after[CLAIMED] == 0
