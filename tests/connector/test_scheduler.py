"""The scheduler half over vLLM's own: which requests go which way, late blocks, restarts, cache resets."""

import queue
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from kvloop.connector import conservation, leases
from kvloop.connector.connector import KvloopConnector
from kvloop.connector.metadata import WorkerNews
from kvloop.errors import UserError
from kvloop.wire.control import Claim, Drop, Refused
from kvloop.wire.handle import decode_handle
from tests.connector.decode import chain
from tests.connector.fakes import KEY, Pool, make_request, make_settings
from tests.connector.half import RetainingEngine, make_connector, make_half
from tests.connector.real_scheduler import make_config

TOKENS = list(range(101))


@pytest.fixture
def half() -> Any:
    """A scheduler half with a pool of 100 blocks and a channel to nobody."""
    made = make_half()
    bind(made, Pool(100))
    return made


def bind(half: Any, pool: Pool) -> Any:
    """vLLM gives a half its KV cache manager."""
    half.pool = pool
    manager: Any = SimpleNamespace(
        block_pool=pool,
        coordinator=SimpleNamespace(single_type_managers=[]),
        allocate_slots=None,
        reset_prefix_cache=pool.reset_prefix_cache,
    )
    make_connector(half).bind_kv_cache_manager(manager)
    return manager


def finish(half: Any, params: Any, status: Any = RequestStatus.FINISHED_STOPPED) -> Any:
    """A request with seven blocks ends."""
    blocks = half.pool.allocate(7)
    request = make_request("r", TOKENS, kv_transfer_params=params, status=status)
    answer = half.request_finished(request, (blocks,))
    half.pool.free(blocks)
    return answer


DECODED: dict[str, Any] = {"do_remote_decode": False, "do_remote_prefill": False}


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED])
def test_what_decode_finished_is_retained(half: Any, status: Any) -> None:
    """The request is freed at once; its blocks are held by reference."""
    delay, answer = finish(half, dict(DECODED), status)
    assert delay is False
    assert set(answer) == {"kvloop_handle", "kvloop_turn"}
    assert half.pool.held() == 7


@pytest.mark.parametrize(
    ("params", "status"),
    [
        (None, RequestStatus.FINISHED_STOPPED),
        ({}, RequestStatus.FINISHED_STOPPED),
        (dict(DECODED), RequestStatus.FINISHED_ABORTED),
        (dict(DECODED), RequestStatus.FINISHED_ERROR),
    ],
)
def test_what_did_not_end_well_or_is_not_of_the_loop_is_not(half: Any, params: Any, status: Any) -> None:
    """Nothing is held and nothing is answered."""
    assert finish(half, params, status) == (False, None)
    assert half.pool.held() == 0


def test_an_engine_that_only_prefills_retains_nothing(half: Any) -> None:
    """Nor does one whose cache cannot be reused."""
    half._settings = make_settings(role="prefill")
    assert finish(half, dict(DECODED)) == (False, None)
    half._settings, half._reusable = make_settings(), False
    assert finish(half, dict(DECODED)) == (False, None)


@pytest.mark.parametrize(
    ("count", "parallel", "reusable"),
    [
        (1, {}, True),
        (1, {"pipeline_parallel_size": 2}, True),
        (2, {}, False),
        (1, {"decode_context_parallel_size": 2}, False),
        (1, {"prefill_context_parallel_size": 2}, False),
    ],
)
def test_only_one_kv_group_without_context_parallelism_is_reused(
    count: int, parallel: dict[str, int], reusable: bool
) -> None:
    """There a matched prefix is a prefix of the block list."""
    assert make_half(parallel, count)._reusable is reusable


def test_prefill_s_answer_carries_its_account_and_incarnation(half: Any) -> None:
    """Cached, as upstream reports it, is what was local or returned. A client's block ids are dropped."""
    params = {"do_remote_decode": True, "remote_block_ids": [[1]], "kvloop_handle": "nonsense"}
    request = make_request(
        "r", TOKENS, kv_transfer_params=params, status=RequestStatus.FINISHED_LENGTH_CAPPED
    )
    half.on_new_request(request)
    assert "remote_block_ids" not in params
    assert half.get_num_new_matched_tokens(request, 32) == (0, False)
    delay, answer = half.request_finished(request, ([1, 2],))
    assert delay is True
    assert answer["kvloop_turn"]["reason"] == "handle_malformed"
    assert answer["remote_prefill_cached_tokens"] == answer["kvloop_turn"]["local_tokens"] == 32
    assert answer["kvloop_incarnation"] == half._incarnation
    assert answer["remote_block_ids"] == ([1, 2],)


def news(half: Any, late: int = 0, ended: int = 0, **output: Any) -> None:
    """Workers report about a read of request r."""
    meta = WorkerNews(Counter(r=late) if late else Counter(), Counter(r=ended) if ended else Counter())
    half.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=meta, **output))


def test_late_blocks_are_kept_out_of_use_until_every_late_worker_s_transfer_has_ended(half: Any) -> None:
    """The request gives them up and goes on in others; they come back once, after the last one."""
    pool = half.pool
    blocks = pool.allocate(3)
    half._readback.target_blocks = lambda request_id: list(blocks) if request_id == "r" else []
    news(half, late=1, finished_recving={"r"}, failed_recving={"r"})
    pool.free(blocks)
    news(half, late=1)
    assert [pool.blocks[block].ref_cnt for block in blocks] == [1, 1, 1]
    news(half, ended=1)
    assert pool.held() == 3
    news(half, ended=1)
    assert pool.held() == 0
    assert not list(half._late.held())


def test_a_read_that_was_late_and_ended_in_one_step_holds_nothing(half: Any) -> None:
    """Both may stand in the same news."""
    blocks = half.pool.allocate(3)
    half._readback.target_blocks = lambda _: list(blocks)
    news(half, late=1, ended=1)
    half.pool.free(blocks)
    assert half.pool.held() == 0


def test_a_new_registration_is_a_new_incarnation(half: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after 0.33's sleep; the first one, and one that says the same, are none."""

    def publish(self: Any, metadata: Any) -> None:
        self._registration_generation = metadata

    monkeypatch.setattr(NixlBaseConnectorScheduler, "set_xfer_handshake_metadata", publish)
    first = half._incarnation
    for generation in (1, 1):
        half.set_xfer_handshake_metadata(generation)
        assert half._incarnation == first
    finish(half, dict(DECODED))
    half.set_xfer_handshake_metadata(2)
    assert half._incarnation != first
    assert half.pool.held() == 0
    assert half._leases.table.incarnation == half._incarnation


def test_a_cache_reset_ends_every_lease_first(half: Any) -> None:
    """vLLM refuses to reset a cache whose blocks are in use, and asks its connector only afterwards."""
    pool = Pool(50)
    manager = bind(half, pool)
    finish(half, dict(DECODED))
    assert manager.reset_prefix_cache() is True
    busy = pool.allocate(1)
    assert manager.reset_prefix_cache() is False
    pool.free(busy)


def test_the_fail_policy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine does not start with it."""
    monkeypatch.setattr(KVConnectorBase_V1, "__init__", lambda *_: None)
    transfer = SimpleNamespace(kv_load_failure_policy="fail", kv_connector_extra_config={})
    with pytest.raises(UserError, match="kv_load_failure_policy"):
        KvloopConnector(SimpleNamespace(kv_transfer_config=transfer), KVConnectorRole.SCHEDULER, None)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """vLLM's configuration with a prefix cache."""
    return make_config(tmp_path_factory.mktemp("model"), caching=True)


class Core:
    """As vLLM's engine core: it sleeps on a queue, and asks for work on its own thread when it is woken."""

    def __init__(self, engine: RetainingEngine) -> None:
        self.engine = engine
        self.input_queue: queue.Queue[Any] = queue.Queue()

    def add(self, *request: Any) -> None:
        """A request arrives, and is done."""
        self.engine.add(*request)
        self.engine.run()

    def wait(self) -> bool:
        """Sleep until woken; whether there is a step to take."""
        self.input_queue.get(timeout=5)
        return self.engine.scheduler.has_requests()


def test_a_claim_on_a_soft_lease_is_answered_by_an_idle_engine(vllm_config: Any) -> None:
    """It is woken, answers on its own thread, takes no step for it, and its blocks are held from then on."""
    engine = RetainingEngine(vllm_config, 40)
    core = Core(engine)
    core.add("r", TOKENS, 2, dict(DECODED))
    engine.step()
    handle = decode_handle(engine.answers["r"]["kvloop_handle"], KEY)
    lender, answers = engine.half._lender, []
    lender.serve(Drop([handle.lease_id]), answers.append)
    claim = Claim.asking(handle, chain([*TOKENS, 7][: handle.token_count]))
    assert lender.serve(claim, answers.append) is None
    assert not answers
    assert core.wait() is False
    assert [answer.matched_tokens for answer in answers] == [handle.token_count]
    assert engine.counters()["kvloop_lease_blocks"] == len(answers[0].block_ids[0])
    assert engine.scheduler.has_requests() is False
    assert len(answers) == 1


def three_leases(engine: Any, core: Any) -> list[str]:
    """Three requests have ended, and left what they computed."""
    lease_ids = []
    for number in range(3):
        core.add(f"r{number}", [number, *TOKENS], 2, dict(DECODED))
        lease_ids.append(decode_handle(engine.answers[f"r{number}"]["kvloop_handle"], KEY).lease_id)
    return lease_ids


def test_an_idle_engine_gives_back_in_steps_until_nothing_is_left(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many leases end at once: it is woken once for each piece, takes no step, and then sleeps."""
    monkeypatch.setattr(leases, "STEP_COST_BLOCKS", 1)
    engine = RetainingEngine(vllm_config, 40)
    core = Core(engine)
    lease_ids = three_leases(engine, core)
    engine.step()
    assert not core.input_queue.qsize()
    engine.half._lender.serve(Drop(lease_ids), print)
    left = [len(list(engine.half._leases.held()))]
    while core.input_queue.qsize():
        assert core.wait() is False
        left.append(len(list(engine.half._leases.held())))
        engine.half._conservation.check_when_due()
    assert left == [3, 2, 1, 0]
    assert engine.counters()["kvloop_unbalanced_blocks"] == 0


def test_a_busy_engine_gives_back_one_piece_with_each_step(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many requests come meanwhile; the books are checked with each."""
    monkeypatch.setattr(leases, "STEP_COST_BLOCKS", 1)
    engine = RetainingEngine(vllm_config, 60)
    core = Core(engine)
    lease_ids = three_leases(engine, core)
    engine.half._lender.serve(Drop(lease_ids), print)
    left = []
    for number in range(5):
        engine.add(f"busy{number}", [5 + number] * 40, 30)
        engine.step()
        left.append(len(list(engine.half._leases.held())))
    assert left == [2, 1, 0, 0, 0]
    assert engine.counters()["kvloop_unbalanced_blocks"] == 0


def test_a_busy_engine_answers_it_with_its_next_step(vllm_config: Any) -> None:
    """Whether the step computes anything or not."""
    engine = RetainingEngine(vllm_config, 40)
    core = Core(engine)
    core.add("r", TOKENS, 2, dict(DECODED))
    handle = decode_handle(engine.answers["r"]["kvloop_handle"], KEY)
    lender, answers = engine.half._lender, []
    lender.serve(Drop([handle.lease_id]), answers.append)
    engine.add("busy", [5] * 40, 30)
    engine.step()
    lender.serve(Claim.asking(handle, chain([*TOKENS, 7][: handle.token_count])), answers.append)
    assert not answers
    engine.step()
    assert [answer.matched_tokens for answer in answers] == [handle.token_count]


def test_a_claim_takes_nothing_while_a_request_waits_for_memory(vllm_config: Any) -> None:
    """It is refused with the step that could not place the request."""
    engine = RetainingEngine(vllm_config, 20)
    core = Core(engine)
    core.add("r", TOKENS, 2, dict(DECODED))
    handle = decode_handle(engine.answers["r"]["kvloop_handle"], KEY)
    lender, answers = engine.half._lender, []
    lender.serve(Drop([handle.lease_id]), answers.append)
    engine.add("busy", [5] * 180, 60)
    engine.step()
    engine.add("waits", [6] * 150, 30)
    lender.serve(Claim.asking(handle, chain([*TOKENS, 7][: handle.token_count])), answers.append)
    assert engine.step().num_scheduled_tokens == {"busy": 1}
    assert answers == [Refused("unknown_lease")]


def test_blocks_of_finished_requests_that_vllm_still_holds_are_accounted_for(vllm_config: Any) -> None:
    """With steps in flight it gives them back later."""
    engine = RetainingEngine(vllm_config, 40)
    engine.scheduler.defer_block_free = True
    engine.add("r", TOKENS, 20, dict(DECODED))
    scheduled = engine.scheduler.schedule()
    engine.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    assert scheduled.num_scheduled_tokens
    assert engine.scheduler.deferred_frees
    engine.add("other", [5] * 40, 2)
    engine.scheduler.schedule()
    counters = engine.counters()
    assert counters["kvloop_balance_checks_total"] == 2
    assert counters["kvloop_unbalanced_blocks"] == 0


def test_a_reference_that_nobody_accounts_for_is_told_once(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And stays on the books: it is a bug, whatever becomes of it."""
    lines: list[str] = []
    monkeypatch.setattr(conservation.logger, "error", lambda text, *values: lines.append(text % values))
    engine = RetainingEngine(vllm_config, 40)
    engine.add("r", TOKENS, 5)
    engine.step()
    stray = [engine.pool.blocks[number] for number in (30, 31)]
    engine.pool.touch(stray)
    engine.step()
    engine.step()
    engine.pool.free_blocks(stray)
    engine.run()
    assert engine.counters()["kvloop_unbalanced_blocks"] == 2
    assert lines == ["2 block references are not accounted for: this is a bug, please report it"]


def test_a_turn_is_retained_unless_its_router_says_that_it_need_not_be(half: Any) -> None:
    """As a client has asked."""
    for retain in ({}, {"kvloop_retain": True}):
        _, answer = finish(half, DECODED | retain)
        assert answer is not None
    assert finish(half, DECODED | {"kvloop_retain": False}) == (False, None)


def test_reads_are_counted_with_their_bytes(half: Any) -> None:
    """On decode what prefill handed over; nothing that failed, nothing that was never ordered."""
    for request_id, failed in (("a", False), ("b", True), ("c", False)):
        params = {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_engine_id": "p"}
        request = make_request(request_id, TOKENS, kv_transfer_params=params | REMOTE)
        blocks = SimpleNamespace(
            get_unhashed_block_ids_all_groups=lambda: [[1, 2, 3]],
            get_block_ids=lambda: ([1, 2, 3],),
            blocks=[[]],
        )
        half.update_state_after_alloc(request, blocks, 0 if request_id == "c" else 48)
        done = {"finished_recving": {request_id}, "failed_recving": {request_id} if failed else set()}
        half.update_connector_output(KVConnectorOutput(**done))
    assert half._tally.counts() == {'kvloop_read_bytes_total{direction="handover"}': 3 * 100}


REMOTE = {
    "remote_request_id": "r",
    "remote_host": "h",
    "remote_port": 1,
    "tp_size": 1,
    "remote_num_tokens": 48,
}
