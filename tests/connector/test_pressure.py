"""Retention never costs live work anything: vLLM's own scheduler, step by step with leases and without."""

from typing import Any

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput

from kvloop.connector.pressure import Pressure
from tests.connector.half import RetainingEngine
from tests.connector.real_scheduler import BLOCK, Engine, make_config

BLOCKS = 60
RETAINED = {"do_remote_decode": False, "do_remote_prefill": False}


class Make:
    """Makes engines of one configuration; `share` of their blocks may be retained."""

    def __init__(self, config: VllmConfig) -> None:
        self.caching = config.cache_config.enable_prefix_caching
        self._config = config

    def __call__(self, share: float = 1.0, blocks: int = BLOCKS) -> RetainingEngine:
        """An engine."""
        return RetainingEngine(self._config, blocks, max_retained_share=share)

    def __repr__(self) -> str:
        return f"Make(caching={self.caching})"


@pytest.fixture(scope="module", params=[False, True], ids=["no prefix cache", "prefix cache"])
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Engines with a prefix cache, and without."""
    return Make(make_config(tmp_path_factory.mktemp("model"), caching=request.param, max_seqs=6))


def fill(engine: Engine, lengths: list[int]) -> None:
    """Requests that come and go; what they leave are leases, or nothing."""
    for number, length in enumerate(lengths):
        engine.add(f"before{number}", [number] * length, 2, dict(RETAINED))
    engine.run()


def told(step: SchedulerOutput) -> Any:
    """What a step's workers are told to compute, and which requests have lost their memory."""
    return step.num_scheduled_tokens, step.preempted_req_ids


def burst(engine: Engine, requests: list[tuple[int, int, int]]) -> list[Any]:
    """Requests, each with the step in which it arrives, its prompt's tokens and its answer's. What each step
    did."""
    steps = []
    waiting = sorted(enumerate(requests), key=lambda pair: pair[1][0])
    while waiting or engine.scheduler.has_unfinished_requests():
        while waiting and waiting[0][1][0] <= len(steps):
            number, (_, prompt, answer) = waiting.pop(0)
            engine.add(f"burst{number}", [500 + number] * prompt, answer, dict(RETAINED))
        steps.append(told(engine.step()))
        assert len(steps) < 3_000, "a request is stuck"
    return steps


REQUESTS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 500), st.integers(1, 200)), min_size=1, max_size=10
)


@settings(max_examples=50, deadline=None, phases=[Phase.explicit, Phase.generate])  # shrinks take minutes
@example(before=[64], requests=[(0, 154, 79), (0, 168, 70), (0, 281, 154), (36, 98, 32)])
@given(before=st.lists(st.integers(64, 400), min_size=1, max_size=8), requests=REQUESTS)
def test_a_burst_is_scheduled_as_if_nothing_were_retained(
    make: Make, before: list[int], requests: list[tuple[int, int, int]]
) -> None:
    """On an engine full of leases: the same tokens in the same step for all, the same preemptions."""
    with_leases, without = (make(share) for share in (1.0, 0.0))
    for engine in (with_leases, without):
        fill(engine, before)
    assert with_leases.counters()['kvloop_leases{state="granted"}'] > 0
    assert without.counters()['kvloop_leases{state="granted"}'] == 0
    assert burst(with_leases, requests) == burst(without, requests)
    refused = 'kvloop_allocations_total{outcome="refused"}'
    assert with_leases.counters()[refused] == without.counters()[refused]
    for engine in (with_leases, without):
        assert engine.counters()["kvloop_unbalanced_blocks"] == 0
        engine.half._leases.check_integrity()


def test_the_bursts_are_such_that_it_matters(make: Make) -> None:
    """There are preemptions, and allocations that only succeed because leases give way."""
    engine = make()
    fill(engine, [100] * 8)
    steps = burst(engine, [(0, 100, 60)] * 8)
    assert any(preempted for _, preempted in steps)
    counters = engine.counters()
    assert counters['kvloop_allocations_total{outcome="relieved"}'] > 0
    assert counters['kvloop_allocations_total{outcome="refused"}'] > 0


def test_just_so_many_leases_give_way_as_are_missing_blocks(make: Make) -> None:
    """Eight leases of seven blocks and three blocks free: a request of twelve takes two leases, not eight."""
    engine = make()
    fill(engine, [111] * 8)
    assert engine.pool.get_num_free_blocks() == 3
    engine.add("new", [500] * (12 * BLOCK), 1)
    engine.step()
    counters = engine.counters()
    assert counters['kvloop_leases{state="granted"}'] == 6
    assert counters['kvloop_leases{state="soft"}'] == 2
    assert counters['kvloop_allocations_total{outcome="relieved"}'] == 1


def test_a_claimed_lease_never_gives_way(make: Make) -> None:
    """Live work waits for its reader, as it would for a request."""
    engine = make()
    fill(engine, [111] * 8)
    table = engine.half._leases.table
    lease_ids = list(table._leases)
    for lease_id in lease_ids[:6]:
        chain = table._leases[lease_id].chain
        table.claim(lease_id, f"claim {lease_id}", chain, "", table._now_ns, incarnation=table.incarnation)
    engine.add("new", [500] * (30 * BLOCK), 1)
    assert not engine.step().num_scheduled_tokens
    assert engine.counters()['kvloop_leases{state="claimed"}'] == 6
    assert engine.counters()['kvloop_leases{state="granted"}'] == 0
    for lease_id in lease_ids[:6]:
        table.release(f"claim {lease_id}", table._now_ns)
    assert engine.step().num_scheduled_tokens == {"new": 256}


def test_a_request_s_own_hit_is_whole_although_its_lease_gives_way(make: Make) -> None:
    """The blocks that it shares with a lease are as good after the lease has ended for its sake."""
    engine = make(blocks=20)
    fill(engine, [111, 111])
    engine.add("next", [0] * 111 + [7] + [500] * 180, 4)
    (new,) = engine.step().scheduled_new_reqs
    assert engine.counters()['kvloop_leases{state="granted"}'] == 0
    assert new.num_computed_tokens == (112 if make.caching else 0)


class Manager:
    """A KV cache manager that wants `margin` blocks to be left free beside what is needed."""

    def __init__(self, free: int, needed: int, margin: int) -> None:
        self.free, self.needed, self.margin = free, needed, margin
        self.watermark_blocks = 0
        self.block_pool = self.coordinator = self

    def get_num_free_blocks(self) -> int:
        """Free blocks."""
        return self.free

    def get_num_blocks_to_allocate(self) -> int:
        """What the request lacks."""
        return self.needed

    def allocate_slots(self, _request: Any, **_: Any) -> str | None:
        """As vLLM's: either the whole request or its next chunk has to fit."""
        required = self.coordinator.get_num_blocks_to_allocate() + self.margin
        return "blocks" if required <= self.free else None


@pytest.mark.parametrize("margin", [0, 3])
@pytest.mark.parametrize("in_leases", range(12))
def test_what_vllm_wants_free_beside_the_request_is_made_free_too(margin: int, in_leases: int) -> None:
    """No more than that, and a block at a time it must not be."""
    manager: Any = Manager(2, 8, margin)
    asked: list[int] = []

    def reclaim(blocks: int) -> bool:
        nonlocal in_leases
        asked.append(blocks)
        freed = min(blocks, in_leases)
        manager.free += freed
        in_leases -= freed
        return freed > 0

    pressure = Pressure(reclaim)
    pressure.relieve(manager)
    blocks = manager.allocate_slots(None, reserved_blocks=margin)
    enough = manager.free >= 8 + margin
    assert blocks == ("blocks" if enough else None)
    assert manager.free <= 8 + margin
    assert (pressure.relieved_total, pressure.refused_total) == (int(enough), int(not enough))
    assert asked[0] == 6
    assert len(asked) <= 3
    assert manager.coordinator.get_num_blocks_to_allocate() == 8
