"""The worker half: moves KV blocks, and never lets a read outlive the claim that protects it.

NIXL has no deadline of its own: a peer that is stopped keeps a read in flight for as long as it sleeps,
and its bytes may land at any time until the transfer handle is released. So each read back carries a
deadline. A read that ends in time is good. One that ended after its deadline is reported as failed, since
decode may have rewritten the blocks meanwhile. One that has not ended at its deadline is reported as
failed *and late*: the request goes on in other blocks at once, and the scheduler half keeps the old ones
out of use until this half reports the end of the transfer.
"""

import time
from collections import Counter
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata, ReqMeta
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.logger import init_logger

from kvloop.connector.cores import cores_kept
from kvloop.connector.metadata import KvloopMetadata, WorkerNews

logger = init_logger("vllm.kvloop.worker")

CLAIM_READ_PREFIX = "kvloop:"
"""Read notifications that start so are about claims, which are released on the control channel instead."""

MAX_GIVEN_UP_REQUESTS = 4096
"""Reads given up during a handshake, remembered until it ends: vLLM bounds a handshake by 5 s a rank."""

_NEVER_NS = 1 << 63


class _Late(NamedTuple):
    """A read that was given up while it was in flight: from which engine, and NIXL's handles of it."""

    peer: str
    handles: list[int]


class NotificationFilter:
    """NIXL's agent, minus the notifications of claimed reads, which upstream would take for unknown sends."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        """As NIXL's, by sending agent."""
        prefix = CLAIM_READ_PREFIX.encode()
        return {
            sender: [message for message in messages if not message.startswith(prefix)]
            for sender, messages in self._agent.get_new_notifs().items()
        }


class KvloopWorker(NixlPullConnectorWorker):
    """NIXL's pull worker with deadlines on reads back and with peers recognised by incarnation."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        with cores_kept():
            super().__init__(vllm_config, engine_id, kv_cache_config)
        self.nixl_wrapper = NotificationFilter(self.nixl_wrapper)
        self._deadline_ns: dict[str, int] = {}
        self._given_up: dict[str, ReqMeta | None] = {}
        self._late: dict[str, _Late] = {}
        self._incarnations: dict[str, str] = {}
        self._outdated: set[str] = set()
        self._news = WorkerNews()

    def start_load_kv(self, metadata: NixlConnectorMetadata) -> None:
        """Begin this step's reads."""
        if isinstance(metadata, KvloopMetadata):
            for request_id, deadline_ns in metadata.deadlines_ns.items():
                self._deadline_ns[request_id] = metadata.clock.placed_here(deadline_ns)
            for peer, incarnation in metadata.incarnations.items():
                self._meet(peer, incarnation)
        super().start_load_kv(metadata)

    def _meet(self, peer: str, incarnation: str) -> None:
        """Forget what is known of `peer` where it has been restarted under the same engine id."""
        known = self._incarnations.setdefault(peer, incarnation)
        if known != incarnation and peer in self._remote_agents:
            if peer in self._engines_with_inflight_transfers():
                self._outdated.add(peer)
                return
            logger.info("engine %s was restarted (%s, was %s): new handshake", peer, incarnation, known)
            self._cleanup_remote_engine(peer, log_eviction=False)
        self._incarnations[peer] = incarnation
        self._outdated.discard(peer)

    def _engines_with_inflight_transfers(self) -> set[str]:
        """NIXL keeps what it knows of these; late reads are in flight, too."""
        return super()._engines_with_inflight_transfers() | {late.peer for late in self._late.values()}

    def _read_blocks_for_req(self, req_id: str, meta: ReqMeta) -> None:
        if self._given_up.get(req_id) is meta:
            # The handshake that it waited for came too late: nothing was posted, nothing may be now.
            del self._given_up[req_id]
            return
        if time.monotonic_ns() >= self._deadline_ns.get(req_id, _NEVER_NS):
            return  # as good as not answered: `get_transfer_results` gives it up
        try:
            self._check_read(meta, is_read_back=req_id in self._deadline_ns)
            super()._read_blocks_for_req(req_id, meta)
        except Exception:
            # Block ids and shapes come from a peer: what it sends wrong may cost this read, never the engine.
            if req_id not in self._deadline_ns:
                raise
            logger.exception("the read back for %s cannot be posted: recomputing", req_id)
            self._handle_failed_transfer(req_id, None, self._recv_failures)

    def _check_read(self, meta: ReqMeta, *, is_read_back: bool) -> None:
        if meta.remote is None or meta.remote.engine_id not in self.dst_num_blocks:
            return
        if is_read_back and meta.remote.engine_id in self._outdated:
            raise ValueError("the peer was restarted, and a read from before has not ended yet")
        assert self.transfer_topo is not None
        peer = self.transfer_topo.get_engine_info(meta.remote.engine_id)
        bound = self.dst_num_blocks[meta.remote.engine_id] // peer.remote_physical_blocks_per_logical
        for group in meta.remote.block_ids:
            if any(not 0 <= block < bound for block in group):
                raise ValueError(f"a block id is outside the peer's {bound} blocks")

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """What ended since the last call, with reads past their deadline turned into failures."""
        results = super().get_transfer_results()
        now_ns = time.monotonic_ns()
        for request_id in results.finished_recving:
            deadline_ns = self._deadline_ns.pop(request_id, None)
            if deadline_ns is None or request_id in results.failed_recving or now_ns < deadline_ns:
                continue
            logger.warning("the read back for %s ended after its claim's deadline: recomputing", request_id)
            results.failed_recving.add(request_id)
        for request_id in [r for r, deadline_ns in self._deadline_ns.items() if now_ns >= deadline_ns]:
            self._give_up(request_id)
            results.finished_recving.add(request_id)
            results.failed_recving.add(request_id)
        self._poll_late()
        return results

    def _give_up(self, request_id: str) -> None:
        """Stop waiting for a read; keep its handles until the transfer has ended."""
        del self._deadline_ns[request_id]
        self._recv_failures.discard(request_id)
        self._pending_recv_notifs.pop(request_id, None)
        meta = self._recving_metadata.pop(request_id, None)
        if request_id not in self._recving_transfers:
            self._given_up[request_id] = meta
            if len(self._given_up) > MAX_GIVEN_UP_REQUESTS:
                del self._given_up[next(iter(self._given_up))]
            logger.warning(
                "no answer from the peer before the claim's deadline of %s: recomputing", request_id
            )
            return
        peer = meta.remote.engine_id if meta is not None and meta.remote is not None else ""
        self._late[request_id] = _Late(peer, self._recving_transfers.pop(request_id))
        self._news.late[request_id] += 1
        logger.warning(
            "the read back for %s is still in flight at its claim's deadline: recomputing", request_id
        )

    def _poll_late(self) -> None:
        for request_id, late in list(self._late.items()):
            left = [handle for handle in late.handles if not self._ended(request_id, handle)]
            if left:
                self._late[request_id] = _Late(late.peer, left)
                continue
            del self._late[request_id]
            self._news.ended[request_id] += 1
            logger.info("the late read back for %s has ended; its blocks go back to the pool", request_id)

    def _ended(self, request_id: str, handle: int) -> bool:
        try:
            if self.nixl_wrapper.check_xfer_state(handle) == "PROC":
                return False
        except Exception as error:
            # NIXL raises for a transfer that broke off; whether bytes can still come is for the release
            # to say.
            logger.debug("late read back for %s: %s", request_id, error)
        return self._try_release_xfer_handle(request_id, handle)

    def take_news(self) -> WorkerNews | None:
        """What the scheduler half has to hear about late reads since the last step."""
        if not self._news.late and not self._news.ended:
            return None
        news, self._news = self._news, WorkerNews(Counter(), Counter())
        return news

    def shutdown(self) -> None:
        """Release every handle, late ones too."""
        for request_id, late in getattr(self, "_late", {}).items():
            self._recving_transfers.setdefault(request_id, []).extend(late.handles)
        self._late = {}
        super().shutdown()
