"""Recorded sessions as traffic: read whole or not at all, played as recorded, the same each time."""

import gzip
import json
import os
import subprocess
import sys
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as replace_struct

from kvloop.cli import USER_ERROR_STATUS, main
from kvloop.core.life_table import Ending
from kvloop.errors import UserError
from kvloop.local.fleet_turns import RouterTurn
from kvloop.sim.fleet.people import Turn
from kvloop.sim.fleet.plan import AS_DELIVERED, MS, draw
from kvloop.sim.fleet.players import content_of, fitted, units_of
from kvloop.sim.fleet.recorded import RecordedSession, longest_tokens, read_recorded
from kvloop.sim.fleet.watch import Checker
from kvloop.sim.fleet.world import World

SEED = 2
PLAIN: dict[str, Any] = {"t": 0.0, "in": 1300, "out": 20, "stop": "tool_use", "api_time": 2.0}
SESSION: list[dict[str, Any]] = [
    PLAIN | {"hash_runs": [[1, 20]]},
    PLAIN | {"t": 5.0, "in": 1930, "stop": "end_turn", "hash_runs": [[1, 20], [100, 10]]},
    PLAIN | {"t": 65.0, "in": 2000, "out": 300, "stop": "max_tokens", "hash_runs": [[1, 12], [200, 19]]},
]


def written(path: Path, *sessions: list[dict[str, Any]]) -> Path:
    """A trace of these sessions."""
    lines = [json.dumps({"id": f"s{at}", "requests": one}) for at, one in enumerate(sessions)]
    path.write_text("\n".join(lines) + "\n")
    return path


def played(sessions: list[RecordedSession], **changes: Any) -> tuple[World, list[tuple[int, Turn]]]:
    """A run in which nothing goes wrong, and each turn that was asked, with when."""
    asked: list[tuple[int, Turn]] = []

    class Listener(Checker):
        def begin(self, world: World) -> None:
            honest = world.people._tell

            def tell(what: str, turn: Turn, data: bytes, why: str) -> None:
                if what == "asked":
                    asked.append((world.loop.now_ns, turn))
                honest(what, turn, data, why)

            world.people._tell = tell

    quiet = {"conversations": len(sessions), "leaves": 0, "hostile": 0, "model_tokens": 4000}
    plan = replace(
        AS_DELIVERED, safety_ms=200_000, prefill_blocks=1000, decode_blocks=1000, **(quiet | changes)
    )
    world = World(plan, RouterTurn, sessions=sessions, checkers=[Listener])
    outcome = world.run()
    assert outcome.held, outcome.finding
    return world, asked


def test_what_is_read_is_what_stands_there(tmp_path: Path) -> None:
    """Lengths, names of blocks, ends; gaps from an answer's end on; subagents apart."""
    agent = {"t": 7.0, "type": "subagent", "requests": [PLAIN | {"t": 8.0, "in": 70}]}
    packed = tmp_path / "trace.gz"
    packed.write_bytes(gzip.compress(written(tmp_path / "trace", [*SESSION, agent]).read_bytes()))
    first, second = read_recorded(packed)
    assert [first.name, second.name] == ["s0", "s0/3"]
    assert [turn.after_ns // MS for turn in first.turns] == [0, 3000, 58_000]
    assert [turn.prompt_tokens for turn in first.turns] == [1300, 1930, 2000]
    assert [turn.answer_tokens for turn in first.turns] == [20, 20, 300]
    assert [turn.ending for turn in first.turns] == [Ending.TOOL_CALLS, Ending.STOP, Ending.LENGTH]
    assert list(first.turns[1].blocks()) == [*range(1, 21), *range(100, 110)]
    assert list(second.turns[0].blocks()) == [1]  # no names: a plain continuation
    assert longest_tokens([first, second]) == 2300


def test_a_turn_that_began_before_the_last_one_ended_still_does(tmp_path: Path) -> None:
    """Its place is counted from that one's beginning."""
    overlapping = [PLAIN | {"api_time": 9.0}, PLAIN | {"t": 4.0}, PLAIN | {"t": 30.0}]
    sessions = read_recorded(written(tmp_path / "trace", overlapping))
    assert [(turn.overlaps, turn.after_ns // MS) for turn in sessions[0].turns] == [
        (False, 0),
        (True, 4000),
        (False, 24_000),
    ]
    _, asked = played(sessions)
    assert len(asked) == 3
    assert asked[1][0] - asked[0][0] == 4000 * MS


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ('{"id": "x", "requests": [{"t": 1, "out": 3}]}', r"\$\.requests\[0\]\.in"),
        ('{"id": "x", "requests": [{"t": 1, "in": 0, "out": 3}]}', r"\$\.requests\[0\]\.in"),
        ('{"id": "x", "requests": [{"t": 1, "in": 70}]}', r"\$\.requests\[0\]\.out"),
        ('{"id": "x", "requests": [{"in": 70, "out": 3}]}', "`t`"),
        ('{"id": "x", "requests": [{"t": -1, "in": 70, "out": 3}]}', r"\.t`"),
        ('{"id": "x", "requests": [{"t": 1, "in": "many", "out": 3}]}', r"\.in`"),
        ('{"id": "x", "requests": [{"t": 1, "in": 70, "out": 3, "hash_runs": [[1, 2]]}]}', r"\.hash_runs`"),
        ('{"id": "x", "requests": [{"t": 1, "in": 70, "out": 3, "hash_ids": [1, -1]}]}', r"\.hash_ids\[1\]`"),
        ('{"id": "x", "block_size": 16, "requests": [{"t": 1, "in": 70, "out": 3}]}', r"\.block_size`"),
        ('{"id": "x"}', "`requests`"),
        ('{"id": "x", "requests": ', "truncated"),
        ("hello", "JSON"),
    ],
)
def test_a_line_that_is_not_whole_is_named(tmp_path: Path, line: str, where: str) -> None:
    """The file, the line and the field; nothing of the file is played."""
    path = written(tmp_path / "trace", SESSION)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(UserError, match=rf"trace .*, line 2: .*{where}") as caught:
        read_recorded(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\n", b"\x1f\x8bnonsense", b"\xff\xfe"])
def test_what_is_no_trace_is_the_users_mistake(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, and status 2; also for a file that is not there."""
    path = tmp_path / "trace"
    path.write_bytes(content)
    for name in (path, tmp_path / "nothing"):
        for command in (["fleet", "--seed", "1"], ["replay", "1"]):
            assert main(["sim", *command, "--trace", str(name)]) == USER_ERROR_STATUS
            said = capsys.readouterr()
            assert said.err.count("\n") == 1
            assert str(name) in said.err
            assert not said.out


def test_turns_are_played_as_they_were_recorded(tmp_path: Path) -> None:
    """Each session once; so many tokens, such an end, and the next one so long after the answer."""
    sessions = read_recorded(written(tmp_path / "trace", SESSION, SESSION[:2]))
    world, asked = played(sessions)
    assert world.people.turns == 5
    for name in ("c1", "c2"):
        mine = [(when, turn) for when, turn in asked if turn.name.startswith(f"{name}.")]
        recorded = next(one for one in sessions if len(one.turns) == len(mine)).turns
        assert [len(turn.ask.text) for _, turn in mine] == [one.prompt_tokens for one in recorded]
        assert [len(turn.expected) // 4 for _, turn in mine] == [one.answer_tokens for one in recorded]
        assert [turn.ask.ending for _, turn in mine] == [one.ending for one in recorded]
        for (before, _), (after, _), one in zip(mine, mine[1:], recorded[1:], strict=False):
            assert 0 < after - before - one.after_ns < 2000 * MS  # what the answer took


def test_conversations_come_when_they_did(tmp_path: Path) -> None:
    """In the order of their starts, where every one's is known; else as the plan says."""
    first, second = read_recorded(written(tmp_path / "trace", SESSION[:1], SESSION[:2]))
    starts = [replace_struct(first, start_ns=7000 * MS), replace_struct(second, start_ns=2000 * MS)]
    _, asked = played(starts)
    assert [(when, len(turn.ask.text)) for when, turn in asked if turn.number == 0] == [
        (2000 * MS, 1300),
        (7000 * MS, 1300),
    ]
    _, asked = played([starts[0], second])
    assert asked[0][0] == 0


def test_one_way_keeps_nothing_and_knows_where_the_prompt_was(tmp_path: Path) -> None:
    """What comes back finds prefill's cache, on the engine that has it, and nothing of decode's."""
    sessions = read_recorded(written(tmp_path / "trace", SESSION))
    world, _ = played(sessions, returns=False, prefill=3, policy="kv")
    engines = [node.engine for node in world.around.engines.values() if node.engine is not None]
    assert world.people.returned_tokens == 0
    assert not any(engine.leases.table.held_blocks for engine in engines)
    found = [engine.counters.get("local_tokens", 0) for engine in engines[:3]]
    assert sorted(found) == [0, 0, (20 + 12) * 64]


def test_prompts_share_the_blocks_that_were_recorded_as_the_same(tmp_path: Path) -> None:
    """To the block; and what is shared, and no more, is read back where it was not computed here."""
    sessions = read_recorded(written(tmp_path / "trace", SESSION))
    world, asked = played(sessions, prefix_cache=0)
    first, second, third = (turn.ask.text.data() for _, turn in asked)
    assert first[: 20 * 256] == second[: 20 * 256]
    assert first[20 * 256 :] != second[20 * 256 : len(first)]
    assert second[: 12 * 256] == third[: 12 * 256]
    assert second[12 * 256 : 13 * 256] != third[12 * 256 : 13 * 256]
    assert first[:256] == content_of(1, 1)
    assert world.people.turns_returning == 2
    assert world.people.returned_tokens == 20 * 64 + 12 * 64


def test_sessions_do_not_share(tmp_path: Path) -> None:
    """Names of blocks are a session's own: equal ones of two sessions are other contents, and other units."""
    sessions = read_recorded(written(tmp_path / "trace", SESSION[:1], SESSION[:1]))
    world, asked = played(sessions, tenants=1)
    left, right = (turn.ask for _, turn in asked)
    assert left.text.data()[:256] != right.text.data()[:256]
    assert not set(left.units) & set(right.units)
    assert not world.people.returned_tokens


def test_units_go_on_where_prompts_do() -> None:
    """A prompt that goes on has the units of the one before, whatever became of that one's last block."""
    blocks = read_runs([[1, 25]])
    longer = read_runs([[1, 24], [90, 30]])
    before, after = list(units_of(1, blocks)), list(units_of(1, longer))
    assert len(before) == 3
    assert after[:3] == before
    assert len(after) == 6
    assert len(list(units_of(1, read_runs([[1, 2]])))) == 1


def read_runs(runs: list[list[int]]) -> "array[int]":
    """The blocks of a turn with these runs."""
    named = [name for first, length in runs for name in range(first, first + length)]
    return array("I", named)


def test_drawn_fleets_hold_what_is_played(tmp_path: Path) -> None:
    """Whatever a seed draws: every checker holds under its faults, with prompts of full length."""
    sessions = read_recorded(written(tmp_path / "trace", *[SESSION] * 3))
    faults = returned = 0
    for seed in range(8):
        plan = fitted(draw(seed), sessions)
        outcome = World(plan, RouterTurn, sessions=sessions).run()
        assert outcome.held, f"seed {seed}: {outcome.finding}"
        faults += outcome.faults
        returned += outcome.returned_tokens
    assert faults
    assert returned


def test_a_trace_and_a_seed_are_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Line by line, whatever the hash seed; a replay is that run; another seed is another."""
    path = written(tmp_path / "trace", SESSION, SESSION[:2])
    command = ["sim", "fleet", "--seed", str(SEED), "--trace", str(path)]
    outputs = set()
    for hash_seed in ("1", "2"):
        env = dict(os.environ) | {"PYTHONHASHSEED": hash_seed}
        argv = [sys.executable, "-m", "kvloop.cli", *command]
        outputs.add(subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout)
    assert main(command) == 0
    run = capsys.readouterr().out
    assert outputs == {run}
    assert main(["sim", "replay", str(SEED), "--trace", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == run.splitlines()[-1]
    assert main(["sim", "fleet", "--seed", str(SEED + 1), "--trace", str(path)]) == 0
    assert capsys.readouterr().out.split("trace ")[-1] != run.split("trace ")[-1]
