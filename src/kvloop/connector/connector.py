"""The connector that `--kv-transfer-config` names: a facade over the scheduler half and the worker half.

It is NIXL's pull connector with both halves replaced by kvloop's subclasses, so that everything NIXL's
does for parallel sizes, attention kinds and memory kinds is kept, and with three methods wired that
NIXL's leaves alone: the KV cache manager (to hold references to blocks, and to give way), the cache reset
(to end leases), and the workers' news about late reads.
"""

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector

from kvloop.connector.compat import check_version
from kvloop.connector.cores import pace
from kvloop.connector.metadata import KvloopMetadata
from kvloop.connector.scheduler import KvloopScheduler
from kvloop.connector.settings import check_failure_policy, read_settings
from kvloop.connector.worker import KvloopWorker
from kvloop.errors import UserError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig


class KvloopConnector(NixlPullConnector):
    """See the module's text. vLLM requires these parameter names."""

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        check_version()
        if vllm_config.kv_transfer_config is None:
            raise UserError("kvloop needs --kv-transfer-config")
        check_failure_policy(vllm_config.kv_transfer_config.kv_load_failure_policy)
        settings = read_settings(
            vllm_config.kv_transfer_config.kv_connector_extra_config,
            side_channel_host=_side_channel_host(),
            data_parallel_index=vllm_config.parallel_config.data_parallel_index,
        )
        # Not NixlPullConnector.__init__: it would build NIXL's own halves, and only one agent may own the
        # cache.
        super(NixlPullConnector, self).__init__(vllm_config, role, kv_cache_config)
        if settings.progress_delay_us is not None:
            pace(settings.progress_delay_us)
        self.connector_scheduler: KvloopScheduler | None = None
        self.connector_worker: KvloopWorker | None = None
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = KvloopScheduler(vllm_config, self.engine_id, kv_cache_config, settings)
        else:
            self.connector_worker = KvloopWorker(vllm_config, self.engine_id, kv_cache_config)

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        """Give the scheduler half the manager, and end every lease whenever the prefix cache is reset.

        vLLM resets the cache before it asks its connector to (`reset_cache`), and refuses while blocks are
        in use; a lease holds blocks. Without this no engine that retains could be paused, put to sleep, or
        rid of what it computed with earlier weights.
        """
        super().bind_kv_cache_manager(kv_cache_manager)
        scheduler = self.connector_scheduler
        if scheduler is None:
            return
        scheduler.bind(kv_cache_manager)
        reset = kv_cache_manager.reset_prefix_cache

        def reset_without_leases() -> bool:
            scheduler.drop_leases()
            return reset()

        kv_cache_manager.reset_prefix_cache = reset_without_leases  # type: ignore[method-assign]

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """News about late reads for the scheduler half."""
        return None if self.connector_worker is None else self.connector_worker.take_news()

    def reset_cache(self) -> bool | None:
        """End every lease: the cache is reset because its content is not valid any more."""
        if self.connector_scheduler is not None:
            self.connector_scheduler.drop_leases()
        return True

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002 - vLLM's signature
        """Begin the step's reads."""
        metadata = self._get_connector_metadata()
        assert self.connector_worker is not None
        assert isinstance(metadata, KvloopMetadata)
        self.connector_worker.start_load_kv(metadata)


def _side_channel_host() -> str:
    from vllm import envs

    return str(envs.VLLM_NIXL_SIDE_CHANNEL_HOST)
