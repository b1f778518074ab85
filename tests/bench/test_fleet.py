"""The figures of fleets: counted right, and shown whole."""

import gc
import xml.etree.ElementTree as ET

import pytest

from kvloop.bench import fleet_growth
from kvloop.bench.fleet import growth_rows, main, million_rows, speed_rows
from kvloop.bench.fleet_growth import HEADER, as_plot, measure, plan_of, run_through, state_bytes, table_line
from kvloop.local.fleet_turns import RouterTurn
from kvloop.sim.fleet.world import World

SVG = "{http://www.w3.org/2000/svg}"


def test_every_conversation_is_alive_when_the_last_has_come() -> None:
    """Nearly: some have only one turn to come back for, and a few come back early."""
    memory, _ = million_rows(500)
    assert "500 conversations, " in memory.detail
    alive = int(memory.detail.split(", ")[1].split()[0])
    assert 450 <= alive <= 600
    assert memory.met


def test_a_run_leaves_no_cycles() -> None:
    """What the benchmark switches Python's collector off for."""
    world = World(plan_of(4, 20), RouterTurn, checkers=(), traced=False)
    gc.collect()
    gc.disable()
    try:
        run_through(world)
        assert world.people.turns >= 20
        assert gc.collect() < world.people.turns
    finally:
        gc.enable()


def test_a_router_in_front_of_more_engines_knows_as_much() -> None:
    """State grows with the turns, not with the engines; and every column is in the table and the plot."""
    sizes = [measure(4), measure(40)]
    assert [size.engines for size in sizes] == [4, 40]
    assert all(size.turns >= size.conversations > 0 for size in sizes)
    small, large = (size.state_bytes / size.turns for size in sizes)
    assert large < 2 * small
    columns = {line.count("|") for line in (*HEADER.splitlines(), *map(table_line, sizes))}
    assert columns == {11}
    drawn = ET.fromstring(as_plot(sizes))
    assert len(drawn.findall(f".//{SVG}polyline")) == 4
    assert len(growth_rows(sizes)) == 4


def test_state_is_counted_with_what_it_leads_to() -> None:
    """After turns a router's tables are larger than before, by kilobytes for each."""
    world = World(plan_of(4, 20), RouterTurn, checkers=(), traced=False)
    before = state_bytes(world.routers[0])
    run_through(world)
    assert state_bytes(world.routers[0]) > before + 500 * world.people.turns


def test_turns_are_counted_over_several_rounds() -> None:
    """One row, with the spread of the rounds beside the fastest."""
    (row,) = speed_rows(10)
    assert row.figure > 0
    assert "5 samples" in row.detail


def test_the_command_writes_a_plot(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside its tables; the status is 0 where what a turn costs has not grown with the fleet."""
    monkeypatch.setattr(fleet_growth, "SIZES", (2, 4))
    path = tmp_path_factory.mktemp("plots") / "growth.svg"
    assert main(["--only", "growth", "--plot", str(path)]) == 0
    assert path.read_text().startswith("<svg")
