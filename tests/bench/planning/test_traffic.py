"""What is read of a recording, how much of it is played, and what is said of the rest."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvloop.bench.planning.arrangement import kvloop, one_way, upstream
from kvloop.bench.planning.extrapolation import extrapolated
from kvloop.bench.planning.settings import extra_config, lines, router_flags
from kvloop.bench.planning.traffic import Asked, read_traffic
from kvloop.bench.trace import DEFAULT_TRACE
from kvloop.errors import UserError
from kvloop.sim.fleet.recorded import RecordedSession
from kvloop.sim.profile import load_profile
from tests.bench.planning.small import came, traffic_of, turn
from tests.bench.planning.test_plan_command import log_of

NAME = "qwen3-32b-h200"
PROFILE = load_profile(NAME)


def said(**changes: Any) -> str:
    """Everything that is extrapolated of such traffic."""
    traffic = replace(traffic_of(RecordedSession("a", (turn(20), turn(30, 5)))), **changes)
    return "\n".join(extrapolated(traffic, PROFILE, NAME, [came(1.0)]))


def test_recorded_starts_are_kept(tmp_path: Path) -> None:
    """As they were; and moved together where conversations are left out, so that the rate stays."""
    log = log_of(tmp_path / "turns.jsonl", 8)
    whole = read_traffic(Asked(log, "auto"))
    assert [one.start_ns for one in whole.sessions] == [at * 60 * 10**9 for at in range(8)]
    half = read_traffic(Asked(log, "auto", conversations=4))
    assert [one.start_ns for one in half.sessions] == [at * 60 * 10**9 for at in range(4)]
    assert whole.per_hour == half.per_hour == pytest.approx(60)
    assert (half.recorded, half.recorded_turns, half.turns) == (8, 32, 16)


def test_a_rate_takes_the_place_of_starts(tmp_path: Path) -> None:
    """Then they are drawn."""
    traffic = read_traffic(Asked(log_of(tmp_path / "turns.jsonl"), "auto", per_hour=7))
    assert (traffic.per_hour, traffic.has_starts) == (7, False)
    assert {one.start_ns for one in traffic.sessions} == {None}


def test_of_a_long_recording_a_part_is_played() -> None:
    """Evenly taken, the same each time; a quick plan takes an eighth of it."""
    asked = Asked(DEFAULT_TRACE, "auto", scale=8)
    traffic, quick = read_traffic(asked), read_traffic(replace(asked, is_quick=True))
    assert 0 < len(quick.sessions) < len(traffic.sessions) < traffic.recorded
    assert read_traffic(asked) == traffic
    assert not traffic.has_starts
    assert traffic.per_hour == traffic.recorded


def test_what_was_not_recorded_or_measured_is_said() -> None:
    """Each only where it is so."""
    assert "computed again in every way" in said()
    assert "conversations were played" not in said()
    assert "1 of 10 conversations were played (2 of 90 turns)" in said(recorded=10, recorded_turns=90)
    assert "less than a TTL of 480 s" in said(has_starts=True, span_s=100.0)
    assert "TTL" not in said(has_starts=True, span_s=1000.0)
    assert "every turn comes as soon as it can" in said(has_gaps=False)
    assert "four make a token" in said(estimates_lengths=True)
    assert "begin at random, 60 an hour, which was not recorded" in said()
    assert "begin at random" not in said(has_starts=True)
    asked = Asked(Path("none"), "auto", scale=4, max_prompt_tokens=9000, per_hour=60)
    assert "divided by 4" in said(asked=asked)
    assert "more than 9,000 tokens" in said(asked=asked)
    assert "60 an hour, as you said" in said(asked=asked)


def test_what_the_profile_does_not_know_is_said() -> None:
    """Prompts beyond those that it was fitted at, its caveat, and what an engine has room for."""
    assert "longer than" not in said()
    long = (RecordedSession("a", (turn(20), turn(400, 5))),)
    assert "1 of 2 prompts (50 %) are longer than 24,000 tokens" in said(sessions=long)
    assert f"the profile {NAME} is {PROFILE.caveat}" in said()
    unknown = msgspec.structs.replace(PROFILE, fitted_tokens=0, caveat="", kv_token_bytes=0)
    of_unknown = "\n".join(extrapolated(traffic_of(*long), unknown, "mine", [came(1.0)]))
    assert "does not say up to which prompts" in of_unknown
    assert "memory is in tokens only" in of_unknown
    small = msgspec.structs.replace(
        PROFILE, limits=msgspec.structs.replace(PROFILE.limits, blocks=2048, model_tokens=30_000)
    )
    assert "holds 32,768 tokens, 1.3 times the longest" in "\n".join(
        extrapolated(traffic_of(*long), small, "small", [came(1.0)])
    )


def test_runs_that_did_not_keep_up_are_named() -> None:
    """With how far they came; and that upstream gave way, which it would not."""
    runs = [
        came(None, arrangement=one_way(1, 3), is_through=False),
        replace(came(1.0, arrangement=upstream(1, 1)), reclaimed=3),
    ]
    told = "\n".join(extrapolated(traffic_of(RecordedSession("a", (turn(20),))), PROFILE, NAME, runs))
    assert "one-way, 1:3, does not keep up" in told
    assert "its own are pinned" in told


def test_settings_are_written_as_they_are_read() -> None:
    """Only what is not the default; what engines have to keep as long as the router renews."""
    chosen = replace(kvloop(1, 3), threshold_tokens=256, ttl_s=120)
    assert extra_config(chosen) == {"kv_recompute_threshold": 256, "decoder_kv_blocks_ttl": 120}
    assert router_flags(chosen) == ["--lease-policy", "fixed", "--retention-s", "120"]
    config = next(line for line in lines(chosen) if "config" in line).split(maxsplit=1)[1]
    assert json.loads("{" + config + "}") == {"kv_connector_extra_config": extra_config(chosen)}
    assert (extra_config(kvloop(1, 1)), router_flags(kvloop(1, 1))) == ({}, [])
    with pytest.raises(UserError, match="from a recording"):
        read_traffic(Asked(DEFAULT_TRACE, "agent"))
