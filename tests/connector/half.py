"""The scheduler half without NIXL, network or engine: alone, and in vLLM's real scheduler."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler

from kvloop.connector import scheduler as module
from kvloop.connector.connector import KvloopConnector
from kvloop.connector.scheduler import KvloopScheduler
from tests.connector.fakes import BLOCK, IDENTITIES, Channel, make_settings
from tests.connector.real_scheduler import Engine, make_scheduler


def _construct(self: Any, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
    """NIXL's part, without its listener."""
    self.vllm_config, self.engine_id, self.kv_cache_config = vllm_config, engine_id, kv_cache_config
    self.block_size, self.transfer_tp_size = BLOCK, 1
    self.side_channel_host, self.side_channel_port = "10.0.0.1", 5600
    self.is_bidirectional_kv_xfer_enabled = self.use_host_buffer = self._is_hma_required = False
    self._has_mamba = self._bounded_replay = False
    self._kv_lease_duration = self._heartbeat_interval = 30
    self._reqs_need_recv, self._reqs_need_save, self._reqs_need_send = {}, {}, {}
    self._reqs_in_batch, self._reqs_not_processed = set(), set()
    self._heartbeat_by_engine, self._heartbeat_req_engine, self._last_heartbeat_time = {}, {}, 0.0


class SilentChannel(Channel):
    """A control channel that nobody is on."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def start(self) -> None:
        """Nobody listens."""

    stop = start

    def frames_dropped(self) -> dict[str, int]:
        """None came."""
        return {}


def make_half(parallel: Any = None, groups: int = 1, **settings: Any) -> Any:
    """A scheduler half that is bound to nothing yet."""
    sizes = ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size")
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(**dict.fromkeys(sizes, 1) | (parallel or {})),
        num_prefill_lookahead_tokens=0,
    )
    group = SimpleNamespace(layer_names=["one", "two"], kv_cache_spec=SimpleNamespace(page_size_bytes=50))
    cache: Any = SimpleNamespace(
        kv_cache_groups=[group] * groups, select_transfer_block_ids=lambda blocks: blocks
    )
    with (
        patch.object(NixlBaseConnectorScheduler, "__init__", _construct),
        patch.object(module, "ControlChannel", SilentChannel),
        patch.object(module, "require_free", lambda *_: None),
        patch.object(module, "IdentityOf", lambda _: IDENTITIES),
    ):
        return KvloopScheduler(config, "decode-0", cache, make_settings(**settings))


def make_connector(half: Any) -> Any:
    """vLLM's facade of it."""
    connector: Any = KvloopConnector.__new__(KvloopConnector)
    connector.connector_scheduler, connector.connector_worker = half, None
    connector._connector_metadata = None
    return connector


class RetainingEngine(Engine):
    """vLLM's scheduler with kvloop's half in it, as the engine core runs them; the books are checked each
    step."""

    def __init__(self, config: VllmConfig, blocks: int, **settings: Any) -> None:
        super().__init__(make_scheduler(config, blocks))
        self.half = make_half(checks_every_step=True, **settings)
        self.scheduler.connector = make_connector(self.half)
        self.scheduler.connector.bind_kv_cache_manager(self.scheduler.kv_cache_manager)

    def counters(self) -> dict[str, int]:
        """What the engine counts."""
        with self.half._leases.lock:
            counters: dict[str, int] = self.half._lender._counters()
        return counters
