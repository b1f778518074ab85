"""The scheduler half: wires vLLM's scheduler hooks to the two sides of the loop.

A request arrives (`on_new_request`): where it brings a handle, a claim goes out. vLLM asks how much it
can load (`get_num_new_matched_tokens`): "ask again" while the claim is under way, then the proven tokens
beyond the local prefix hit. Blocks are allocated (`update_state_after_alloc`): the read is ordered. The
step is built: orders go to the workers. Output comes back (`update_connector_output`): the claim is
released, late blocks are set aside or taken back. The request ends (`request_finished`): prefill reports
what it reused, decode retains. Claims on soft leases are answered when a step is built, and where there is
none to build, when vLLM asks whether there might be (`has_pending_push_work`).

Everything NIXL's own scheduler half does for the hand-over from prefill to decode is inherited untouched.
"""

import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from kvloop.connector.account import Account
from kvloop.connector.compat import find_blocks_freed_later, find_wake, registration_generation
from kvloop.connector.conservation import CHECK_EVERY_NS, Conservation
from kvloop.connector.handovers import Handovers
from kvloop.connector.identity import IdentityOf
from kvloop.connector.late import LateReads
from kvloop.connector.leases import Leases
from kvloop.connector.lend import Lender
from kvloop.connector.metadata import KvloopMetadata, WorkerNews
from kvloop.connector.pressure import Pressure
from kvloop.connector.readback import ReadBack
from kvloop.connector.retain import Retainer
from kvloop.connector.settings import Settings
from kvloop.connector.tally import Tally, block_bytes
from kvloop.connector.waiting import WaitingHits
from kvloop.control.address import require_free
from kvloop.control.channel import ControlChannel
from kvloop.wire.control import Source
from kvloop.wire.seal import Seal

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
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
        self._leases = Leases(settings, block_size=self.block_size, incarnation=self._incarnation)
        self._late = LateReads()
        self._tally = Tally(block_bytes(kv_cache_config) * self.transfer_tp_size)
        self._handovers = Handovers(self._tally)
        self._pressure = Pressure(self._leases.make_room)
        self._waiting = WaitingHits(self._leases.make_room, self._leases.holds_blocks)
        self._conservation = Conservation(
            (self._leases.held, self._late.held), 0 if settings.checks_every_step else CHECK_EVERY_NS
        )
        identity_of = IdentityOf(vllm_config)
        self._retainer = Retainer(
            settings,
            self._leases,
            identity_of=identity_of,
            block_size=self.block_size,
            source=self._source("none"),
        )
        self._retainer.check_handle()
        self._readback = ReadBack(
            settings, identity_of=identity_of, block_size=self.block_size, tally=self._tally
        )
        self._lender = self._make_lender(settings)
        self._channel = ControlChannel(
            (settings.control_host, settings.control_port),
            Seal(settings.key, f"{engine_id}/{self._incarnation}"),
            serve=self._lender.serve,
            on_reply=self._readback.on_reply,
        )
        self._readback.use(self._channel)
        self._channel.start()
        self._met_core = False
        self._wake: Callable[[], None] | None = None
        self._refused_before = 0
        self._starved = False
        self._incarnations_due: dict[str, str] = {}

    def _make_lender(self, settings: Settings) -> Lender:
        account = Account(
            self._leases,
            self._pressure,
            self._conservation,
            self._tally,
            frames_dropped=lambda: self._channel.frames_dropped(),
        )
        return Lender(
            self._leases,
            engine_id=self.engine_id,
            describe_source=self._source,
            counters=account.counters,
            patience_ns=settings.claim_timeout_ns,
        )

    def bind(self, manager: "KVCacheManager") -> None:
        """Take the scheduler's KV cache manager and its block pool: leases hold references to the pool's
        blocks, and give way to the manager's allocations."""
        if not self._reusable:
            return
        blocks = self._leases.bind(manager.block_pool)
        self._late.bind(blocks)
        self._pressure.relieve(manager)
        self._waiting.guard(manager.block_pool)
        self._conservation.bind(manager, blocks)

    def drop_leases(self) -> None:
        """End every lease of this engine."""
        self._leases.drop_all()

    def set_xfer_handshake_metadata(
        self, metadata: "dict[tuple[int, int], KVConnectorHandshakeMetadata]"
    ) -> None:
        """Serve the workers' registrations. Where they are new ones, as after a sleep, the memory is another
        than the one that leases were granted on."""
        before = registration_generation(self)
        super().set_xfer_handshake_metadata(metadata)
        if before not in (0, registration_generation(self)):
            self._incarnation = secrets.token_hex(8)
            self._leases.drop_all(self._incarnation)

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
        if not self._met_core:
            self._meet_core()
        if self._settings.retains and self._reusable:
            self._waiting.arrive(request)
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
        if request.request_id in self._readback:
            return self._readback.decide(request, num_computed_tokens)
        count, asynchronous = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if request.kv_transfer_params:
            self._handovers.looked(request, num_computed_tokens, count)
        return count, asynchronous

    def _meet_core(self) -> None:
        """Find who is calling: the engine core, to wake it; vLLM's scheduler, to see what it holds."""
        self._met_core = True
        self._conservation.count_freed_later(find_blocks_freed_later())
        self._wake = find_wake()
        self._lender.wake_with(self._wake)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """Blocks were allocated: order the read into those that are not there yet."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self._waiting.leave(request.request_id)
        is_read_back = request.request_id in self._readback
        if num_external_tokens == 0:
            if is_read_back:
                self._readback.decline(request)
            return
        missing = self.get_exchange_clipped_blocks(blocks.get_unhashed_block_ids_all_groups())
        if is_read_back:
            self._readback.order(request, list(missing[0]))
        else:
            self._handovers.ordered(request.request_id, len(missing[0]))

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KvloopMetadata:
        """This step's orders for the workers."""
        refused = self._pressure.refused_total
        self._starved, self._refused_before = refused > self._refused_before, refused
        self._leases.give_back()
        self._lender.answer_deferred(starved=self._starved)
        self._conservation.check_when_due()
        orders = super().build_connector_meta(scheduler_output)
        assert isinstance(orders, NixlConnectorMetadata)
        meta = KvloopMetadata.extend(orders)
        self._readback.add_orders(meta)
        meta.incarnations.update(self._incarnations_due)
        self._incarnations_due.clear()
        return meta

    def has_pending_push_work(self) -> bool:
        """vLLM asks whether to take a step although no request needs one: none is needed for kvloop's sake.
        It asks on its own thread also when it has been woken out of idleness, so claims are answered here,
        and blocks given back; where some are left for the next time, vLLM is woken to ask again."""
        self._lender.answer_deferred(starved=False)
        if self._leases.give_back() and self._wake is not None:
            self._wake()
        return super().has_pending_push_work()

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Transfers ended: release claims, set late blocks aside, take ended ones back."""
        super().update_connector_output(connector_output)
        news = connector_output.kv_connector_worker_meta
        if isinstance(news, WorkerNews):
            for request_id, workers in news.late.items():
                self._late.set_aside(request_id, workers, self._readback.target_blocks(request_id))
            for request_id, workers in news.ended.items():
                self._late.take_back(request_id, workers)
        for request_id in connector_output.finished_recving or ():
            failed = request_id in connector_output.failed_recving
            self._readback.end(request_id, failed=failed)
            self._handovers.ended(request_id, failed=failed)

    def request_finished(
        self, request: "Request", block_ids: "tuple[list[int], ...] | list[list[int]]"
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request ended: report what prefill reused, or retain what decode computed."""
        params = request.kv_transfer_params
        self._waiting.leave(request.request_id)
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
        prompt = self._handovers.left(request.request_id)
        if self._may_retain(request, params) and not delay_free:
            handle = self._retainer.retain(request, tuple(block_ids), starved=self._starved)
            if handle is not None:
                return False, {"kvloop_handle": self._retainer.encode(handle), "kvloop_turn": prompt}
        return delay_free, answer

    def _may_retain(self, request: "Request", params: dict[str, Any]) -> bool:
        return (
            self._reusable
            and self._settings.retains
            and request.status in _ENDED_WELL
            and params.get("kvloop_retain") is not False
        )

    def shutdown(self) -> None:
        """Stop the control channel and end every lease."""
        self._channel.stop()
        self._leases.drop_all()
        super().shutdown()  # type: ignore[no-untyped-call]
