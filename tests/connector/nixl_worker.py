"""vLLM's own pull worker, less its construction and its posting of transfers, over a NIXL that tests play."""

import queue
import threading
from collections import defaultdict
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats

from kvloop.connector.metadata import KvloopMetadata
from kvloop.connector.worker import KvloopWorker, NotificationFilter

PEER = "decode-0"
PEER_BLOCKS = 100
SETS = """
_recv_failures _replicated_pcp_done_sending _failed_remote_engines _invalid_remote_engines _reqs_to_process
"""
DICTS = """
_recving_metadata _pending_recv_notifs _reqs_to_send _handshake_futures _remote_agents _engine_by_address
_invalid_engine_backoff dst_num_blocks kv_caches_base_addr dst_region_num_blocks dst_region_group_ids
dst_uses_region_group_mapping dst_region_mem_types tp_mappings _engine_clock_offset _engine_last_active
"""
FLAGS = """
_is_hma_required use_host_buffer enable_permute_local_kv pcp_dcp_sharded _has_mamba
enable_heterogeneous_attn_post_process
"""


class Nixl:
    """NIXL's agent. `states`: a handle's transfer is PROC, DONE, ERR, or gone wrong (raises)."""

    def __init__(self) -> None:
        self.states: dict[int, str] = {}
        self.stuck: set[int] = set()
        self.released: list[int] = []
        self.notifications: dict[str, list[bytes]] = {}
        self.calls: list[tuple[str, Any]] = []

    def check_xfer_state(self, handle: int) -> str:
        """NIXL raises for transfers that broke off."""
        if self.states[handle] == "gone wrong":
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
        return self.states[handle]

    def release_xfer_handle(self, handle: int) -> None:
        """Refused while bytes may still come."""
        if handle in self.stuck or self.states[handle] == "PROC":
            raise RuntimeError("still in flight")
        assert handle not in self.released, "released twice"
        self.released.append(handle)

    def get_xfer_telemetry(self, _handle: int) -> Any:
        """Whatever the statistics want."""
        return SimpleNamespace(xferDuration=1.0, postDuration=1.0, totalBytes=1, descCount=1)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        """What peers have sent since the last call."""
        notifications, self.notifications = self.notifications, {}
        return notifications

    def check_remote_metadata(self, _agent: str) -> bool:
        """The peer's metadata is still loaded."""
        return True

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.calls.append((name, arguments))


class Posted:
    """Stands for upstream's posting: every read of a known peer gets handles, others wait for a handshake."""

    def __init__(self) -> None:
        self.reads: list[str] = []
        self.handles_per_read = 1
        self.made = 0
        self.fail: str = ""

    def post(self, worker: Any, request_id: str, meta: Any) -> None:
        """As `NixlPullConnectorWorker._read_blocks_for_req`."""
        if meta.remote.engine_id not in worker._remote_agents:
            return
        worker._recving_transfers.setdefault(request_id, [])
        self.reads.append(request_id)
        for _ in range(self.handles_per_read):
            if self.fail == "before" or (self.fail == "between" and worker._recving_transfers[request_id]):
                raise AssertionError("shapes do not match")
            self.made += 1
            worker.nixl_wrapper.states[self.made] = "PROC"
            worker._recving_transfers[request_id].append(self.made)


def make_worker(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Nixl, Posted]:
    """A worker half that knows one peer."""
    nixl, posted = Nixl(), Posted()
    worker: Any = KvloopWorker.__new__(KvloopWorker)

    def construct(self: Any, *_arguments: Any) -> None:
        self.nixl_wrapper = nixl
        for name in ("_recving_transfers", "dst_xfer_side_handles", "consumer_notification_counts_by_req"):
            setattr(self, name, defaultdict({"_recving_transfers": list}.get(name, dict)))
        for name in ("_ready_requests", "_failed_recv_reqs", "_invalid_block_ids"):
            setattr(self, name, queue.Queue())
        for name in SETS.split():
            setattr(self, name, set())
        for name in DICTS.split():
            setattr(self, name, {})
        self._handshake_lock = threading.Lock()
        self.xfer_stats = NixlKVConnectorStats()
        self.transfer_topo = SimpleNamespace(
            get_engine_info=lambda _: SimpleNamespace(
                remote_block_size=32, remote_physical_blocks_per_logical=self.remote_ratio
            ),
            block_size_ratio=lambda _: 1,
            unregister_remote_engine=lambda _: None,
        )
        self.remote_ratio = self._physical_blocks_per_logical_kv_block = 1
        self.tp_rank = self.pcp_rank = 0
        for name in FLAGS.split():
            setattr(self, name, False)

    monkeypatch.setattr(NixlPullConnectorWorker, "__init__", construct)
    monkeypatch.setattr(NixlPullConnectorWorker, "_read_blocks_for_req", lambda *call: posted.post(*call))
    monkeypatch.setattr(NixlPullConnectorWorker, "_log_failure", lambda *_, **__: None)
    worker.__init__(None, "prefill-0", None)
    assert isinstance(worker.nixl_wrapper, NotificationFilter)
    know(worker)
    return worker, nixl, posted


def know(worker: Any) -> None:
    """A handshake with the peer has ended."""
    worker._remote_agents[PEER] = {(0, 0): f"{PEER}-agent"}
    worker._engine_by_address["10.0.0.1", 5600] = PEER
    worker.dst_num_blocks[PEER] = PEER_BLOCKS


def step(
    reads: dict[str, int | None],
    *,
    blocks: Iterable[int] = (7, 8),
    incarnation: str | None = "i1",
) -> KvloopMetadata:
    """A step's orders: reads of the peer's blocks, each with its deadline or none."""
    meta = KvloopMetadata()
    for request_id, deadline_ns in reads.items():
        params = {
            "remote_block_ids": [list(blocks)],
            "remote_engine_id": PEER,
            "remote_request_id": "kvloop:c",
            "remote_host": "10.0.0.1",
            "remote_port": 5600,
        }
        meta.add_new_req_to_recv(request_id, ([1, 2],), params, (0,), awaiting_kvs=True)
        if deadline_ns is not None:
            meta.deadlines_ns[request_id] = deadline_ns
    if incarnation is not None:
        meta.incarnations[PEER] = incarnation
    return meta
