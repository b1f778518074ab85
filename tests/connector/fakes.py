"""What the scheduler half meets in vLLM, played: requests, the block pool, time; and a channel to nobody."""

import threading
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.block_pool import BlockPool

from kvloop.connector.settings import Settings
from kvloop.core.chain import Identity
from kvloop.wire.control import Message, Source

KEY = bytes(range(32))
MS = 1_000_000
S = 1_000 * MS
BLOCK = 16


class Clock:
    """Time, moved by hand. Stands for the `time` module."""

    def __init__(self) -> None:
        self.now_ns = 1_000 * S

    def monotonic_ns(self) -> int:
        """As `time.monotonic_ns`."""
        return self.now_ns


def make_settings(**changes: Any) -> Settings:
    """Settings of an engine that retains and reads."""
    plain: dict[str, Any] = {
        "role": "both",
        "key": KEY,
        "control_host": "10.0.0.1",
        "control_port": 5570,
        "recompute_threshold_tokens": 64,
        "lease_ttl_ns": 480 * S,
        "lease_term_ns": 60 * S,
        "claim_timeout_ns": 1 * S,
        "claim_term_ns": 5 * S,
        "max_retained_share": 0.9,
        "progress_delay_us": None,
        "checks_every_step": False,
    }
    return Settings(**plain | changes)


def make_request(request_id: str, tokens: list[int], **changes: Any) -> Any:
    """A request whose tokens are all computed but the last, as when its last token has just been sampled."""
    plain: dict[str, Any] = {
        "request_id": request_id,
        "prompt_token_ids": tokens,
        "all_token_ids": tokens,
        "num_prompt_tokens": len(tokens),
        "num_tokens": len(tokens),
        "num_computed_tokens": len(tokens) - 1,
        "kv_transfer_params": {},
        "mm_features": [],
        "cache_salt": None,
        "block_hashes": [],
        "declined": None,
    }
    return SimpleNamespace(**plain | changes)


class Identities:
    """Stands for `IdentityOf`: one model; the salt tells tenants apart."""

    def __call__(self, request: Any) -> Identity:
        """The request's identity."""
        return Identity("model", "", "", "", request.cache_salt or "")

    def why_not(self, request: Any) -> str | None:
        """What the test says."""
        reason: str | None = getattr(request, "declined", None)
        return reason


IDENTITIES: Any = Identities()


def make_source(request_id: str) -> Source:
    """Where decode's blocks are read."""
    return Source("decode-0", request_id or "none", "10.0.0.1", 5600, 1, 1, 1)


class Pool(BlockPool):
    """vLLM's block pool with so many blocks beside its null block; only its own thread may use it."""

    def __init__(self, size: int, caching: bool = True) -> None:
        super().__init__(size + 1, caching, BLOCK)
        self._thread = threading.current_thread()

    def touch(self, blocks: Any) -> None:
        """One reference more to each."""
        self._check_thread()
        super().touch(blocks)

    def free_blocks(self, ordered_blocks: Any) -> None:
        """One reference less to each."""
        self._check_thread()
        super().free_blocks(ordered_blocks)
        assert all(block.ref_cnt >= 0 for block in self.blocks), "a block is freed twice"

    def unpin_blocks(self, blocks: Any, on_reuse: Any) -> None:
        """One reference less to each, to be handed out last."""
        self._check_thread()
        super().unpin_blocks(blocks, on_reuse)

    def get_num_free_blocks(self) -> int:
        """Blocks that nobody has a reference to."""
        self._check_thread()
        return super().get_num_free_blocks()

    def allocate(self, count: int) -> list[int]:
        """`count` free blocks, referenced once; an empty list where there are not so many."""
        if count > self.get_num_free_blocks():
            return []
        return [block.block_id for block in self.get_new_blocks(count)]

    def free(self, numbers: Iterable[int]) -> None:
        """Free by number."""
        self.free_blocks([self.blocks[number] for number in numbers])

    def held(self) -> int:
        """All references."""
        return sum(block.ref_cnt for block in self.blocks if not block.is_null)

    def _check_thread(self) -> None:
        assert threading.current_thread() is self._thread, "the pool belongs to the scheduler's thread"


class Channel:
    """Stands for the control channel: what would be sent, and whether it can be."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, Message, Any]] = []
        self.works = True

    def send(self, address: Any, message: Message, tag: object = None) -> bool:
        """As `ControlChannel.send`."""
        if self.works:
            self.sent.append((address, message, tag))
        return self.works

    def take(self) -> list[tuple[Any, Message, Any]]:
        """What was sent since the last call."""
        sent, self.sent = self.sent, []
        return sent
