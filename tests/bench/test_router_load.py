"""What is read of the C clients and of /proc, which routers are to be had, and a real run of kvloop alone."""

import json
from pathlib import Path

import pytest

from kvloop.bench import router_peers
from kvloop.bench.peers import KVLOOP, NAMES, SMG, VLLM_ROUTER, Places, cache_folder, commands
from kvloop.bench.router_load import (
    PAGE_KIB,
    STAMP,
    TICKS_PER_S,
    Load,
    LoadError,
    chat_body,
    compiler,
    sample_of,
    used_of,
)

REPORT = (
    '{"clients":16,"seconds":2.0,"requests":100,"errors":0,"events":3300,"late":1,"behind_ms":2.5,'
    '"p50_ms":0.5,"p99_ms":0.9,"first_p50_ms":0.4,"connections":16}'
)
needs_compiler = pytest.mark.skipif(compiler() is None, reason="there is no C compiler")


def stat(pid: int, name: str, group: int, ticks: int, pages: int) -> str:
    """A line of /proc/PID/stat: fields 5, 14, 15 and 24 are the ones that count."""
    fields = ["S", "1", str(group), *["0"] * 8, str(ticks), "1", *["0"] * 8, str(pages), "0"]
    return f"{pid} ({name}) {' '.join(fields)}\n"


def test_a_report_becomes_a_sample() -> None:
    """The clients' line and what the router used are put together."""
    sample = sample_of(REPORT, 0.25, 1000, (120, 118))
    assert (sample.requests, sample.events, sample.late, sample.cpu_s) == (100, 3300, 1, 0.25)
    assert sample.hops == (120, 118)
    assert sample.beyond(400).rss_kib == 600


def test_what_does_not_count() -> None:
    """Broken answers make no sample, nor does a router that leaves prefill out."""
    with pytest.raises(LoadError, match="3 answers"):
        sample_of(REPORT.replace('"errors":0', '"errors":3'), 0.25, 1000, (100, 100))
    with pytest.raises(LoadError, match="prefill was asked 50 times"):
        sample_of(REPORT, 0.25, 1000, (50, 100))


def test_what_a_router_used() -> None:
    """All processes of a group count, whatever their names look like, and no others."""
    lines = [stat(7, "smg", 7, 99, 10), stat(8, "a) b (c", 7, 49, 5), stat(9, "else", 9, 1000, 1000)]
    assert used_of(lines, 7) == (150 / TICKS_PER_S, 15 * PAGE_KIB)


@pytest.mark.parametrize("size_bytes", [2048, 65536])
def test_bodies(size_bytes: int) -> None:
    """A body has about its size, one place for the request's number, and what the fake engine looks for."""
    body = chat_body(Load(1, size_bytes, stream=True, tokens=9, interval_us=50))
    assert body.count(STAMP.encode()) == 1
    assert size_bytes < len(body) < size_bytes + 300
    assert json.loads(body)["max_tokens"] == 9
    assert json.loads(body)["seed"] == 50


def test_peers_that_are_there_and_not(tmp_path: Path) -> None:
    """A router is found, or installed, or there is a reason; kvloop needs neither."""
    program = tmp_path / "bin" / "vllm-router"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    asked: list[tuple[str, ...]] = []

    def refuse(_: Path, needs: tuple[str, ...]) -> str:
        asked.append(needs)
        return "no such package"

    found, failures = commands(tmp_path, NAMES, refuse)
    assert [*found] == [KVLOOP, VLLM_ROUTER]
    assert failures == [f"{SMG}: no such package"]
    assert len(asked) == 1
    places = Places("http://p", "http://d", 1, 2, 3, tmp_path)
    assert found[VLLM_ROUTER](places)[0] == str(program)
    assert {"--prefill", "http://p", "--decode", "http://d"} <= {*found[KVLOOP](places)}


def test_an_install_without_the_program(tmp_path: Path) -> None:
    """A package that brings no program of the name is a reason, too."""
    assert commands(tmp_path, (SMG,), lambda *_: None) == ({}, [f"{SMG}: it has no program smg"])


def test_the_cache(tmp_path: Path) -> None:
    """The peers' environment is where the user wants caches."""
    assert cache_folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "kvloop" / "bench-router"


@needs_compiler
def test_a_real_run_of_kvloop_alone(tmp_path: Path) -> None:
    """Every case runs against the C engines, every turn through both; ratios stay open without the others."""
    told = tmp_path / "rows.json"
    status = router_peers.main(
        ["--quick", "--rounds", "1", "--routers", KVLOOP, "--peers", str(tmp_path), "--json", str(told)]
    )
    facts = json.loads(told.read_text())
    assert status == 1  # no ratio without another router
    assert facts["failures"] == []
    assert len(facts["samples"]) == 8
    for case, by_router in facts["samples"].items():
        (sample,) = by_router[KVLOOP]
        assert sample["requests"] + sample["events"] > 0 or "idle" in case
        assert min(sample["hops"]) > 0, case
