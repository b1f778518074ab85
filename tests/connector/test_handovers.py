"""What decode counts of its prompts: first looks count, failed reads do not, and nothing is kept for ever."""

from kvloop.connector.handovers import MAX_PROMPTS, Handovers
from kvloop.connector.tally import Tally
from tests.connector.fakes import make_request

TOKENS = list(range(101))


def test_a_prompt_is_accounted_for_once() -> None:
    """Its own hit, what prefill handed over, and the rest; a look after a preemption changes nothing."""
    handovers = Handovers(Tally(1))
    request = make_request("r", TOKENS)
    handovers.looked(request, 32, 68)
    handovers.looked(request, 96, 0)
    handovers.ordered("r", 5)
    handovers.ended("r", failed=False)
    report = handovers.left("r")
    assert report is not None
    assert (report["prompt_tokens"], report["local_tokens"], report["returned_tokens"]) == (101, 32, 68)
    assert report["computed_tokens"] == 1
    assert handovers.left("r") is None


def test_what_did_not_come_was_computed() -> None:
    """A read that failed brought nothing."""
    handovers = Handovers(Tally(1))
    handovers.looked(make_request("r", TOKENS), 0, 101)
    handovers.ordered("r", 7)
    handovers.ended("r", failed=True)
    report = handovers.left("r")
    assert report is not None
    assert (report["returned_tokens"], report["computed_tokens"]) == (0, 101)


def test_what_is_remembered_is_bounded() -> None:
    """Prompts beyond the bound are served without an account."""
    handovers = Handovers(Tally(1))
    for number in range(MAX_PROMPTS + 1):
        handovers.looked(make_request(str(number), [1]), 0, 0)
    assert handovers.left(str(MAX_PROMPTS)) is None
    assert handovers.left("0") is not None
