"""The figures of filed conversations and decisions: of what they claim to be, and judged."""

import json

import pytest

from kvloop.bench import filed
from kvloop.bench.filed import Router, Timed, filed_rows, main


def test_every_conversation_is_filed_with_a_lease_of_its_own() -> None:
    """As many turns and held leases as conversations, each found by its history."""
    router = Router(200)
    router.fill(200)
    assert len(router.lineage) == router.keeper.held == 200
    for number in range(200):
        match = router.lineage.find(router.content(number, router.history(number)), [], router.now_ns)
        assert match is not None
        assert match.depth == match.turn.depth == 5 + number % 4
        assert match.turn.lease is not None
        assert match.turn.lease.lease_id in router.keeper._entries
        assert len(match.turn.handle) == 126
    router.lineage.check_integrity()
    router.keeper.check_integrity()


def test_a_decision_is_followed_by_its_turn() -> None:
    """A turn that goes on takes the place of the one before, its lease as well, and nothing is left in the
    engines' books; costs are learned on the way."""
    router, timed = Router(50), Timed([], [], [])
    router.fill(50)
    for number in range(50):
        router.decide(number, timed)
    assert len(timed.whole) == len(timed.find) == len(timed.choose) == 50
    assert len(router.lineage) == router.keeper.held == 50
    for engine in router.fleet.engines():
        load = router.fleet.placement[engine.name]
        assert (load.running, load.queued_tokens, load.appended_tokens) == (0, 0, 0)
    router.fleet.check_integrity()
    router.lineage.check_integrity()
    router.keeper.check_integrity()


def test_the_command_judges_memory_and_decisions(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Two rows have targets; the status is that of their verdicts, and the rows are kept where one says."""
    monkeypatch.setattr(filed, "CONVERSATIONS", 20_000)
    monkeypatch.setattr(filed, "MOST_DECISION_US", 1e9)
    monkeypatch.setattr(filed, "MOST_BYTES", 1e9)
    path = tmp_path_factory.mktemp("rows") / "filed.json"
    assert main(["--quick", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["met"] for row in rows].count(True) == 2
    monkeypatch.setattr(filed, "MOST_DECISION_US", 0)
    assert [row.met for row in filed_rows(100, 10)].count(False) == 1
