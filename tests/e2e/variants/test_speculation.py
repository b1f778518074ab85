"""Drafted tokens on decode: KV of rejected ones lies behind what a lease holds, and is never read back."""

from tests.e2e.test_histories import assistant, check, opening, user
from tests.e2e.turns import Pair, counted

LONG = 32
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"


def test_drafted_turns_return(pair: Pair) -> None:
    """Answers of a few words in changing order, in which some drafts are right and some are wrong: exact,
    and read back to the token over several turns."""
    messages = opening("drafts")
    words = pair.oracle(messages)[:3]
    drafted, accepted = counted(pair.decode, DRAFTED), counted(pair.decode, ACCEPTED)
    turn = pair.turn(messages, max_tokens=LONG, allowed_token_ids=words)
    check(pair, turn, messages, max_tokens=LONG, allowed_token_ids=words)
    for question in ("And?", "And then?"):
        held = turn.account["prompt_tokens"] + len(turn.tokens) - 1
        messages = [*messages, assistant(turn.text), user(question)]
        turn = pair.turn(messages, turn.filed, max_tokens=LONG, allowed_token_ids=words)
        check(pair, turn, messages, max_tokens=LONG, allowed_token_ids=words)
        assert turn.returned == held
    drafted, accepted = counted(pair.decode, DRAFTED) - drafted, counted(pair.decode, ACCEPTED) - accepted
    assert 0 < accepted < drafted, "no draft was right, or none was wrong: the test shows nothing"
