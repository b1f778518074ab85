"""What a client may say about how long its turn is kept."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloop.router.request import Request
from kvloop.router.retain import retention_asked_ns, without_retention
from kvloop.wire.openai import RequestError
from tests.router.harness import HELLO, in_loop, stack

NS_PER_S = 1_000_000_000


def asking(*values: bytes) -> Request:
    """A request with these headers."""
    headers = [(b"x-kvloop-retain", value) for value in values]
    return Request("POST", "/", headers, True, False, named=dict(headers))


@pytest.mark.parametrize(
    ("values", "kept_ns"),
    [
        ((), None),
        ((b"off",), 0),
        ((b" OFF ",), 0),
        ((b"0",), 0),
        ((b"90",), 90 * NS_PER_S),
        ((b"0.25",), NS_PER_S // 4),
    ],
)
def test_off_or_seconds(values: tuple[bytes, ...], kept_ns: int | None) -> None:
    """In any case, with decimals, or nothing at all."""
    assert retention_asked_ns(asking(*values)) == kept_ns


@pytest.mark.parametrize(
    "values",
    [(b"",), (b"on",), (b"-1",), (b"1e3",), (b"inf",), (b"nan",), (b"9" * 10,), (b"1.",), (b"60", b"off")],
)
def test_nonsense_is_refused(values: tuple[bytes, ...]) -> None:
    """Also two headers, of which either could be meant."""
    with pytest.raises(RequestError) as refused:
        retention_asked_ns(asking(*values))
    assert (refused.value.status, refused.value.param) == (400, "x-kvloop-retain")


@given(st.dictionaries(st.text(max_size=9), st.text(max_size=9) | st.lists(st.integers()), max_size=4))
def test_the_handover_is_otherwise_as_it_was(members: dict[str, object]) -> None:
    """One member more, whatever spacing an engine writes; also where it had none."""
    for text in (json.dumps(members), json.dumps(members, indent=1)):
        assert json.loads(without_retention(text.encode())) == {**members, "kvloop_retain": False}


@in_loop
async def test_who_opts_out_leaves_nothing() -> None:
    """Decode is told, and what it answers all the same is not filed; earlier turns are used as before."""
    async with stack() as router:
        await router.chat([HELLO])
        again = [HELLO, {"role": "assistant", "content": "Hello"}, HELLO]
        out = await router.chat(again, headers={"X-Kvloop-Retain": "off"})
        await router.chat(again)
        assert (out.status_code, out.headers["x-kvloop-route"]) == (200, "return")
        asked = [asked.params for asked in router.decode[0].generations()]
        assert [params.get("kvloop_retain") for params in asked] == [None, False, None]
        assert asked[1] == {**asked[2], "kvloop_retain": False}
        assert [asked.params.get("kvloop_handle") for asked in router.prefill[0].generations()] == [
            None,
            "h1",
            "h1",
        ]
        assert await router.metric("handles_filed_total") == 2
        assert all("x-kvloop-retain" not in asked.headers for asked in router.decode[0].asked)


@in_loop
async def test_a_wish_that_cannot_be_read_is_a_400() -> None:
    """In OpenAI's shape, before any engine hears of the request."""
    async with stack() as router:
        refused = await router.chat([HELLO], headers={"X-Kvloop-Retain": "forever"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-kvloop-retain")
        assert not router.prefill[0].generations()
