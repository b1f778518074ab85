"""The simulated engine: what is answered, when, and that no block is ever lost."""

import msgspec
import pytest

from kvloop.sim.engine import Engine
from kvloop.sim.request import Hop, Reason, Request
from kvloop.wire.control import Claim, Drop
from tests.sim.pair import LATENCY_NS, MS, S, World, config, make_profile, pair, tokens

STEP_NS = MS  # of a step with up to 100 tokens; beyond, each takes 10 µs
TOKEN_NS = 10_000


def alone(**changes: object) -> World:
    """One engine that computes and answers by itself."""
    return World(Engine(config("d", **changes), make_profile()))


def ask(world: World, name: str, prompt: bytes, max_tokens: int = 8, **more: object) -> None:
    """A request for the engine of `alone`."""
    plain: dict[str, object] = {"ends_at": 1000, "hop": Hop.ALONE}
    world.submit("d", Request(name, world.text(prompt), max_tokens, **plain | more))  # type: ignore[arg-type]


def drained(world: World) -> None:
    """Everything has come home, but for what leases hold; and that, too, when their time is over."""
    for engine in world.engines.values():
        assert engine.is_idle
        assert engine.queue == (0, 0)
        assert engine.pool.references == engine.leases.table.held_blocks
        engine.advance(world.loop.now_ns + 1000 * S)
        engine.check_integrity()
        assert engine.pool.references == 0


def test_an_answer_depends_on_its_prompt_alone() -> None:
    """Alone or among others, cut into chunks or not, in bulk or step by step, a prompt gets one answer."""
    answers = []
    for changes in ({}, {"max_bulk_steps": 64}, {"prefix_cache": False}):
        world = alone(**changes)
        for kind in range(6):
            ask(world, str(kind), tokens(700, kind))
        ask(world, "again", tokens(700, 3), max_tokens=5)
        world.run()
        answers.append({name: said for name, said in world.said.items() if name != "again"})
        assert world.said["3"].startswith(world.said["again"])
        assert not any(finished.wrong for finished in world.finished.values())
        drained(world)
    assert answers[0] == answers[1] == answers[2]
    assert len(set(answers[0].values())) == 6


def test_time_is_that_of_the_profile() -> None:
    """A prompt of 700 tokens takes two chunks, then a step for each further token."""
    for bulk in (1, 64):
        world = alone(max_bulk_steps=bulk)
        ask(world, "a", tokens(700), max_tokens=4)
        world.run()
        chunks = 700 * TOKEN_NS
        assert world.first_ns["a"] == chunks
        assert world.loop.now_ns >= chunks + 3 * STEP_NS
        assert world.engines["d"].counters["steps"] == 5


def test_a_request_in_between_shares_the_next_step() -> None:
    """Steps taken at once are cut short by an arrival: it waits for the one that has begun, and no longer."""
    for bulk in (1, 64):
        world = alone(max_bulk_steps=bulk, prefix_cache=False)
        ask(world, "a", tokens(16), max_tokens=30)
        second = 6 * STEP_NS - 1
        world.loop.at(second, lambda world=world: ask(world, "b", tokens(16, 1), max_tokens=1))  # type: ignore[misc]
        world.run()
        assert world.first_ns["b"] == second + 1 + STEP_NS


def test_an_answer_ends_where_the_model_stops_or_the_client_says() -> None:
    """`ends_at` is a stop, with the stop token last; `max_tokens` a length; else the model decides."""
    world = alone()
    ask(world, "stop", tokens(30), max_tokens=20, ends_at=7)
    ask(world, "length", tokens(30, 1), max_tokens=7)
    ask(world, "own", tokens(30, 2), max_tokens=1000, ends_at=None)
    world.run()
    assert [world.finished[name].reason for name in ("stop", "length", "own")] == [
        Reason.STOP,
        Reason.LENGTH,
        Reason.STOP,
    ]
    assert len(world.said["stop"]) == len(world.said["length"]) == 28
    assert world.said["stop"].endswith(b"<|/>")
    assert 24 * 4 <= len(world.said["own"]) < 224 * 4


@pytest.mark.parametrize("bulk", [1, 64])
def test_few_blocks_cost_time_only(bulk: int) -> None:
    """Eight requests on blocks for three: some start over, all are answered as on a large machine, and no
    lease is kept while one waits."""
    few = msgspec.structs.replace(
        make_profile(), limits=msgspec.structs.replace(make_profile().limits, blocks=64, model_tokens=1024)
    )
    worlds = [World(Engine(config("d", max_bulk_steps=bulk), profile)) for profile in (few, make_profile())]
    for world in worlds:
        for kind in range(8):
            ask(world, str(kind), tokens(250, kind), max_tokens=120)
        world.run()
    assert worlds[0].said == worlds[1].said
    assert worlds[0].starved
    assert worlds[0].engines["d"].counters["preemptions"] > 0
    assert "preemptions" not in worlds[1].engines["d"].counters
    for world in worlds:
        drained(world)


def test_leases_give_way_before_anybody_waits() -> None:
    """Memory full of leases: new requests run as on an empty machine."""
    world = alone(max_retained_permille=1000)
    for kind in range(20):
        ask(world, str(kind), tokens(300, kind))
        world.run(lambda kind=kind: str(kind) in world.finished)  # type: ignore[misc]
    assert not world.starved
    assert world.engines["d"].leases.table.held_blocks > 200
    drained(world)


def test_the_second_turn_reads_what_decode_has() -> None:
    """A return brings the whole history but for the last sampled token, and the answer is the one without."""
    world = pair()
    said, first = world.turn("a", tokens(300))
    prompt = tokens(300) + said + tokens(50, 1)
    again, _ = world.turn("b", prompt, first.handle)
    assert world.report("b") == {
        "prompt_tokens": 390,
        "local_tokens": 0,
        "returned_tokens": 339,
        "computed_tokens": 51,
        "reason": None,
        "read_us": 1220,
    }
    assert again == pair().turn("b", prompt)[0]
    assert [len(read.blocks) for read in world.reads] == [19, 22, 4]
    drained(world)


@pytest.mark.parametrize(
    ("prompt", "salt", "reason", "returned"),
    [
        (tokens(200) + tokens(200, 1), "", None, 192),
        (tokens(40) + tokens(300, 1), "", "no_match", 0),
        (tokens(400), "other", "wrong_root", 0),
        (tokens(65) + tokens(300, 1), "", None, 64),
        (tokens(64), "", None, 64),
        (tokens(63), "", "too_short", 0),
    ],
)
def test_other_histories_read_what_is_proven(
    prompt: bytes, salt: str, reason: str | None, returned: int
) -> None:
    """Edited, foreign and cut histories come back to their last whole segment, and are answered rightly."""
    world = pair()
    _, first = world.turn("a", tokens(300))
    said, finished = world.turn("b", prompt, first.handle, salt=salt)
    assert (world.report("b")["reason"], world.report("b")["returned_tokens"]) == (reason, returned)
    assert not finished.wrong
    assert said == pair().turn("b", prompt)[0]
    drained(world)


def test_a_block_longer_than_a_segment_is_cut_in_it() -> None:
    """With blocks of 128 tokens a fork reads its one proven segment, and computes over the rest of the
    block."""
    profile = make_profile(block_tokens=128, blocks=64)
    world = pair(profile)
    _, first = world.turn("a", tokens(300))
    prompt = tokens(200) + tokens(200, 1)
    said, finished = world.turn("b", prompt, first.handle)
    assert world.report("b")["returned_tokens"] == 192
    assert not finished.wrong
    assert said == pair(profile).turn("b", prompt)[0]
    drained(world)


def test_without_an_answer_it_computes() -> None:
    """A lost claim costs the claim's timeout, and nothing else."""
    world = pair(claim_timeout_ns=20 * MS)
    _, first = world.turn("a", tokens(300))
    began = world.loop.now_ns
    world.lose = lambda send: isinstance(send.message, Claim)
    said, finished = world.turn("b", tokens(400), first.handle)
    assert world.report("b")["reason"] == "no_reply"
    assert world.first_ns["bp"] - began == 20 * MS + 400 * TOKEN_NS
    assert not finished.wrong
    assert said == pair().turn("b", tokens(400))[0]
    drained(world)


@pytest.mark.parametrize(("busy_ms", "questions"), [(50, 1), (150, 2), (1500, 2)])
def test_a_claim_that_lapsed_in_the_queue_is_asked_for_again(busy_ms: int, questions: int) -> None:
    """However long another request held the engine: once when the request came, and where its claim was over
    by then (100 ms, with the margin) once more when its turn has come; and it reads."""
    world = pair(make_profile(running=1), claim_term_ns=200 * MS)
    _, first = world.turn("a", tokens(300))
    asked_before = len(world.sent)
    world.submit("p", Request("busy", world.text(tokens(20, 2)), busy_ms, ends_at=2000, hop=Hop.ALONE))
    said, finished = world.turn("b", tokens(400), first.handle)
    assert (world.report("b")["reason"], world.report("b")["returned_tokens"]) == (None, 256)
    assert sum(isinstance(send.message, Claim) for send in world.sent[asked_before:]) == questions
    assert not finished.wrong
    assert said == pair().turn("b", tokens(400))[0]
    world.run()
    drained(world)


def test_a_late_read_is_fenced() -> None:
    """A read that outlives its claim: the request starts over at the deadline, in other blocks; the late
    bytes land in blocks that nobody has."""
    slow = msgspec.structs.replace(
        make_profile(), transfer=msgspec.structs.replace(make_profile().transfer, setup_ns=S)
    )
    world = pair(slow, claim_term_ns=200 * MS)
    _, first = world.turn("a", tokens(300))
    prefill = world.engines["p"]
    began = world.loop.now_ns
    world.submit("p", Request("bp", world.text(tokens(400)), 1, hop=Hop.PREFILL, handle=first.handle))
    world.run(lambda: "bp" in world.finished)
    assert world.report("b")["reason"] == "deadline"
    assert world.loop.now_ns - began == 100 * MS + 400 * TOKEN_NS
    assert not prefill.is_idle
    assert prefill.counters["late_reads"] == 1
    assert prefill.pool.references == 25 + 16
    handover = world.finished["bp"].handover
    world.run(lambda: prefill.is_idle)
    assert prefill.pool.references == 25
    ask(world, "bd", tokens(400), hop=Hop.DECODE, handover=handover)
    world.run()
    assert not world.finished["bd"].wrong
    drained(world)


def test_a_peer_that_restarted_costs_the_reuse_only() -> None:
    """Decode's new incarnation refuses the old handle; a prompt of prefill's old one is computed anew."""
    world = pair()
    _, first = world.turn("a", tokens(300))
    world.engines["d"] = Engine(config("d", reads=False, incarnation="d/2"), make_profile())
    world.submit("p", Request("bp", world.text(tokens(400)), 1, hop=Hop.PREFILL, handle=first.handle))
    world.run(lambda: "bp" in world.finished)
    assert world.report("b")["reason"] == "wrong_incarnation"
    handover = world.finished["bp"].handover
    world.engines["p"] = Engine(config("p", incarnation="p/2"), make_profile())
    ask(world, "bd", tokens(400), hop=Hop.DECODE, handover=handover)
    world.run()
    assert not world.finished["bd"].wrong
    assert world.said["bd"] == pair().turn("b", tokens(400), max_tokens=8)[0]
    drained(world)


@pytest.mark.parametrize("at_ns", [0, LATENCY_NS, 2 * LATENCY_NS, MS, 2 * MS, 4 * MS, 5 * MS])
def test_a_client_may_leave_at_any_time(at_ns: int) -> None:
    """Before, while and after its read a request that is given up leaves nothing behind."""
    world = pair()
    _, first = world.turn("a", tokens(300))
    world.submit("p", Request("bp", world.text(tokens(700)), 1, hop=Hop.PREFILL, handle=first.handle))
    world.loop.after(at_ns, lambda: world.engines["p"].abort("bp", world.loop.now_ns))
    world.loop.after(at_ns, lambda: world.settle(world.engines["p"]))
    world.run()
    assert world.finished["bp"].reason is Reason.ABORT
    assert world.engines["d"].leases.table.claim_count() == 0
    drained(world)


def test_a_handover_that_nobody_reads_is_given_up() -> None:
    """Prefill keeps a prompt for a bounded time; a client that leaves before lets decode say so."""
    world = pair(handover_ns=50 * MS)
    world.submit("p", Request("a", world.text(tokens(300)), 1, hop=Hop.PREFILL))
    world.run(lambda: "a" in world.finished)
    assert world.engines["p"].pool.references == 19
    world.run()
    assert world.engines["p"].pool.references == 0


def test_requests_that_cannot_be_are_refused() -> None:
    """No tokens, too many, or an id in use: nothing is entered."""
    world = alone()
    ask(world, "a", tokens(30))
    for name, prompt, count in (
        ("a", tokens(30), 1),
        ("b", b"", 1),
        ("c", tokens(2000), 100),
        ("d", tokens(1), 0),
    ):
        with pytest.raises(ValueError, match=r"is there already|too many"):
            ask(world, name, prompt, max_tokens=count)
    world.run()
    assert set(world.finished) == {"a"}


@pytest.mark.parametrize(("live_tokens", "returned"), [(0, 339), (900, 192), (1000, 0)])
def test_a_lease_that_has_ended_is_good_while_its_blocks_are(live_tokens: int, returned: int) -> None:
    """Soon after its term a handle still reads everything, under a new lease; later what was not handed out
    since, up to the first block that was; and in the end nothing."""
    world = pair(make_profile(blocks=128), lease_term_ns=100 * MS)
    said, first = world.turn("a", tokens(300))
    world.loop.at(200 * MS, lambda: None)
    world.run()
    assert world.engines["d"].pool.references == 0
    for kind in (2, 3):
        if live_tokens:
            ask(world, str(kind), tokens(live_tokens, kind), hop=None)
    world.run()
    prompt = tokens(300) + said + tokens(50, 1)
    again, finished = world.turn("b", prompt, first.handle)
    assert world.report("b")["returned_tokens"] == returned
    assert not finished.wrong
    assert again == pair().turn("b", prompt)[0]
    drained(world)


def test_a_changed_model_ends_every_lease() -> None:
    """After a reset nothing is found and nothing granted; and a lease can be dropped by message."""
    world = pair()
    _, first = world.turn("a", tokens(300))
    world.engines["d"].reset_prefix_cache(world.loop.now_ns)
    world.turn("b", tokens(400), first.handle)
    assert world.report("b")["reason"] == "unknown_lease"
    assert world.engines["d"].serve(Drop(["x"]), world.loop.now_ns).dropped == 0  # type: ignore[union-attr]
    drained(world)


def test_a_client_may_ask_to_keep_nothing() -> None:
    """Without `retain`, and without a hop at all, no handle comes."""
    world = pair()
    assert world.turn("a", tokens(300), retain=False)[1].handle is None
    world.submit("d", msgspec.structs.replace(Request("b", world.text(tokens(300)), 4), ends_at=100))
    world.run()
    assert world.finished["b"].handle is None
    assert world.engines["d"].leases.table.held_blocks == 0


def test_decode_says_what_its_prompt_was_made_of() -> None:
    """What prefill handed over is loaded, what decode had itself is local, and alone it computes the rest."""
    world = pair()
    _, first = world.turn("a", tokens(100))
    assert first.decoded == report(100, 0, 100)
    _, second = world.turn("b", tokens(164), handle=first.handle)
    assert second.decoded == report(164, 96, 68)
    world.submit("d", Request("c", world.text(tokens(200)), 8, ends_at=1000, hop=Hop.ALONE))
    world.run(lambda: "c" in world.finished)
    assert world.finished["c"].decoded == report(200, 160, 0)


def report(prompt: int, local: int, returned: int) -> dict[str, object]:
    """A turn's account."""
    counts = {"prompt_tokens": prompt, "local_tokens": local, "returned_tokens": returned}
    return counts | {"computed_tokens": prompt - local - returned, "reason": None, "read_us": 0}
