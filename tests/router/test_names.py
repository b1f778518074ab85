"""Conversations are found by every name that clients send, each of its kind; children by their parents'."""

from typing import Any

from kvloop.router.names import MAX_NAME_CHARS, NAME_FIELDS, NAME_HEADERS
from tests.router.harness import in_loop, stack
from tests.router.test_turns import handle_sent


def user(text: str) -> list[dict[str, str]]:
    """A history of one message, which nobody has sent before."""
    return [{"role": "user", "content": text}]


def field(path: str, value: str) -> dict[str, Any]:
    """A body's member at a path of one or two names."""
    outer, _, inner = path.partition(".")
    return {outer: {inner: value} if inner else value}


@in_loop
async def test_found_by_name() -> None:
    """A rewritten history is found by its name; equal names of different kinds never collide."""
    async with stack() as router:
        named: list[tuple[dict[str, str], dict[str, Any]]] = [
            *(({}, field(path, "n")) for path in NAME_FIELDS),
            *(({header.title(): "n"}, {}) for header in NAME_HEADERS),
        ]
        assert len(named) == 16
        for number, (headers, fields) in enumerate(named):
            assert await handle_sent(router, user(f"a{number}"), headers=headers, **fields) is None
            served = len(router.decode[0].asked)
            assert await handle_sent(router, user(f"b{number}"), headers=headers, **fields) == f"h{served}"
            for name, value in fields.items():  # and the engines get it as it was sent
                assert router.prefill[0].asked[-1].body[name] == value
                assert router.decode[0].asked[-1].body[name] == value
            for name, value in headers.items():
                assert router.prefill[0].asked[-1].headers[name.lower()] == value


@in_loop
async def test_no_names() -> None:
    """`user` names a person; what is too long, empty or no string names nothing."""
    async with stack() as router:
        for number, fields in enumerate(
            (
                {"user": "n"},
                {"metadata": {"user_id": "n"}},
                {"session_id": "n" * (MAX_NAME_CHARS + 1)},
                {"session_id": ""},
                {"session_id": 5},
                {"vllm_xargs": {"agentic_context": ["n"]}},
                {"metadata": "session_id"},
            )
        ):
            for turn in range(2):
                assert await handle_sent(router, user(f"{number} {turn}"), **fields) is None
        longest = "n" * MAX_NAME_CHARS
        assert await handle_sent(router, user("x"), headers={"x-session-id": longest}) is None
        assert await handle_sent(router, user("y"), headers={"x-session-id": longest}) is not None


@in_loop
async def test_parents() -> None:
    """A child is found by its parent's name, once; the parent never by its child's turns."""
    for parent, child in (
        ({"x-session-id": "p"}, {"x-session-id": "c", "x-parent-session-id": "p"}),
        (
            {"x-claude-code-agent-id": "p"},
            {"x-claude-code-agent-id": "c", "x-claude-code-parent-agent-id": "p"},
        ),
        (
            {"x-claude-code-session-id": "s"},
            {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "c"},
        ),
    ):
        async with stack() as router:
            assert await handle_sent(router, user("a"), headers=parent) is None
            assert await handle_sent(router, user("b"), headers=child) == "h1"
            assert await handle_sent(router, user("c"), headers=child) == "h2"
            assert await handle_sent(router, user("d"), headers=parent) == "h1"
            listed = (await router.admin.get("/conversations")).json()["conversations"]
            kinds = {name["kind"] for turn in listed for name in turn["names"]}
            assert "x-parent-session-id" not in kinds
            assert "x-claude-code-parent-agent-id" not in kinds


@in_loop
async def test_a_child_is_no_return_of_its_parent() -> None:
    """Who shares a name, or came out of a conversation, says nothing of when that one comes back."""
    async with stack() as router:
        for headers, counted in (
            ({"x-correlation-id": "n"}, 0),
            ({"x-smg-routing-key": "n"}, 0),
            ({"x-session-id": "n"}, 1),
        ):
            await handle_sent(router, user(f"a{headers}"), headers=headers)
            await handle_sent(router, user(f"b{headers}"), headers=headers)
            assert await router.metric("return_gap_seconds_count") == counted
        child = {"x-session-id": "c", "x-parent-session-id": "n"}
        assert await handle_sent(router, user("child"), headers=child) is not None
        assert await router.metric("return_gap_seconds_count") == 1
