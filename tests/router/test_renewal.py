"""The heartbeat against decode peers: a real channel, real lease tables, and a clock that the tests move."""

from itertools import chain

import pytest

from kvloop.control.deferred import Answer
from kvloop.router import renewal as module
from kvloop.router.renewal import STEP_LEASES
from kvloop.wire.control import Drop, Failed, Message, Renew, Renewed
from kvloop.wire.seal import Seal
from tests.router.decode_peer import NS_PER_S, decode_peer
from tests.router.harness import in_loop, until
from tests.router.router_side import Clock, router_side

TTL_S, TERM_S, INTERVAL_S = 480, 60, 20


def lease_id(turn: object) -> str:
    """Of a filed turn."""
    return str(turn.lease.lease_id)  # type: ignore[attr-defined]


@in_loop
async def test_one_message_per_engine_per_interval() -> None:
    """Whatever the number of its leases and whenever they were filed; and each is held to the end of its TTL,
    but no longer."""
    clock = Clock()
    with decode_peer(clock) as one, decode_peer(clock) as other, router_side(clock) as side:
        for _ in range(30):
            side.file(one)
            await side.run_until(clock.now_ns / NS_PER_S + 1)
        side.file(other)
        await side.run_until(200)
        assert [len(one.renewals()), len(other.renewals())] == [10, 9]
        assert [len(ids) for ids in one.renewals()[1:]] == [30] * 9
        assert (one.held(), other.held()) == (30, 1)
        await side.run_until(470)
        assert (one.held(), other.held()) == (30, 1)
        await side.run_until(30 + TTL_S + 2)
        assert (one.held(), other.held(), len(side.keeper)) == (0, 0, 0)
        assert one.drops() == other.drops() == []
        (tally, other_tally) = side.renewal.engines.values()
        assert (tally.sent, tally.failed, tally.unanswered) == (tally.answered, 0, 0)
        assert other_tally.sent == other_tally.answered


@in_loop
async def test_what_is_gone_is_forgotten_and_not_offered() -> None:
    """A decode engine that was restarted knows none of them; those of another go on."""
    clock = Clock()
    with decode_peer(clock) as lost, decode_peer(clock) as kept, router_side(clock) as side:
        turns = [side.file(lost), side.file(lost), side.file(kept)]
        await side.run_until(25)
        lost.restart()
        await side.run_until(45)
        assert [side.leases.are_gone(turn) for turn in turns] == [True, True, False]
        assert (len(side.keeper), side.keeper.counts.lost) == (1, 2)
        count = len(lost.heard)
        await side.run_until(200)
        assert (len(lost.heard), kept.held()) == (count, 1)
        side.leases.ended(turns)
        assert not side.renewal.gone, "a turn that is forgotten needs no record of its lease"


@in_loop
async def test_what_is_soft_is_kept_but_not_renewed() -> None:
    """Its blocks may still be there: its turn is offered, and decode is not asked about it again."""
    clock = Clock()
    with decode_peer(clock) as peer, router_side(clock) as side:
        peer.softens = True
        taken, other = side.file(peer), side.file(peer)
        assert peer.table.reclaim(lease_id(taken), clock())
        await side.run_until(100)
        assert [lease_id(taken) in ids for ids in peer.renewals()] == [True, False, False, False, False]
        assert all(lease_id(other) in ids for ids in peer.renewals())
        assert not side.leases.are_gone(taken)
        assert (len(side.keeper), side.keeper.held) == (2, 1)
        assert peer.drops() == []


@in_loop
async def test_a_liar_ends_nobody_else_s_leases() -> None:
    """What an engine says of leases that it was not asked about counts for nothing; nor does nonsense."""
    clock = Clock()
    with decode_peer(clock) as liar, decode_peer(clock) as honest, router_side(clock) as side:
        own, other = side.file(liar), side.file(honest)
        liar.behave = lambda _, __: Renewed([lease_id(other), "never", lease_id(other)], [lease_id(other)])
        await side.run_until(25)
        assert not side.leases.are_gone(other)
        assert side.keeper.held == 2
        liar.behave = lambda _, __: Failed("no")
        await side.run_until(45)
        liar.behave = lambda message, _: message
        await side.run_until(65)
        tally = side.renewal.engines[liar.address]
        assert (tally.sent, tally.answered, tally.failed) == (3, 1, 2)
        liar.behave = lambda _, __: Renewed([lease_id(own)] * 10_000, [lease_id(own)])
        await side.run_until(85)
        assert side.leases.are_gone(own)
        assert side.keeper.counts.lost == 1


@in_loop
async def test_a_silent_engine_is_asked_again_and_its_leases_end() -> None:
    """Nothing is held back for it, nobody else waits for it, and it says so in its tally."""
    clock = Clock()
    with decode_peer(clock) as silent, decode_peer(clock) as other, router_side(clock) as side:
        side.file(silent)
        side.file(other)
        silent.behave = lambda _, __: None
        await side.run_until(61, [silent.address])
        await side.heard(3, silent)
        assert side.renewal.engines[other.address].answered == 3
        tally = side.renewal.engines[silent.address]
        assert (tally.sent, tally.answered, tally.unanswered) == (3, 0, 2)
        assert (silent.held(), other.held()) == (0, 1)
        silent.behave = lambda message, _: silent.answer(message)
        await side.run_until(85, [silent.address])
        await until(lambda: tally.answered == 1)
        side.steps()
        assert len(side.keeper) == 1, "what the engine says at last is that the lease is gone"


@in_loop
async def test_a_slow_answer_counts_as_long_as_its_question_is_known() -> None:
    """One interval late, it does; after that it is nobody's."""
    clock = Clock()
    with decode_peer(clock) as peer, router_side(clock) as side:
        turn = side.file(peer)
        answers: list[Answer] = []

        def later(_: Message, answer: Answer) -> None:
            answers.append(answer)

        peer.behave = later
        await side.run_until(65, [peer.address])
        await until(lambda: len(answers) == 3)
        tally = side.renewal.engines[peer.address]
        answers[0](Renewed([lease_id(turn)], []))
        answers[2](Failed("heard"))
        await until(lambda: tally.failed == 1)
        side.steps()
        assert not side.leases.are_gone(turn)
        answers[1](Renewed([lease_id(turn)], []))
        await until(lambda: tally.answered == 1)
        side.steps()
        assert side.leases.are_gone(turn)


@in_loop
async def test_forged_answers_and_a_wrong_secret_do_nothing() -> None:
    """What does not open is dropped and counted, on either side."""
    clock = Clock()
    with decode_peer(clock) as forger, router_side(clock) as side:
        turn = side.file(forger)
        forger.channel._seal = _Forger(forger.channel._seal)  # type: ignore[assignment]
        forger.behave = lambda _, __: Renewed([lease_id(turn)], [])
        await side.run_until(25, [forger.address])
        await until(lambda: side.channel.frames_dropped() == {"forged": 1})
        side.steps()
        assert not side.leases.are_gone(turn)
    with decode_peer(clock) as peer, router_side(clock, key=bytes(32)) as stranger:
        assert stranger.file(peer).lease is None
        assert stranger.leases.refused == {"forged": 1}
        assert (len(stranger.keeper), stranger.keeper.next_due_ns()) == (0, None)


class _Forger(Seal):
    """Opens with the deployment's key, seals with another."""

    def __init__(self, real: Seal) -> None:
        super().__init__(bytes(32), "d0")
        self.open = real.open  # type: ignore[method-assign]


@in_loop
async def test_a_router_that_stops_frees_everything_within_a_term() -> None:
    """Killed or cut off, it cannot say so, and need not."""
    clock = Clock()
    with decode_peer(clock) as peer, router_side(clock) as side:
        for _ in range(5):
            side.file(peer)
        await side.run_until(100)
        assert peer.held() == 5
        clock.now_ns += TERM_S * NS_PER_S
        assert peer.held() == 0


@in_loop
async def test_two_routers_may_renew_the_same_lease() -> None:
    """It lives while either does; when one ends it, the other hears that it is gone."""
    clock = Clock()
    with decode_peer(clock) as peer, router_side(clock) as one, router_side(clock) as other:
        turn, second = one.file(peer), one.file(peer)
        for shared in (turn, second):
            other.leases.filed(shared, "stop", None)
        for at_s in range(2, 130):
            if at_s < 50:
                await one.run_until(at_s)
                await other.round()
            else:
                await other.run_until(at_s)
        assert peer.held() == 2, "the second router did not keep what the first one left"
        other.leases.ended([turn])
        await other.run_until(132)
        assert peer.drops() == [lease_id(turn)]
        await one.run_until(150)
        assert one.leases.are_gone(turn)
        assert not one.leases.are_gone(second)


@in_loop
async def test_traffic_that_never_comes_back_costs_next_to_nothing() -> None:
    """Ten minutes of single turns teach the router to let go at once; the fixed policy pays for each."""
    held_s = []
    for fixed in (False, True):
        clock = Clock()
        with decode_peer(clock) as peer, router_side(clock, fixed=fixed) as side:
            for _ in range(600):
                side.file(peer)
                await side.run_until(clock.now_ns / NS_PER_S + 1)
            held_s.append(peer.held())  # one turn a second: as many seconds are held of each
    adaptive_s, fixed_s = held_s
    assert TTL_S - 1 <= fixed_s <= TTL_S
    assert adaptive_s < 10, adaptive_s


@in_loop
async def test_a_wish_is_kept_whatever_the_model_says() -> None:
    """Longer than the router would, and not beyond the TTL; and 0 lets go at once."""
    clock = Clock()
    with decode_peer(clock) as peer, router_side(clock, fixed=False) as side:
        for _ in range(300):
            side.file(peer)
            await side.run_until(clock.now_ns / NS_PER_S + 1)
        began_s = clock.now_ns // NS_PER_S
        wishes = {wish_s: side.file(peer, keep_ns=wish_s * NS_PER_S) for wish_s in (0, 100, 1_000_000)}
        for at_s, kept in ((2, (100, 1_000_000)), (99, (100, 1_000_000)), (102, (1_000_000,)), (482, ())):
            await side.run_until(began_s + at_s)
            assert peer.held() >= len(kept)
            states = {wish_s: peer.table.state(lease_id(turn)) for wish_s, turn in wishes.items()}
            assert tuple(wish_s for wish_s, state in states.items() if state is not None) == kept, at_s


@in_loop
async def test_ten_thousand_leases_go_in_steps_and_one_message() -> None:
    """No step looks at more than its share, on the way out and when all are said to be gone."""
    clock = Clock()
    with decode_peer(clock) as peer, router_side(clock) as side:
        for _ in range(10_000):
            side.file(peer)
        looked, gone = [], []
        due, forget = side.keeper.due, side.keeper.gone
        side.keeper.due = lambda *args: looked.append(args[1]) or due(*args)  # type: ignore
        side.keeper.gone = lambda ids, now: gone.append(len(ids)) or forget(ids, now)  # type: ignore
        clock.now_ns = INTERVAL_S * NS_PER_S
        steps = side.steps()
        (asked,) = side.renewal.take_outgoing()
        assert isinstance(asked.message, Renew)
        assert len(asked.message.leases) == 10_000
        assert steps >= 10_000 // STEP_LEASES
        assert max(looked) <= STEP_LEASES
        peer.restart()
        assert side.channel.send(asked.address, asked.message, asked.tag)
        await until(lambda: not side.renewal.engines[peer.address].open)
        assert side.steps() >= 10_000 // STEP_LEASES
        assert (sum(gone), max(gone)) == (10_000, STEP_LEASES)
        assert (len(side.keeper), side.keeper.counts.lost) == (0, 10_000)


@in_loop
async def test_engines_that_are_remembered_are_bounded() -> None:
    """The one longest without a message goes; what it still says then is nobody's, and it is asked again."""
    clock = Clock()
    with (
        pytest.MonkeyPatch.context() as patch,
        decode_peer(clock) as one,
        decode_peer(clock) as two,
        decode_peer(clock) as three,
        router_side(clock) as side,
    ):
        patch.setattr(module, "MAX_ENGINES", 2)
        peers = (one, two, three)
        for peer in peers:
            side.file(peer)
        await side.run_until(21)
        assert len(side.renewal.engines) == 2
        await side.run_until(130)
        assert [peer.held() for peer in peers] == [1, 1, 1]
        assert [len(peer.renewals()) for peer in peers] == [6, 6, 6]


@in_loop
async def test_more_leases_than_a_message_holds() -> None:
    """They go in several, none of them too long and none twice; drops, too."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch, decode_peer(clock) as peer, router_side(clock) as side:
        patch.setattr(module, "MAX_LEASES_PER_MESSAGE", 150)
        turns = [side.file(peer) for _ in range(400)]
        await side.run_until(21)
        assert max(map(len, peer.renewals())) <= 150
        assert sorted(chain.from_iterable(peer.renewals())) == sorted(map(lease_id, turns))
        side.leases.ended(turns)
        await side.run_until(23)
        dropped = [len(one.lease_ids) for one in peer.heard if isinstance(one, Drop)]
        assert (sum(dropped), max(dropped) <= 150, peer.held()) == (400, True, 0)
