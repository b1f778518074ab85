"""Which earlier prompt a prompt has most in common with: a radix tree over the names of blocks.

Prompts are rows of names, written as runs `(first, length)` of names that count up. An edge of the tree is a
part of a run, so that a prompt of a thousand blocks in three runs is three steps. A node stands wherever a
prompt ended or two parted ways.

Nodes are at most two a run that was put in, and a look-up takes one step a run and one for each parting
on its way.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

Run = tuple[int, int]


@dataclass(slots=True, eq=False)
class Node:
    """A place in the tree, `depth` blocks from its root. `last`: the newest prompt that goes through it,
    `ended`: the newest that ends at it. `edges`: by the name of their first block, their length and end."""

    depth: int
    last: int | None = None
    ended: int | None = None
    edges: dict[int, tuple[int, "Node"]] = field(default_factory=dict)


class Prefixes:
    """The tree, which only grows."""

    def __init__(self) -> None:
        self._root = Node(0)

    def put(self, number: int, runs: Iterable[Run]) -> tuple[Node, int | None]:
        """Add prompt `number`. Comes back: where it leaves those that were there, and the newest of them that
        ends there, or else goes through; None where it has nothing in common with any."""
        node, path = self._root, []
        parted: Node | None = None
        for first, length in joined(runs):
            while length:
                edge = node.edges.get(first)
                if edge is None:
                    parted = parted or node
                    edge = node.edges[first] = length, Node(node.depth + length)
                elif edge[0] > length:
                    edge = _split(node, first, edge, length)
                taken, node = edge
                path.append(node)
                first, length = first + taken, length - taken
        parted = parted or node
        like = None if parted is self._root else parted.last if parted.ended is None else parted.ended
        for passed in path:
            passed.last = number
        node.ended = number
        return parted, like


def joined(runs: Iterable[Run]) -> Iterator[Run]:
    """The same row of names in as few runs as there can be."""
    first = length = 0
    for next_first, next_length in runs:
        if length and next_first == first + length:
            length += next_length
        else:
            if length:
                yield first, length
            first, length = next_first, next_length
    if length:
        yield first, length


def _split(node: Node, first: int, edge: tuple[int, Node], length: int) -> tuple[int, Node]:
    whole, end = edge
    middle = Node(node.depth + length, last=end.last)
    middle.edges[first + length] = whole - length, end
    node.edges[first] = length, middle
    return length, middle
