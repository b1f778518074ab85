"""The router's own log, read as a workload: what one side writes, the other takes."""

from pathlib import Path

import msgspec

from kvloop.bench.workload.read import read_workload
from kvloop.bench.workload.turns import Answer
from kvloop.router.turn_log import LoggedTurn


def test_what_the_router_writes_can_be_read(tmp_path: Path) -> None:
    """A turn that goes on from another has its answer in it, and a fork another line."""
    first = LoggedTurn(
        time=1_800_000_000.0,
        request_id="a",
        conversation="a",
        goes_on_from=None,
        tenant="t",
        model="m",
        prompt_tokens=100,
        shared_tokens=0,
        answer_tokens=20,
        ending="tool_calls",
        route="recompute",
        reused_tokens=0,
        first_ms=0.0,
        took_ms=500.0,
    )
    next_turn = msgspec.structs.replace(
        first,
        time=first.time + 3,
        request_id="b",
        goes_on_from="a",
        prompt_tokens=150,
        shared_tokens=120,
        route="return",
        first_ms=30.0,
    )
    path = tmp_path / "turns.jsonl"
    path.write_bytes(b"\n".join(map(msgspec.json.encode, (first, next_turn))) + b"\n")
    (conversation,) = read_workload("auto", path).conversations
    assert len(conversation.turns) == 2
    assert conversation.turns[1].messages[1] == Answer(0)
    assert conversation.turns[1].after == 0
    assert conversation.turns[1].wait_s == 2.5
