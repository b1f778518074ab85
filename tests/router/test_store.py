"""The store of responses: bounded three ways, its books balance, and a tenant reaches only its own."""

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvloop.router.store import MemoryStore, StoredResponse

NAMES = st.sampled_from(["a", "b", "c"])
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "next", "get", "delete", "wait"]), NAMES, NAMES, NAMES, st.integers(0, 300)
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=300)
@given(STEPS, st.integers(1, 4), st.integers(1, 3000))
def test_any_history(steps: list[tuple[str, str, str, str, int]], most: int, most_bytes: int) -> None:
    """Whatever is done: the bounds hold, the books balance, and what is found is what was put last."""
    now = [0]
    store = MemoryStore(most, most_bytes, 100, lambda: now[0])
    put: dict[tuple[str, str], Any] = {}

    async def run() -> None:
        for what, tenant, name, following, size in steps:
            if what == "wait":
                now[0] += size
            elif what == "delete":
                await store.delete(tenant, name)
                assert await store.get(tenant, name) is None
            else:
                found = await store.get(tenant, name)
                assert found is None or found is put[tenant, name]
                if what != "get":
                    before = found.stretches if found is not None and what == "next" else ()
                    put[tenant, following] = StoredResponse(b"r" * size, (*before, b"s" * size))
                    await store.put(tenant, following, put[tenant, following])
            store.check_integrity()

    asyncio.run(run())


def test_what_turns_share_counts_once() -> None:
    """A conversation of many turns takes about as much as its last response's history."""

    async def run() -> int:
        store = MemoryStore(1000, 1 << 30, 1, lambda: 0)
        stretches: tuple[bytes, ...] = ()
        for turn in range(100):
            stretches = (*stretches, bytes(10_000))
            await store.put("t", str(turn), StoredResponse(b"", stretches))
        return store.used_bytes

    assert asyncio.run(run()) < 1.2 * 100 * 10_000


def test_least_recently_used_goes_first() -> None:
    """And what was forgotten for its age is gone, whoever asks."""

    async def run() -> None:
        now = [0]
        store = MemoryStore(2, 1 << 20, 10, lambda: now[0])
        one = StoredResponse(b"1", ())
        await store.put("t", "a", one)
        await store.put("t", "b", one)
        assert await store.get("t", "a") is one
        await store.put("t", "c", one)
        assert [await store.get("t", name) for name in "abc"] == [one, None, one]
        now[0] = 10
        assert await store.get("t", "a") is None
        assert len(store) == 0

    asyncio.run(run())
