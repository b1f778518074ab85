"""Reading back: one question for each request, each miss has a reason, what is granted is released once."""

import threading
from typing import Any

import pytest

from kvloop.connector import readback as module
from kvloop.connector.metadata import KvloopMetadata
from kvloop.connector.readback import MARGIN_NS, ReadBack
from kvloop.connector.tally import Tally
from kvloop.core.claim import MAX_QUESTIONS
from kvloop.core.handle import HANDLE_VERSION, Handle
from kvloop.wire.control import Claim, Failed, Granted, Message, Refused, Release
from kvloop.wire.handle import encode_handle
from tests.connector.fakes import (
    BLOCK,
    IDENTITIES,
    KEY,
    Channel,
    Clock,
    S,
    make_request,
    make_settings,
    make_source,
)

TOKENS = list(range(101))
DECODE = ("10.0.0.9", 5571)
HANDLE = Handle(HANDLE_VERSION, "decode-0", "i1", "lease", *DECODE, 1, 1, 1, 100, 480_000)
TEXT = encode_handle(HANDLE, KEY)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time for the reads; nobody waits for a reply."""
    stopped = Clock()
    monkeypatch.setattr(module, "time", stopped)
    monkeypatch.setattr(module, "REPLY_WAIT_S", 0)
    return stopped


@pytest.fixture
def channel() -> Channel:
    """What goes out."""
    return Channel()


@pytest.fixture
def reads(channel: Any) -> Any:
    """The reads of one prefill engine."""
    made: Any = ReadBack(make_settings(), identity_of=IDENTITIES, block_size=BLOCK, tally=Tally(1000))
    made.use(channel)
    return made


def arrive(reads: Any, handle: object = TEXT, request_id: str = "r", **changes: Any) -> Any:
    """A request with a handle arrives."""
    reusable = changes.pop("reusable", True)
    request = make_request(request_id, changes.pop("tokens", TOKENS), **changes)
    reads.arrive(request, handle, reusable=reusable)
    return request


def reply(reads: Any, question: Any, message: Message) -> None:
    """An answer comes, on the control thread."""
    thread = threading.Thread(target=reads.on_reply, args=(question, message))
    thread.start()
    thread.join()


def grant(matched: int = 100, blocks: int | None = None, claim_id: str = "c", **changes: Any) -> Granted:
    """Decode grants: so many tokens in so many blocks."""
    count = -(-matched // BLOCK) if blocks is None else blocks
    fields = {"block_ids": [list(range(50, 50 + count))], "term_ms": 5_000, "source": make_source(claim_id)}
    return Granted(claim_id, matched, **fields | changes)  # type: ignore[arg-type]


def asked(channel: Channel) -> Any:
    """The question that went out, and nothing else."""
    ((address, message, question),) = channel.take()
    assert address == DECODE
    assert isinstance(message, Claim)
    return question


def granted(reads: Any, channel: Channel, message: Granted | None = None, **changes: Any) -> Any:
    """A request that asked and was granted."""
    request = arrive(reads, **changes)
    reply(reads, asked(channel), grant() if message is None else message)
    return request


def reason(reads: Any, request: Any) -> str | None:
    """Why nothing was returned, as the account says when the request leaves."""
    account = reads.leave(request)
    assert (
        account["prompt_tokens"]
        == account["local_tokens"] + account["returned_tokens"] + account["computed_tokens"]
    )
    given: str | None = account["reason"]
    return given


RELEASED = [(DECODE, Release("c"), None)]


@pytest.mark.parametrize(
    ("handle", "changes", "why"),
    [
        (None, {}, "no_handle"),
        (TEXT, {"reusable": False}, "not_reusable"),
        (TEXT, {"declined": "pooling"}, "pooling"),
        (TEXT[:-1] + "A", {}, "handle_forged"),
        (TEXT[:20], {}, "handle_malformed"),
        (7, {}, "handle_malformed"),
        ("ü", {}, "handle_malformed"),
        ("x" * 300, {}, "handle_too_long"),
        (TEXT, {"tokens": TOKENS[:20]}, "too_short"),
    ],
)
def test_what_asks_nobody_says_why(
    reads: Any, channel: Channel, handle: object, changes: Any, why: str
) -> None:
    """No handle, a bad one, or nothing to prove: the prompt is computed at once."""
    request = arrive(reads, handle, **changes)
    assert reads.decide(request, 0) == (0, False)
    assert not channel.sent
    assert reason(reads, request) == why


def test_a_read_from_question_to_account(reads: Any, channel: Channel, clock: Clock) -> None:
    """Asked once, granted, ordered without what is local, ended, released."""
    request = arrive(reads)
    assert reads.decide(request, 32) == (None, False)
    reply(reads, asked(channel), grant())
    assert reads.decide(request, 32) == (68, True)
    reads.order(request, [1, 2, 3, 4, 5])
    meta = KvloopMetadata()
    reads.add_orders(meta)
    read = meta.reqs_to_recv["r"]
    assert read.local_block_ids == [[1, 2, 3, 4, 5]]
    assert read.remote is not None
    assert (read.remote.block_ids, read.remote.request_id) == ([[52, 53, 54, 55, 56]], "c")
    assert (read.local_num_computed_blocks, read.awaiting_kvs) == ((2,), True)
    assert meta.deadlines_ns == {"r": clock.now_ns + 5 * S - MARGIN_NS}
    assert meta.incarnations == {"decode-0": "i1"}
    reads.add_orders(again := KvloopMetadata())
    assert not again.reqs_to_recv
    clock.now_ns += 7_000_000
    reads.end("r", failed=False)
    assert channel.take() == RELEASED
    assert reads.leave(request) == {
        "prompt_tokens": 101, "local_tokens": 32, "returned_tokens": 68, "computed_tokens": 1, "reason": None,
        "read_us": 7000,
    }  # fmt: skip
    assert "r" not in reads


def test_a_whole_prompt_may_be_returned(reads: Any, channel: Channel) -> None:
    """vLLM computes the last token again by itself."""
    request = granted(reads, channel, tokens=TOKENS[:100])
    assert reads.decide(request, 0) == (100, True)


@pytest.mark.parametrize(
    ("message", "local", "why"),
    [
        (grant(blocks=6), 0, "bad_grant"),
        (grant(blocks=8), 0, "bad_grant"),
        (grant(block_ids=[[1] * 7, [2] * 7]), 0, "bad_grant"),
        (grant(matched=90, blocks=6), 0, "bad_grant"),
        (grant(matched=64), 64, "local_hit"),
        (grant(matched=64), 96, "local_hit"),
        (grant(matched=64), 16, "below_threshold"),
    ],
)
def test_a_grant_that_is_of_no_use_is_released(
    reads: Any, channel: Channel, message: Granted, local: int, why: str
) -> None:
    """Blocks that do not fit the tokens, tokens that are here already, too few to be worth a transfer."""
    request = granted(reads, channel, message)
    for _ in range(2):
        assert reads.decide(request, local) == (0, False)
    assert channel.take() == RELEASED
    assert reason(reads, request) == why
    assert not channel.sent


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (Refused("no_match"), "no_match"),
        (Refused("of a later version"), "refused"),
        (Failed("unreachable"), "refused"),
        (Release("x"), "refused"),
    ],
)
def test_a_refusal_is_an_answer(reads: Any, channel: Channel, message: Message, why: str) -> None:
    """The turn is computed, and nothing is sent any more."""
    request = arrive(reads)
    reply(reads, asked(channel), message)
    assert reads.decide(request, 0) == (0, False)
    assert reason(reads, request) == why
    assert not channel.sent


def test_a_channel_that_takes_nothing_costs_nothing_but_the_reuse(reads: Any, channel: Channel) -> None:
    """It is full, or stopped."""
    channel.works = False
    request = arrive(reads)
    assert reads.decide(request, 0) == (0, False)
    assert reason(reads, request) == "refused"


def test_a_grant_that_comes_too_late_is_released(reads: Any, channel: Channel, clock: Clock) -> None:
    """Nobody waits for it: the prompt is being computed."""
    request = arrive(reads)
    question = asked(channel)
    clock.now_ns += S
    assert reads.decide(request, 0) == (0, False)
    reply(reads, question, grant())
    assert reads.decide(request, 0) == (0, False)
    assert channel.take() == RELEASED
    assert reason(reads, request) == "no_reply"


def test_a_grant_counts_from_when_it_came(reads: Any, channel: Channel, clock: Clock) -> None:
    """However late the scheduler comes to look at it: another request's step may take seconds."""
    request = granted(reads, channel)
    clock.now_ns += 2 * S
    assert reads.decide(request, 0) == (100, True)


def test_a_claim_that_lapsed_in_the_queue_is_asked_for_again(
    reads: Any, channel: Channel, clock: Clock
) -> None:
    """When the request's turn has come, and with a new deadline; what is still owed is released once."""
    request = granted(reads, channel)
    clock.now_ns += 6 * S
    assert reads.decide(request, 0) == (None, False)
    reply(reads, asked(channel), grant(claim_id="second"))
    assert reads.decide(request, 0) == (100, True)
    reads.order(request, [1] * 7)
    meta = KvloopMetadata()
    reads.add_orders(meta)
    assert meta.deadlines_ns["r"] == clock.now_ns + 5 * S - MARGIN_NS
    reads.end("r", failed=False)
    assert channel.take() == [(DECODE, Release("second"), None)]
    assert reads.leave(request)["returned_tokens"] == 100


def test_claims_that_end_before_they_begin_are_not_asked_for_forever(reads: Any, channel: Channel) -> None:
    """A decode engine that grants for no time at all makes a request compute."""
    request = granted(reads, channel, grant(term_ms=0))
    questions = 1
    while questions <= MAX_QUESTIONS and reads.decide(request, 0) == (None, False):
        (question,) = [sent[2] for sent in channel.take() if isinstance(sent[1], Claim)]
        reply(reads, question, grant(term_ms=0, claim_id=f"c{questions}"))
        questions += 1
    assert questions == MAX_QUESTIONS
    assert reason(reads, request) == "deadline"


@pytest.mark.parametrize("wait_s", [0, 1])
def test_a_question_asked_again_that_is_not_answered_is_not_repeated(
    reads: Any, channel: Channel, clock: Clock, wait_s: int
) -> None:
    """Where the channel takes nothing more the request computes at once, else after the reply timeout."""
    request = granted(reads, channel)
    clock.now_ns += 6 * S
    channel.works = wait_s > 0
    if wait_s:
        assert reads.decide(request, 0) == (None, False)
        question = asked(channel)
        clock.now_ns += wait_s * S
    assert reads.decide(request, 0) == (0, False)
    assert not channel.sent
    if wait_s:
        reply(reads, question, grant(claim_id="late"))
    assert reason(reads, request) == ("no_reply" if wait_s else "refused")
    assert channel.take() == ([(DECODE, Release("late"), None)] if wait_s else [])


def test_the_scheduler_is_held_for_each_question_once(
    reads: Any, channel: Channel, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the first, and for the one asked again; not each time that vLLM comes to see."""
    waits: list[float] = []
    monkeypatch.setattr(reads._replied, "wait", waits.append)
    request = arrive(reads)
    assert [reads.decide(request, 0) for _ in range(3)] == [(None, False)] * 3
    assert len(waits) == 1
    reply(reads, asked(channel), grant())
    clock.now_ns += 6 * S
    assert [reads.decide(request, 0) for _ in range(3)] == [(None, False)] * 3
    assert len(waits) == 2
    asked(channel)


def test_a_grant_after_the_request_has_gone_is_released_where_it_was_granted(
    reads: Any, channel: Channel
) -> None:
    """With the next call of the scheduler's."""
    request = arrive(reads)
    question = asked(channel)
    reads.leave(request)
    reply(reads, question, grant())
    reads.decide(arrive(reads, None, "other") and arrive(reads, TEXT, "third"), 0)
    assert (DECODE, Release("c"), None) in channel.take()


def test_a_grant_for_an_earlier_question_changes_nothing(reads: Any, channel: Channel) -> None:
    """Nor does it say where to read: the second grant's blocks are at the second grant's source."""
    first = asked((reads.leave(arrive(reads)), channel)[1])
    request = granted(reads, channel, grant(claim_id="second"))
    assert reads.decide(request, 0) == (100, True)
    reply(reads, first, grant(claim_id="first"))
    assert reads.decide(request, 0) == (100, True)
    assert channel.take() == [(DECODE, Release("first"), None)]
    reads.order(request, [1] * 7)
    meta = KvloopMetadata()
    reads.add_orders(meta)
    remote = meta.reqs_to_recv["r"].remote
    assert remote is not None
    assert remote.request_id == "second"


def test_a_request_is_returned_to_once(reads: Any, channel: Channel) -> None:
    """After preemption its blocks are gone and so is its claim: everything is computed."""
    request = granted(reads, channel)
    reads.decide(request, 0)
    reads.order(request, [1] * 7)
    reads.end("r", failed=False)
    channel.take()
    assert reads.decide(request, 0) == (0, False)
    assert not channel.sent
    assert reads.leave(request)["returned_tokens"] == 0


@pytest.mark.parametrize(("wait_s", "why"), [(0, "read_failed"), (6, "deadline")])
def test_a_read_that_failed_is_computed(
    reads: Any, channel: Channel, clock: Clock, wait_s: int, why: str
) -> None:
    """It is not tried again, and the claim is released where it may still be held."""
    request = granted(reads, channel)
    reads.decide(request, 0)
    reads.order(request, [1] * 7)
    clock.now_ns += wait_s * S
    reads.end("r", failed=True)
    assert channel.take() == ([] if wait_s else RELEASED)
    assert reads.decide(request, 0) == (0, False)
    assert reason(reads, request) == why


def test_an_abort_releases_what_is_granted(reads: Any, channel: Channel) -> None:
    """At once where nothing runs, and where a read runs: its blocks are remembered until it has ended."""
    reads.leave(granted(reads, channel))
    assert channel.take() == RELEASED
    request = granted(reads, channel)
    reads.decide(request, 0)
    reads.order(request, [3] * 7)
    reads.leave(request)
    assert channel.take() == RELEASED
    assert reads.target_blocks("r") == [3] * 7
    reads.end("r", failed=False)
    assert "r" not in reads
    assert not channel.sent
    assert reads.target_blocks("r") == []


def test_what_vllm_does_not_load_is_released(reads: Any, channel: Channel) -> None:
    """Whatever was proven; a read that has been ordered, or has ended, is not touched by it."""
    request = granted(reads, channel)
    reads.decide(request, 0)
    reads.decline(request)
    assert channel.take() == RELEASED
    assert reason(reads, request) == "not_loaded"
    request = granted(reads, channel)
    reads.decide(request, 0)
    reads.order(request, [1] * 7)
    reads.decline(request)
    assert not channel.sent
    reads.end("r", failed=False)
    reads.decline(request)
    assert reason(reads, request) is None


def test_blocks_that_are_not_those_that_were_proven_are_a_bug(reads: Any, channel: Channel) -> None:
    """It is not papered over: they would be filled with other positions' KV."""
    request = granted(reads, channel)
    reads.decide(request, 0)
    with pytest.raises(AssertionError, match="3 blocks to fill, 7 blocks proven"):
        reads.order(request, [1, 2, 3])


def test_a_request_that_never_arrived_has_an_account(reads: Any) -> None:
    """It reused nothing."""
    assert reads.leave(make_request("stranger", TOKENS))["reason"] == "not_asked"
    reads.end("stranger", failed=True)
