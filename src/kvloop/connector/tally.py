"""What the scheduler's thread counts as it goes: reads, and what each turn was made of."""

from collections import Counter
from typing import TYPE_CHECKING

from kvloop.connector.metrics import sample
from kvloop.connector.turn import Turn

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

KEPT = "kept"  # the one outcome of a read back that is no reason for computing instead


class Tally:
    """Counts by sample name; any thread may look. A count is there once there is something to count, and
    every label's value is one of our own words, so there are only so many of them."""

    def __init__(self, block_bytes: int) -> None:
        """`block_bytes`: what one block holds, over all workers."""
        self.block_bytes = block_bytes
        self._counts: Counter[str] = Counter()

    def read_back(self, outcome: str, blocks: int) -> None:
        """A read back into so many blocks has ended."""
        self._counts[sample("kvloop_reads_total", outcome=outcome)] += 1
        if outcome == KEPT:
            self._read("return", blocks)

    def handed_over(self, blocks: int) -> None:
        """So many blocks were read from prefill."""
        self._read("handover", blocks)

    def _read(self, direction: str, blocks: int) -> None:
        name = sample("kvloop_read_bytes_total", direction=direction)
        self._counts[name] += blocks * self.block_bytes

    def turn(self, turn: Turn) -> None:
        """A prefill turn has ended."""
        report = turn.report()
        for source in ("local", "returned", "computed"):
            self._counts[sample("kvloop_prompt_tokens_total", source=source)] += report[f"{source}_tokens"]
        if turn.reason is not None:
            self._counts[sample("kvloop_recomputed_total", reason=turn.reason)] += 1

    def counts(self) -> dict[str, int]:
        """All counts so far."""
        return dict(self._counts)


def block_bytes(kv_cache_config: "KVCacheConfig") -> int:
    """What one block holds on one worker."""
    return sum(
        len(group.layer_names) * group.kv_cache_spec.page_size_bytes
        for group in kv_cache_config.kv_cache_groups
    )
