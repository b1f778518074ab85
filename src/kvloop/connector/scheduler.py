"""The scheduler half: wires vLLM's scheduler hooks to the two sides of the loop.

A request arrives (`on_new_request`): where it brings a handle, a claim goes out. vLLM asks how much it
can load (`get_num_new_matched_tokens`): "ask again" while the claim is under way, then the proven tokens
beyond the local prefix hit. Blocks are allocated (`update_state_after_alloc`): the read is ordered. The
step is built: orders go to the workers. Output comes back (`update_connector_output`): the claim is
released, late blocks are set aside or taken back. The request ends (`request_finished`): prefill reports
what it reused, decode retains.

Everything NIXL's own scheduler half does for the hand-over from prefill to decode is inherited untouched.
"""

import secrets
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from kvloop.connector.compat import registration_generation
from kvloop.connector.identity import IdentityOf
from kvloop.connector.metadata import KvloopMetadata, WorkerNews
from kvloop.connector.readback import ReadBack
from kvloop.connector.retain import Retainer
from kvloop.connector.settings import Settings
from kvloop.control.address import require_free
from kvloop.control.channel import ControlChannel
from kvloop.wire.control import Source
from kvloop.wire.seal import Seal

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kvloop.scheduler")

_ENDED_WELL = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


class KvloopScheduler(NixlPullConnectorScheduler):
    """NIXL's pull scheduler with leases on one side and claims on the other."""

    def __init__(
        self, vllm_config: "VllmConfig", engine_id: str, kv_cache_config: "KVCacheConfig", settings: Settings
    ) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        # vLLM's listener thread would die of a port that is taken, and the engine wait for it for ever.
        require_free((self.side_channel_host, self.side_channel_port), "VLLM_NIXL_SIDE_CHANNEL_PORT")
        self._settings = settings
        self._incarnation = secrets.token_hex(8)
        self._parallel = vllm_config.parallel_config
        # One KV group without context parallelism: there a matched prefix is a prefix of the block list.
        # Anything else (sliding windows, recurrent state, interleaved shards) takes no part in reuse.
        self._reusable = (
            len(kv_cache_config.kv_cache_groups) == 1
            and not self._is_hma_required
            and self._parallel.decode_context_parallel_size == 1
            and self._parallel.prefill_context_parallel_size == 1
        )
        if not self._reusable:
            logger.warning(
                "this model's KV cache groups or parallel layout cannot be reused: turns are recomputed"
            )
        identity_of = IdentityOf(vllm_config)
        self._retainer = Retainer(
            settings,
            identity_of=identity_of,
            block_size=self.block_size,
            engine_id=engine_id,
            incarnation=self._incarnation,
            describe_source=self._source,
        )
        self._retainer.check_handle()
        self._readback = ReadBack(settings, identity_of=identity_of, block_size=self.block_size)
        self._channel = ControlChannel(
            (settings.control_host, settings.control_port),
            Seal(settings.key, f"{engine_id}/{self._incarnation}"),
            serve=lambda message, _: self._retainer.serve(message),
            on_reply=self._readback.on_reply,
        )
        self._readback.use(self._channel)
        self._channel.start()
        self._pool: BlockPool | None = None
        self._incarnations_due: dict[str, str] = {}
        self._late_blocks: dict[str, list[int]] = {}
        self._late_workers: dict[str, int] = {}

    def bind(self, pool: "BlockPool") -> None:
        """Take the scheduler's block pool."""
        self._pool = pool
        self._retainer.bind(pool)

    def drop_leases(self) -> None:
        """End every lease of this engine."""
        self._retainer.drop_all()

    def set_xfer_handshake_metadata(
        self, metadata: "dict[tuple[int, int], KVConnectorHandshakeMetadata]"
    ) -> None:
        """Serve the workers' registrations. Where they are new ones, as after a sleep, the memory is another
        than the one that leases were granted on."""
        before = registration_generation(self)
        super().set_xfer_handshake_metadata(metadata)
        if before not in (0, registration_generation(self)):
            self._incarnation = secrets.token_hex(8)
            self._retainer.begin_incarnation(self._incarnation)

    def _source(self, request_id: str) -> Source:
        return Source(
            engine_id=self.engine_id,
            request_id=request_id,
            host=self.side_channel_host,
            port=self.side_channel_port,
            tp_size=self.transfer_tp_size,
            pp_size=self._parallel.pipeline_parallel_size,
            dcp_size=self._parallel.decode_context_parallel_size,
        )

    def on_new_request(self, request: "Request") -> None:
        """A request arrived: send the claim that its handle asks for."""
        super().on_new_request(request)
        self._retainer.give_back()
        params = request.kv_transfer_params
        if not params:
            return
        if params.get("do_remote_decode"):
            # Block ids in a request are for a decode engine alone; a prefill engine only ever follows a
            # claim.
            params.pop("remote_block_ids", None)
            self._readback.arrive(request, params.pop("kvloop_handle", None), reusable=self._reusable)
        elif params.get("do_remote_prefill") and isinstance(
            incarnation := params.get("kvloop_incarnation"), str
        ):
            self._incarnations_due[str(params.get("remote_engine_id"))] = incarnation

    def get_num_new_matched_tokens(  # type: ignore[override]
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens beyond the local hit can be read, and that the read is asynchronous."""
        self._retainer.make_room(self._blocks_wanted(request, num_computed_tokens))
        if request.request_id in self._readback:
            return self._readback.decide(request, num_computed_tokens)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def _blocks_wanted(self, request: "Request", num_computed_tokens: int) -> int:
        return -(-(request.num_tokens - num_computed_tokens) // self.block_size) + 1

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """Blocks were allocated: order the read into those that are not there yet."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if request.request_id not in self._readback:
            return
        if num_external_tokens == 0:
            self._readback.decline(request)
        else:
            missing = self.get_exchange_clipped_blocks(blocks.get_unhashed_block_ids_all_groups())
            self._readback.order(request, list(missing[0]))

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KvloopMetadata:
        """This step's orders for the workers."""
        self._retainer.give_back()
        orders = super().build_connector_meta(scheduler_output)
        assert isinstance(orders, NixlConnectorMetadata)
        meta = KvloopMetadata.extend(orders)
        self._readback.add_orders(meta)
        meta.incarnations.update(self._incarnations_due)
        self._incarnations_due.clear()
        return meta

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Transfers ended: release claims, set late blocks aside, take ended ones back."""
        super().update_connector_output(connector_output)
        news = connector_output.kv_connector_worker_meta
        if isinstance(news, WorkerNews):
            for request_id, workers in news.late.items():
                self._set_aside(request_id, workers)
            for request_id, workers in news.ended.items():
                self._take_back(request_id, workers)
        for request_id in connector_output.finished_recving or ():
            self._readback.end(request_id, failed=request_id in connector_output.failed_recving)

    def _set_aside(self, request_id: str, workers: int) -> None:
        """Hold the blocks that a late read may still write to, beside whatever the request does now."""
        pool = self._pool
        if pool is None:
            return
        self._late_workers[request_id] = self._late_workers.get(request_id, 0) + workers
        if request_id not in self._late_blocks:
            blocks = self._readback.target_blocks(request_id)
            pool.touch([pool.blocks[block] for block in blocks])
            self._late_blocks[request_id] = blocks

    def _take_back(self, request_id: str, workers: int) -> None:
        left = self._late_workers.get(request_id, 0) - workers
        self._late_workers[request_id] = left
        if left > 0 or self._pool is None:
            return
        del self._late_workers[request_id]
        pool = self._pool
        pool.free_blocks(pool.blocks[block] for block in reversed(self._late_blocks.pop(request_id, [])))

    def request_finished(
        self, request: "Request", block_ids: "tuple[list[int], ...] | list[list[int]]"
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request ended: report what prefill reused, or retain what decode computed."""
        params = request.kv_transfer_params
        delay_free, answer = super().request_finished(request, block_ids)
        if not params:
            return delay_free, answer
        if params.get("do_remote_decode"):
            turn = self._readback.leave(request)
            if answer is not None:
                answer["kvloop_turn"] = turn
                answer["kvloop_incarnation"] = self._incarnation
                answer["remote_prefill_cached_tokens"] = turn["local_tokens"] + turn["returned_tokens"]
            return delay_free, answer
        if self._reusable and self._settings.retains and request.status in _ENDED_WELL and not delay_free:
            handle = self._retainer.retain(request, tuple(block_ids))
            if handle is not None:
                return False, {"kvloop_handle": self._retainer.encode(handle)}
        return delay_free, answer

    def shutdown(self) -> None:
        """Stop the control channel and end every lease."""
        self._channel.stop()
        self._retainer.drop_all()
        super().shutdown()  # type: ignore[no-untyped-call]
