"""What two prompts have in common, for recordings that name their blocks and not what is in them.

Names say of whole blocks that they are the same. What follows the last whole block of a prompt has no name,
or one of its own that nothing else can have. So where a prompt has all whole blocks of an earlier one and
goes on, it is taken to go on from that one's very end; and if it is long enough for the answer and more, to
have the answer in it. Of several that go on from one turn and differ, the first has the answer."""

from collections.abc import Iterable
from dataclasses import dataclass

from kvloop.bench.workload.prefixes import Node, Prefixes, Run


@dataclass(frozen=True, slots=True)
class Blocks:
    """A prompt: its length, and the names of its whole blocks, as runs. `tail` names the part of a block
    after them, where it has a name. `answer_tokens`: what came back."""

    prompt_tokens: int
    answer_tokens: int
    runs: tuple[Run, ...]
    tail: int | None = None

    @property
    def whole(self) -> int:
        """How many whole blocks have names."""
        return sum(length for _, length in self.runs)


@dataclass(frozen=True, slots=True)
class Found:
    """The earlier prompt that one has most in common with: `depth` blocks, up to `node`."""

    like: int
    depth: int
    node: Node


class InCommon:
    """Prompts in order. Each is found in those before it; then told where it goes on."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._prefixes = Prefixes()
        self._prompts: list[Blocks] = []
        self._gone_on: set[int] = set()

    def put(self, prompt: Blocks) -> Found | None:
        """Add one; what it has most in common with. None for nothing."""
        node, like = self._prefixes.put(len(self._prompts), prompt.runs)
        self._prompts.append(prompt)
        return None if like is None else Found(like, node.depth, node)

    def shared_tokens(self, number: int, found: Found, is_answered: bool = True) -> int:
        """How many tokens prompt `number` has in common with the one found, and with its answer. To be asked
        once for each, in order. `is_answered`: whether there was an answer by then."""
        prompt, before = self._prompts[number], self._prompts[found.like]
        blocks = found.depth * self._block_tokens
        if found.depth < before.prompt_tokens // self._block_tokens or self._differs(prompt, before):
            return blocks
        with_answer = before.prompt_tokens + before.answer_tokens
        if is_answered and prompt.prompt_tokens > with_answer and found.like not in self._gone_on:
            self._gone_on.add(found.like)
            return with_answer
        return min(before.prompt_tokens, prompt.prompt_tokens)

    def _differs(self, prompt: Blocks, before: Blocks) -> bool:
        """Whether both end in a named part of the same block, under two names."""
        known = prompt.tail is not None and before.tail is not None
        return known and prompt.whole == before.whole and prompt.tail != before.tail


def runs_of(names: Iterable[int]) -> tuple[Run, ...]:
    """Names one by one, as runs."""
    runs: list[Run] = []
    for name in names:
        if runs and name == runs[-1][0] + runs[-1][1]:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((name, 1))
    return tuple(runs)
