"""What tests say of any workload: its prompts token by token, and what must hold of them all."""

from collections.abc import Sequence

from kvloop.bench.workload.turns import Answer, Conversation, MadeUp, Said, Workload

Token = tuple[object, ...]


def tokens_of(conversation: Conversation, number: int) -> list[Token]:
    """A prompt's tokens, each by what decides it: its stretch and place, or the answer that it is of."""
    found: list[Token] = []
    for message in conversation.turns[number].messages:
        if isinstance(message, MadeUp):
            found += [(name, at) for name, tokens in message.stretches for at in range(tokens)]
        elif isinstance(message, Answer):
            length = conversation.turns[message.turn].answer_tokens
            found += [(conversation.name, "answer", message.turn, at) for at in range(length)]
        else:
            found += [(byte,) for byte in message.text.encode()]
    return found


def common(one: Sequence[object], other: Sequence[object]) -> int:
    """How many items they begin with that are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))


def role(message: Said | MadeUp | Answer) -> str:
    """Whose message it is."""
    return "assistant" if isinstance(message, Answer) else message.role


def check(workload: Workload) -> None:
    """What holds of every workload: names differ, starts are in order, answers are there when they are
    needed, roles take turns, nothing is empty or in the past."""
    names = [one.name for one in workload.conversations]
    assert len(set(names)) == len(names)
    assert workload.conversations
    starts = [one.start_s for one in workload.conversations]
    assert starts == sorted(starts)
    assert starts[0] >= 0
    for conversation in workload.conversations:
        assert conversation.turns
        for turn in conversation.turns:
            assert turn.answer_tokens >= 1
            assert turn.wait_s >= 0
            earlier = set()
            after = turn.after
            while after is not None:
                earlier.add(after)
                after = conversation.turns[after].after
            assert {one.turn for one in turn.messages if isinstance(one, Answer)} <= earlier
            roles = [role(one) for one in turn.messages]
            roles = roles[1:] if roles[0] == "system" else roles
            assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
            for message in turn.messages:
                if isinstance(message, MadeUp):
                    assert all(tokens >= 1 for _, tokens in message.stretches)
                    assert message.stretches
