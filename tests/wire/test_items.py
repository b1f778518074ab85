"""Arrays are looked at from their start, in memory that their length has no part in."""

import tracemalloc

import msgspec
import pytest

from kvloop.core.lineage import MAX_UNITS
from kvloop.wire.items import SMALL_BYTES, FirstItems
from kvloop.wire.openai import Endpoint, read_generation

ITEMS = FirstItems()


@pytest.mark.parametrize("count", [0, 1, 20, MAX_UNITS - 1, MAX_UNITS, MAX_UNITS + 1, 2 * MAX_UNITS])
def test_the_first_items_are_those_of_a_whole_decoding(count: int) -> None:
    """Small arrays come whole, large ones up to the bound, each item as the client wrote it."""
    item = b'{"role": "user", "content": "%d"}'
    whole = b"[" + b" , ".join(item % place for place in range(count)) + b"]"
    taken = [bytes(one) for one in ITEMS.decode(whole)]
    naive = [bytes(one) for one in msgspec.json.decode(whole, type=list[msgspec.Raw])]
    assert taken == (naive if len(whole) <= SMALL_BYTES else naive[:MAX_UNITS])


@pytest.mark.parametrize("size", [0, SMALL_BYTES])
@pytest.mark.parametrize("broken", [b"{}", b"[1", b"5", b"[1]]", b"null"])
def test_no_array(broken: bytes, size: int) -> None:
    """What is no array is an error, however long it is."""
    with pytest.raises(msgspec.DecodeError):
        ITEMS.decode(broken + b" " * size)


@pytest.mark.parametrize(
    ("endpoint", "item"), [(Endpoint.CHAT, b"0"), (Endpoint.COMPLETIONS, b"0"), (Endpoint.COMPLETIONS, b'""')]
)
def test_a_body_of_items_takes_no_more_than_its_bytes(endpoint: Endpoint, item: bytes) -> None:
    """Reading a request of a million items takes less memory than the request has bytes, three times over."""
    body = b'{"model":"tiny","%b":[%b]}' % (endpoint.encode(), b",".join([item] * 1_000_000))
    tracemalloc.start()
    try:
        read_generation(endpoint, body)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(body)
    finally:
        tracemalloc.stop()
