"""What can be said of legs' answers to the same turns."""

from kvloop.bench.load.agree import compared
from kvloop.bench.workload.turns import Answer, Conversation, Said, Turn

LEGS = ("kvloop", "one-way", "upstream")
Q = Said("user", "q")
LINE = Conversation("x", (Turn((Q,), 1), Turn((Q, Answer(0), Q), 1, 0), Turn((Q,), 1, 1)))


def answers(**legs: str) -> dict[tuple[str, int], str]:
    """Texts by leg, one letter for each turn; `-` for no answer."""
    return {
        (leg.replace("_", "-"), turn): letter
        for leg, letters in legs.items()
        for turn, letter in enumerate(letters)
        if letter != "-"
    }


def test_equal_answers_agree() -> None:
    """Every leg, every turn."""
    found = compared(LINE, answers(kvloop="abc", one_way="abc", upstream="abc"), LEGS)
    assert len(found) == 9
    assert all(found.values())


def test_another_answer_is_a_mismatch_of_who_reuses() -> None:
    """The reference is who reuses nothing, wherever it stands in the list."""
    found = compared(LINE, answers(kvloop="aXc", one_way="abc", upstream="abc"), LEGS)
    assert [leg for (leg, turn), agrees in found.items() if not agrees] == ["kvloop"]


def test_what_follows_a_mismatch_is_not_judged() -> None:
    """Its prompt is another one. A turn that does not resend the answer is judged."""
    found = compared(LINE, answers(kvloop="Xbc", one_way="abc", upstream="abc"), LEGS)
    assert ("kvloop", 1) not in found
    assert found["upstream", 1]
    assert found["kvloop", 2]


def test_a_leg_without_an_answer_says_nothing() -> None:
    """Neither does one that is alone."""
    found = compared(LINE, answers(kvloop="a--", one_way="--c", upstream="---"), LEGS)
    assert not found
    found = compared(LINE, answers(kvloop="ab-", one_way="a--", upstream="ab-"), LEGS)
    assert found["upstream", 1]
    assert ("one-way", 1) not in found
