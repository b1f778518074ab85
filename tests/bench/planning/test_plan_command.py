"""`kvloop plan` as it is typed: what it prints, what it writes, and what it refuses in one line."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvloop.bench.planning.arrangement import Arrangement
from kvloop.bench.planning.run import Came, Runs
from kvloop.cli import main
from kvloop.router.turn_log import LoggedTurn

PROFILE = ("--profile", "qwen3-32b-h200")
BASE: dict[str, Any] = {"model": "m", "tenant": "", "ending": "tool_calls", "route": "recompute"}


def logged(
    conversation: int, number: int, tokens: int, *, start_s: float, shared: int = 0, took_ms: float = 2000
) -> LoggedTurn:
    """A line as a router writes it."""
    return LoggedTurn(
        time=1_800_000_000 + start_s,
        request_id=f"r{conversation}.{number}",
        conversation=f"c{conversation}",
        goes_on_from=f"r{conversation}.{number - 1}" if number else None,
        prompt_tokens=tokens,
        shared_tokens=shared,
        answer_tokens=40,
        reused_tokens=0,
        first_ms=500,
        took_ms=took_ms,
        **BASE,
    )


def log_of(path: Path, conversations: int = 3) -> Path:
    """Conversations of four turns, a minute apart, each 700 tokens longer than the one before."""
    lines = [
        logged(
            at, turn, 1000 + 700 * turn, start_s=60 * at + 10 * turn, shared=340 + 700 * turn if turn else 0
        )
        for at in range(conversations)
        for turn in range(4)
    ]
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return path


def planned(path: Path, *words: str) -> dict[str, Any]:
    """The plan as JSON, of a command that succeeds."""
    out = path.parent / "plan.json"
    assert main(["plan", "--trace", str(path), *PROFILE, "--json", str(out), *words]) == 0
    plan: dict[str, Any] = json.loads(out.read_text())
    return plan


def test_a_routers_log_is_planned_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every turn is played under each way; what is printed is what was written."""
    plan = planned(log_of(tmp_path / "turns.jsonl"))
    assert plan["workload"] == "turn-log"
    assert plan["turns"] == {"played": 12, "recorded": 12}
    assert plan["conversations_per_hour"] == pytest.approx(60)
    one_way, upstream, kvloop = plan["runs"][:3]
    assert [one["name"] for one in (one_way, upstream, kvloop)] == ["one-way", "upstream", "kvloop"]
    for one in plan["runs"]:
        parts = ("returned", "found_at_decode", "prefill_cached", "prefill_computed", "decode_computed")
        assert sum(one[f"{part}_tokens"] for part in parts) == one["prompt_tokens"] == 12 * 2050
        assert one["keeps_up"]
    assert one_way["returned_tokens"] == one_way["held_tokens_most"] == one_way["prefill_load_saved"] == 0
    assert kvloop["appended_turns"] > 0
    assert kvloop["prefill_load_saved"] > 0
    assert upstream["held_tokens_mean"] > kvloop["held_tokens_mean"] > 0
    text = capsys.readouterr().out
    for figure in (f"{kvloop['ttft_ms']['p90']:,.0f} ms", f"{one_way['prefill_computed_tokens']:,}"):
        assert figure in text
    for reason in (*plan["reasons"].values(), *plan["extrapolated"]):
        assert " ".join(reason.split()) in " ".join(text.split())


def test_settings_are_what_an_operator_types(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The ratio that was given among them, for which there is no reason to say."""
    plan = planned(log_of(tmp_path / "turns.jsonl"), "--prefill", "1", "--decode", "2")
    assert (plan["settings"]["prefill"], plan["settings"]["decode"]) == (1, 2)
    assert "engines              1 prefill, 2 decode" in capsys.readouterr().out
    assert {"prefill:decode"}.isdisjoint(plan["reasons"])


def test_prefills_cache_can_be_switched_off(tmp_path: Path) -> None:
    """Then nothing is found in it."""
    plan = planned(log_of(tmp_path / "turns.jsonl"), "--prefill-cache", "off", "--quick")
    assert not any(one["prefill_cached_tokens"] for one in plan["runs"])
    assert plan["runs"][0]["reused_share"] == 0


def test_a_single_turn_is_traffic(tmp_path: Path) -> None:
    """Of which nothing is reused."""
    path = tmp_path / "turns.jsonl"
    path.write_bytes(msgspec.json.encode(logged(0, 0, 1000, start_s=0)))
    plan = planned(path)
    assert plan["turns"]["played"] == 1
    assert {one["reused_share"] for one in plan["runs"]} == {0}


def test_other_ratios_are_compared_with_one_way_of_as_many(tmp_path: Path) -> None:
    """Each run's load saved is against one-way with the same engines, or is not said."""
    plan = planned(log_of(tmp_path / "turns.jsonl"), "--engines", "3", "--quick")
    ratios = {(one["prefill"], one["decode"]) for one in plan["runs"] if one["way"] == "one-way"}
    for one in plan["runs"]:
        assert (one["prefill_load_saved"] is not None) is ((one["prefill"], one["decode"]) in ratios)
    assert plan["settings"]["prefill"] + plan["settings"]["decode"] == 3


def test_an_interrupted_plan_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says how far it came, and nothing that looks like one."""

    def interrupt(_: Runs, __: Arrangement) -> Came:
        raise KeyboardInterrupt

    monkeypatch.setattr(Runs, "play", interrupt)
    assert main(["plan", "--trace", str(log_of(tmp_path / "turns.jsonl")), *PROFILE]) == 130
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.endswith("interrupted after 0 runs: there is no plan yet\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--trace", "{none}"], "No such file"),
        (["--trace", "{empty}"], "there is nothing in it"),
        (["--trace", "{odd}"], "its format is none of"),
        (["--trace", "{broken}"], "broken, line 2"),
        ([], "--trace FILE says which traffic"),
        (["--trace", "{log}", "--profile", "h300"], "there is no profile 'h300'"),
        (["--trace", "{log}", "--engines", "1"], "--engines must be from 2 to 64, not 1"),
        (["--trace", "{log}", "--prefill", "0", "--decode", "1"], "--prefill must be from 1 to 64, not 0"),
        (["--trace", "{log}", "--prefill", "2"], "--prefill and --decode go together"),
        (["--trace", "{log}", "--engines", "4", "--decode", "1"], "--engines leaves the ratio open"),
        (["--trace", "{log}", "--scale", "nan"], "a scale of nan is out of range"),
        (["--trace", "{log}", "--conversations", "0"], "--conversations 0 is no traffic"),
        (["--trace", "{log}", "--conversations-per-hour", "-1"], "-1 is out of range"),
        (["--trace", "{log}", "--conversations-per-hour", "nan"], "nan is out of range"),
        (["--trace", "{log}", "--conversations-per-hour", "1e-300"], "1e-300 is out of range"),
        (["--trace", "{log}", "--max-prompt-tokens", "5"], "none is left"),
        (["--trace", "{long}"], "an engine of qwen3-32b-h200 takes 32,768"),
        (["--trace", "{log}", "--quick", "--json", "{none}/plan"], "No such file"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2, before anything is played; but for a file that cannot be written, where it is printed."""
    files = {name: tmp_path / name for name in ("none", "empty", "odd", "broken", "log", "long")}
    files["empty"].write_text("\n")
    files["odd"].write_text('{"a": 1}\n')
    log_of(files["log"])
    files["broken"].write_bytes(files["log"].read_bytes().splitlines()[0] + b"\n{\n")
    files["long"].write_bytes(msgspec.json.encode(logged(0, 0, 40_000, start_s=0)))
    words = [word.format(**files) for word in words]
    assert main(["plan", *PROFILE, *words]) == 2
    error = capsys.readouterr().err.splitlines()
    assert said in error[-1]
    assert error[-1].startswith("kvloop plan: ")
    assert len(error) == 1 or "--json" in words
