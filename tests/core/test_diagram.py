"""The state diagrams in docs/protocol.md are the transition tables, line for line."""

from pathlib import Path

import pytest

from kvloop.core import claim_state, keeper_state, lease_state
from kvloop.core.diagram import state_diagram

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
DIAGRAMS = {
    "lease": state_diagram(lease_state.TRANSITIONS, lease_state.INITIAL, lease_state.FINAL),
    "kept": state_diagram(keeper_state.TRANSITIONS, keeper_state.INITIAL, keeper_state.FINAL),
    "read": state_diagram(claim_state.TRANSITIONS, claim_state.INITIAL, claim_state.FINAL),
}


@pytest.mark.parametrize("machine", DIAGRAMS)
def test_the_page_shows_the_table(machine: str) -> None:
    """To mend it, paste what this test expects over the block in the page."""
    assert f"```mermaid\n{DIAGRAMS[machine]}\n```" in PAGE, f"docs/protocol.md wants:\n{DIAGRAMS[machine]}"


def test_a_missing_move_is_missed() -> None:
    """A table with one move less draws another diagram: the comparison is not vacuous."""
    fewer = dict(list(lease_state.TRANSITIONS.items())[1:])
    assert state_diagram(fewer, lease_state.INITIAL, lease_state.FINAL) != DIAGRAMS["lease"]


@pytest.mark.parametrize("reason", [*lease_state.RefusalReason, *claim_state.RecomputeReason])
def test_the_page_lists_every_reason(reason: str) -> None:
    """An operator who sees a reason in a metric finds it explained."""
    assert f"`{reason}`" in PAGE
