"""Retaining: what is leased and what is not, what a claim gets, and how the memory comes back."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvloop.connector import retain as module
from kvloop.connector.retain import Retainer
from kvloop.core.chain import Chain, build_chain, root_digest
from kvloop.core.handle import HANDLE_VERSION, Handle
from kvloop.errors import UserError
from kvloop.wire.control import (
    Claim,
    Drop,
    Dropped,
    Failed,
    Granted,
    Message,
    Refused,
    Release,
    Released,
    Renew,
    Renewed,
    Stat,
    StatReply,
)
from kvloop.wire.handle import decode_handle
from tests.connector.fakes import (
    BLOCK,
    IDENTITIES,
    KEY,
    Clock,
    Pool,
    S,
    make_request,
    make_settings,
    make_source,
)

TOKENS = list(range(101))


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time for the retainer."""
    stopped = Clock()
    monkeypatch.setattr(module, "time", stopped)
    return stopped


def make_retainer(engine_id: str = "decode-0", **settings: Any) -> Retainer:
    """A retainer without a pool."""
    return Retainer(
        make_settings(**settings),
        identity_of=IDENTITIES,
        block_size=BLOCK,
        engine_id=engine_id,
        incarnation="i1",
        describe_source=make_source,
    )


@pytest.fixture
def pool() -> Pool:
    """100 blocks."""
    return Pool(100)


@pytest.fixture
def retainer(pool: Pool) -> Iterator[Retainer]:
    """A retainer on that pool. Whatever the test does, its table is whole."""
    made: Any = make_retainer()
    made.bind(pool)
    yield made
    made.check_integrity()


def retain(retainer: Any, pool: Pool, tokens: list[int] = TOKENS, **changes: Any) -> Handle | None:
    """A request of these tokens ends: it is retained where it may be, and gives its own references back."""
    blocks = pool.allocate(-(-len(tokens) // BLOCK))
    assert blocks
    handle: Handle | None = retainer.retain(make_request("r", tokens, **changes), (blocks,))
    pool.free(reversed(blocks))
    return handle


def kept(retainer: Any, pool: Pool, tokens: list[int] = TOKENS, **changes: Any) -> Handle:
    """The same, where it must be retained."""
    handle = retain(retainer, pool, tokens, **changes)
    assert handle is not None
    return handle


def chain(tokens: list[int], salt: str = "") -> Chain:
    """The chain that a reader builds."""
    request = make_request("reader", tokens, cache_salt=salt)
    return build_chain(KEY, root_digest(KEY, IDENTITIES(request)), tokens)


def claim(retainer: Any, handle: Handle, tokens: list[int], salt: str = "") -> Message:
    """A reader's claim, answered on another thread, as the control channel's is."""
    return serve(retainer, Claim.asking(handle, chain(tokens[: handle.token_count], salt)))


def serve(retainer: Any, message: Message) -> Message:
    """What the control thread answers."""
    answers: list[Message] = []
    thread = threading.Thread(target=lambda: answers.append(retainer.serve(message)))
    thread.start()
    thread.join()
    return answers[0]


def granted(answer: Message) -> Granted:
    """The answer, which must be a grant."""
    assert isinstance(answer, Granted)
    return answer


def test_a_finished_request_is_leased(retainer: Any, pool: Pool) -> None:
    """All tokens but the last, whose KV was never computed; the handle says where and for how long."""
    handle = kept(retainer, pool)
    assert handle == Handle(
        HANDLE_VERSION, "decode-0", "i1", handle.lease_id, "10.0.0.1", 5570, 1, 1, 1, 100, 480_000
    )
    assert decode_handle(retainer.encode(handle), KEY) == handle
    assert pool.held() == 7
    assert kept(retainer, pool).lease_id != handle.lease_id


@pytest.mark.parametrize(("computed", "leased"), [(100, 100), (140, 100), (97, 97), (96, 96), (64, 64)])
def test_no_more_is_leased_than_was_computed(retainer: Any, pool: Pool, computed: int, leased: int) -> None:
    """Steps that are still under way count for nothing; blocks beyond the last computed one are not held."""
    handle = kept(retainer, pool, num_computed_tokens=computed)
    assert handle.token_count == leased
    assert pool.held() == -(-leased // BLOCK)


def test_what_is_not_retained_holds_nothing(pool: Pool) -> None:
    """No pool, declined, several KV groups, too short, too few blocks, no share left."""
    unbound = make_retainer()
    assert retain(unbound, pool) is None
    retainer = make_retainer(max_retained_share=0.05)
    retainer.bind(pool)  # type: ignore[arg-type]
    roomy = make_retainer()
    roomy.bind(pool)  # type: ignore[arg-type]
    assert retain(roomy, pool, declined="pooling") is None
    assert retain(roomy, pool, num_computed_tokens=63) is None
    assert retain(retainer, pool, list(range(1))) is None
    assert retain(retainer, pool) is None, "seven blocks of five"
    two = pool.allocate(8)
    request = make_request("r", TOKENS[:65])
    assert retainer.retain(request, (two[:5], two[5:])) is None
    assert retainer.retain(request, (two[:3],)) is None
    assert retainer.retain(request, (two[:5],)) is not None
    pool.free(two)
    assert pool.held() == 4


@pytest.mark.parametrize("threshold", [0, 1, 200])
def test_what_no_turn_would_read_back_is_not_retained(pool: Pool, threshold: int) -> None:
    """Below the reader's threshold the memory would be held for nothing; nothing at all is never leased."""
    retainer = make_retainer(recompute_threshold_tokens=threshold)
    retainer.bind(pool)  # type: ignore[arg-type]
    assert (retain(retainer, pool, TOKENS[:2]) is not None) is (threshold < 2)
    assert retain(retainer, pool, TOKENS[:1]) is None


def test_the_oldest_leases_make_way_for_a_new_one(pool: Pool) -> None:
    """Within the share, whatever is free beside it; but one that is claimed stays."""
    retainer: Any = make_retainer(max_retained_share=0.21)
    retainer.bind(pool)
    first, second, third = (kept(retainer, pool) for _ in range(3))
    assert pool.held() == 21
    claimed = granted(claim(retainer, first, TOKENS))
    fourth = kept(retainer, pool)
    assert pool.held() == 21
    assert isinstance(claim(retainer, second, TOKENS), Refused)
    for handle in (third, fourth):
        granted(claim(retainer, handle, TOKENS))
    assert retain(retainer, pool) is None, "all are claimed"
    assert pool.held() == 21
    serve(retainer, Release(claimed.claim_id))
    kept(retainer, pool)
    assert pool.held() == 21


def test_what_can_never_fit_drives_nothing_out(pool: Pool) -> None:
    """A request larger than the whole share leaves the leases there are alone."""
    retainer: Any = make_retainer(max_retained_share=0.08)
    retainer.bind(pool)
    handle = kept(retainer, pool)
    assert retain(retainer, pool, list(range(200))) is None
    granted(claim(retainer, handle, TOKENS))


def test_a_claim_gets_what_is_proven(retainer: Any, pool: Pool) -> None:
    """To the token where the history goes on, to the segment where it does not; blocks for just that."""
    handle = kept(retainer, pool)
    whole = granted(claim(retainer, handle, TOKENS + [5] * 50))
    assert (whole.matched_tokens, whole.term_ms) == (100, 5_000)
    assert whole.block_ids == [list(range(7))]
    assert whole.source == make_source(f"kvloop:{whole.claim_id}")
    part = granted(claim(retainer, handle, TOKENS[:80] + [5] * 50))
    assert (part.matched_tokens, part.block_ids) == (64, [[0, 1, 2, 3]])
    assert part.claim_id != whole.claim_id


@pytest.mark.parametrize(
    ("tokens", "salt", "reason"),
    [([7, *TOKENS[1:]], "", "no_match"), (TOKENS, "another tenant", "wrong_root")],
)
def test_what_is_not_proven_is_refused(
    retainer: Any, pool: Pool, tokens: list[int], salt: str, reason: str
) -> None:
    """Another history, another tenant's root."""
    handle = kept(retainer, pool)
    assert claim(retainer, handle, tokens, salt) == Refused(reason)


def test_a_claim_whose_chain_is_no_chain_is_refused(retainer: Any, pool: Pool) -> None:
    """Its lengths come from a peer."""
    handle = kept(retainer, pool)
    bad = Claim(handle.lease_id, "i1", bytes(16), bytes(16), b"", 1000)
    assert serve(retainer, bad) == Refused("malformed")


def test_claimed_blocks_stay_until_the_last_claim_ends(retainer: Any, pool: Pool, clock: Clock) -> None:
    """Dropped, reset or out of time: they come back when the reader is through, or its time is."""
    handle = kept(retainer, pool)
    one, other = (granted(claim(retainer, handle, TOKENS)) for _ in range(2))
    retainer.drop_all()
    assert pool.held() == 7
    assert claim(retainer, handle, TOKENS) == Refused("released")
    assert serve(retainer, Release(one.claim_id)) == Released(True)
    assert serve(retainer, Release(one.claim_id)) == Released(False)
    retainer.give_back()
    assert pool.held() == 7
    clock.now_ns += 5 * S
    retainer.give_back()
    assert pool.held() == 0
    assert serve(retainer, Release(other.claim_id)) == Released(False)


def test_what_ends_on_the_control_thread_comes_back_on_the_scheduler_s(retainer: Any, pool: Pool) -> None:
    """Dropped there, the blocks are held until the scheduler next looks."""
    handle = kept(retainer, pool)
    assert serve(retainer, Drop([handle.lease_id, "never was"])) == Dropped(1)
    assert pool.held() == 7
    retainer.give_back()
    assert pool.held() == 0
    assert [block.freed for block in pool.blocks[:7]] == [2] * 7


def test_leases_last_as_long_as_the_operator_says(pool: Pool, clock: Clock) -> None:
    """A lease is gone when its time is; renewing says which are gone, and cannot stretch it."""
    retainer: Any = make_retainer(lease_ttl_ns=10 * S)
    retainer.bind(pool)
    handle = kept(retainer, pool)
    clock.now_ns += 9 * S
    assert serve(retainer, Renew([(handle.lease_id, 60_000), ("never was", 1)])) == Renewed(["never was"])
    clock.now_ns += S
    assert isinstance(claim(retainer, handle, TOKENS), Refused)
    retainer.give_back()
    assert pool.held() == 0


def test_room_is_made_out_of_unclaimed_leases_only(retainer: Any, pool: Pool) -> None:
    """The least recently used first, no more than needed; live requests and claims keep theirs."""
    handles = [kept(retainer, pool, TOKENS) for _ in range(3)]
    granted(claim(retainer, handles[0], TOKENS))
    busy = pool.allocate(70)
    retainer.make_room(9)
    assert pool.get_num_free_blocks() == 9
    retainer.make_room(16)
    assert pool.get_num_free_blocks() == 16
    assert claim(retainer, handles[1], TOKENS) == Refused("unknown_lease")
    granted(claim(retainer, handles[2], TOKENS))
    retainer.make_room(90)
    assert pool.get_num_free_blocks() == 16
    assert len(busy) == 70


def test_making_room_without_a_pool_does_nothing() -> None:
    """Before vLLM has bound it."""
    make_retainer().make_room(5)
    make_retainer().give_back()


def test_a_full_table_gives_the_references_back(retainer: Any, pool: Pool) -> None:
    """Then there is no lease and no handle."""
    retainer._table.max_leases = 1
    kept(retainer, pool)
    assert retain(retainer, pool) is None
    assert pool.held() == 7


def test_stat_counts(retainer: Any, pool: Pool) -> None:
    """Leases, claims, blocks, and how leases have ended."""
    one, _, three = (kept(retainer, pool) for _ in range(3))
    granted(claim(retainer, one, TOKENS))
    serve(retainer, Drop([three.lease_id]))
    assert serve(retainer, Stat()) == StatReply("decode-0", "i1", 1, 1, 1, 14, 0, 1, 0)


@pytest.mark.parametrize("message", [Released(True), Failed("x"), Refused("x"), Renewed([])])
def test_an_answer_is_no_question(retainer: Any, message: Message) -> None:
    """It is answered, but not acted on."""
    assert serve(retainer, message) == Failed("not a question")


def test_a_new_incarnation_voids_what_was_granted_before(retainer: Any, pool: Pool) -> None:
    """The memory is another: leases end, their handles name nothing, new ones carry its name."""
    old = kept(retainer, pool)
    retainer.begin_incarnation("i2")
    assert pool.held() == 0
    assert claim(retainer, old, TOKENS) == Refused("wrong_incarnation")
    new = kept(retainer, pool)
    assert new.incarnation == "i2"
    granted(claim(retainer, new, TOKENS))


@pytest.mark.parametrize(
    ("engine_id", "host"), [("e" * 65, "h"), ("motör", "h"), ("e" * 64, "h" * 110), ("e e", "h")]
)
def test_an_engine_whose_handles_nobody_could_carry_does_not_start(engine_id: str, host: str) -> None:
    """Rather than failing when its first request ends."""
    make_retainer(engine_id="decode-0_dp15", control_host="decode-15.decode.svc.cluster.local").check_handle()
    with pytest.raises(UserError, match=r"engine id .* do not fit into a handle"):
        make_retainer(engine_id=engine_id, control_host=host).check_handle()
