"""Retaining: what is leased and what is not, and the handle that names it."""

from collections.abc import Iterator
from typing import Any

import pytest

from kvloop.core.handle import HANDLE_VERSION, Handle
from kvloop.errors import UserError
from kvloop.wire.handle import decode_handle
from tests.connector.decode import TOKENS, Decode, stop_time
from tests.connector.fakes import BLOCK, KEY, Clock, Pool, S, make_request


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time for decode's side."""
    return stop_time(monkeypatch)


@pytest.fixture
def decode() -> Iterator[Decode]:
    """Decode with 100 blocks."""
    made = Decode(Pool(100))
    yield made
    made.check()


def test_a_finished_request_is_leased(decode: Decode) -> None:
    """All tokens but the last, whose KV was never computed; the handle says where and for how long."""
    handle = decode.kept()
    assert handle == Handle(
        HANDLE_VERSION, "decode-0", "i1", handle.lease_id, "10.0.0.1", 5570, 1, 1, 1, 100, 60_000
    )
    assert decode_handle(decode.retainer.encode(handle), KEY) == handle
    assert decode.pool.held() == 7
    assert decode.kept().lease_id != handle.lease_id


@pytest.mark.parametrize(("computed", "leased"), [(100, 100), (140, 100), (97, 97), (96, 96), (64, 64)])
def test_no_more_is_leased_than_was_computed(decode: Decode, computed: int, leased: int) -> None:
    """Steps that are still under way count for nothing; blocks beyond the last computed one are not held."""
    handle = decode.kept(num_computed_tokens=computed)
    assert handle.token_count == leased
    assert decode.pool.held() == -(-leased // BLOCK)


def test_what_is_not_retained_holds_nothing() -> None:
    """No pool, declined, several KV groups, too short, too few blocks, no share left."""
    pool = Pool(100)
    unbound = Decode(None)
    unbound.pool = pool
    assert unbound.retain() is None
    roomy = Decode(pool)
    assert roomy.retain(declined="pooling") is None
    assert roomy.retain(num_computed_tokens=63) is None
    small = Decode(pool, max_retained_share=0.05)
    assert small.retain(list(range(1))) is None
    assert small.retain() is None, "seven blocks of five"
    two = pool.allocate(8)
    request = make_request("r", TOKENS[:65])
    assert small.retainer.retain(request, (two[:5], two[5:])) is None
    assert small.retainer.retain(request, (two[:3],)) is None
    assert small.retainer.retain(request, (two[:5],)) is not None
    pool.free(two)
    assert pool.held() == 4


@pytest.mark.parametrize("threshold", [0, 1, 200])
def test_what_no_turn_would_read_back_is_not_retained(threshold: int) -> None:
    """Below the reader's threshold the memory would be held for nothing; nothing at all is never leased."""
    picky = Decode(Pool(100), recompute_threshold_tokens=threshold)
    assert (picky.retain(TOKENS[:2]) is not None) is (threshold < 2)
    assert picky.retain(TOKENS[:1]) is None


def test_the_handle_s_expiry_is_the_lease_s_first_term() -> None:
    """What it says is counted from when it was made."""
    brief: Any = Decode(Pool(100), lease_term_ns=7 * S)
    assert brief.kept().expires_in_ms == 7_000


@pytest.mark.parametrize(
    ("engine_id", "host"), [("e" * 65, "h"), ("motör", "h"), ("e" * 64, "h" * 110), ("e e", "h")]
)
def test_an_engine_whose_handles_nobody_could_carry_does_not_start(engine_id: str, host: str) -> None:
    """Rather than failing when its first request ends."""
    Decode(None, "decode-0_dp15", control_host="decode-15.decode.svc.cluster.local").retainer.check_handle()
    with pytest.raises(UserError, match=r"engine id .* do not fit into a handle"):
        Decode(None, engine_id, control_host=host).retainer.check_handle()
