"""Second turns of given lengths."""

import pytest

from kvloop.bench.workload.by_length import by_length
from kvloop.bench.workload.turns import planned_tokens
from kvloop.errors import UserError


def test_second_turns_are_as_long_as_asked_for() -> None:
    """Each size so often, in turns, with nothing in common between conversations."""
    workload = by_length([570, 4000], 3)
    lengths = [planned_tokens(one, 1) for one in workload.conversations]
    assert lengths == [570, 4000] * 3
    firsts = {one.turns[0].messages for one in workload.conversations}
    assert len(firsts) == 6
    assert [planned_tokens(one, 0) for one in workload.conversations[:2]] == [570 - 131, 4000 - 131]


def test_more_are_of_the_shortest() -> None:
    """They come last, and warm up."""
    workload = by_length([4000, 570], 1, answer_tokens=10, new_tokens=20, more=2)
    assert [planned_tokens(one, 1) for one in workload.conversations] == [4000, 570, 570, 570]


@pytest.mark.parametrize("sizes", [[], [131], [0], [-1], [10**9]])
def test_a_size_without_a_first_turn_is_refused(sizes: list[int]) -> None:
    """With the flag's name."""
    with pytest.raises(UserError, match="--prompt-tokens"):
        by_length(sizes, 1)
