"""What a turn is believed to be: counted where a handle counts, estimated where not, halved where unknown."""

import pytest

from kvloop.core.belief import believed
from kvloop.core.decision import Ask
from kvloop.core.handle import LeaseRef
from kvloop.core.lineage import FiledTurn, Match, Prompt

LEASE = LeaseRef("l", "i", ("h", 1), 900, 60_000)
TURN = FiledTurn(b"{}", "d", "t", 4, 1, (), LEASE, Prompt(850, "p", 850))


def ask(match: Match | None, total: int = 1000) -> Ask:
    """Units of 100 tokens each; 40 were added behind the answer."""
    return believed(match, total, lambda units: 100 * units, lambda _: 40)


def test_a_stranger() -> None:
    """Nothing is held, and nothing can be returned."""
    assert ask(None) == Ask(1000)


def test_a_continuation() -> None:
    """All that decode holds, and what was added; the estimate of the whole does not count."""
    assert ask(Match(TURN, "content", 4)) == Ask(940, 900, "d", True, 850, "p")


def test_a_fork_or_an_edit() -> None:
    """What is before it, of both engines."""
    assert ask(Match(TURN, "content", 2)) == Ask(1000, 200, "d", True, 200, "p")


@pytest.mark.parametrize(("total", "held"), [(1000, 450), (300, 150)])
def test_found_by_its_name(total: int, held: int) -> None:
    """Half of what can be shared at most: nobody knows what is left of its history."""
    assert ask(Match(TURN, "session_id", 0), total) == Ask(total, held, "d", True, held, "p")


def test_where_answers_are_no_units() -> None:
    """A completion's prompt: the whole is estimated, and bounds what is held."""
    match = Match(TURN, "content", 4)
    assert believed(match, 1000, lambda _: 0, None) == Ask(1000, 900, "d", True, 850, "p")
    assert believed(match, 500, lambda _: 0, None) == Ask(500, 500, "d", True, 500, "p")
