"""A decode engine's block pool, for a replay: blocks by content, and which of them can be handed out.

It behaves as vLLM's prefix cache does where it matters here: a block that nobody references is free and stays
what it is until it is handed out again, and the one that has been free for longest goes first.
"""

from collections import OrderedDict
from collections.abc import Sequence


class Pool:
    """Blocks by content. `handed_out` counts how often a content has been written anew."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.references: dict[int, int] = {}
        self.free: OrderedDict[int, None] = OrderedDict()  # longest free first
        self.handed_out: dict[int, int] = {}

    def missing(self, contents: Sequence[int]) -> int:
        """How many of `contents`, each there once, would have to be written."""
        return sum(content not in self.references and content not in self.free for content in contents)

    def room(self) -> int:
        """Blocks that can be handed out, empty ones among them."""
        return self.blocks - len(self.references)

    def take(self, contents: Sequence[int]) -> None:
        """Take a reference to a block of each content, writing it where it is not there."""
        for content in contents:
            if content in self.references:
                self.references[content] += 1
                continue
            if content in self.free:
                del self.free[content]
            else:
                if len(self.references) + len(self.free) >= self.blocks and self.free:
                    self.free.popitem(last=False)
                self.handed_out[content] = self.handed_out.get(content, 0) + 1
            self.references[content] = 1

    def give_back(self, contents: Sequence[int]) -> None:
        """Return a reference to each."""
        for content in reversed(contents):
            self.references[content] -= 1
            if not self.references[content]:
                del self.references[content]
                self.free[content] = None

    def proof(self, content: int) -> int:
        """What an ended lease remembers of a block."""
        return self.handed_out[content]

    def unchanged(self, content: int, proof: object) -> bool:
        """Whether the block is still the one that it was."""
        return self.handed_out[content] == proof and (content in self.references or content in self.free)
