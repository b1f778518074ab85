"""Prompts that decode gets from prefill, or computes itself: what it counts of them for the router.

The router chose a way by what it believed to be where. What decode really found in its own cache, and how
much it took over, goes back with the handle, so that the next choice is a better one.
"""

from typing import TYPE_CHECKING, Any

from kvloop.connector.tally import Tally
from kvloop.connector.turn import Turn

if TYPE_CHECKING:
    from vllm.v1.request import Request

MAX_PROMPTS = 10_000
"""Prompts that are remembered until they end; more than an engine has requests."""


class Handovers:
    """The prompts of one decode engine. For the scheduler's thread."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._turns: dict[str, Turn] = {}
        self._blocks: dict[str, int] = {}

    def looked(self, request: "Request", local_tokens: int, loaded_tokens: int) -> None:
        """vLLM found `local_tokens` itself, and was told to load so many more."""
        turn = self._turns.get(request.request_id)
        if turn is None and len(self._turns) < MAX_PROMPTS:
            prompt_tokens = request.num_prompt_tokens
            local_tokens = min(local_tokens, prompt_tokens)
            loaded_tokens = min(loaded_tokens, prompt_tokens - local_tokens)
            self._turns[request.request_id] = Turn(prompt_tokens, local_tokens, loaded_tokens)

    def ordered(self, request_id: str, blocks: int) -> None:
        """The read of so many blocks begins."""
        if len(self._blocks) < MAX_PROMPTS:
            self._blocks[request_id] = blocks

    def ended(self, request_id: str, *, failed: bool) -> None:
        """A read has ended. What did not come is computed."""
        blocks = self._blocks.pop(request_id, 0)
        if blocks and not failed:
            self._tally.handed_over(blocks)
        turn = self._turns.get(request_id)
        if turn is not None and failed:
            turn.returned_tokens = 0

    def left(self, request_id: str) -> dict[str, Any] | None:
        """The request has ended: what its prompt was made of, None if that is not known."""
        turn = self._turns.pop(request_id, None)
        return None if turn is None else turn.report()
