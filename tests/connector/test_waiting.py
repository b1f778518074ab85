"""A request that waits finds in the prefix cache what was there when it came, or else no lease is left."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from vllm.config import VllmConfig
from vllm.v1.request import RequestStatus

from kvloop.connector import waiting as module
from tests.connector.half import RetainingEngine
from tests.connector.real_scheduler import BLOCK, make_config

BLOCKS = 60
RETAINED = {"do_remote_decode": False, "do_remote_prefill": False}
NOT_RETAINED = RETAINED | {"kvloop_retain": False}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    """An engine that runs two requests at a time; all others wait, blocks or no blocks."""
    folder: Path = tmp_path_factory.mktemp("model")
    return make_config(folder, caching=True, max_seqs=2)


def prompt(number: int, tokens: int) -> list[int]:
    """A prompt; of the same number, the shorter is a prefix of the longer."""
    return [10 + number] * tokens


class Watched(RetainingEngine):
    """Knows what each request would hit when it arrives, and what it did when it was scheduled."""

    def __init__(self, config: VllmConfig, blocks: int = BLOCKS) -> None:
        super().__init__(config, blocks, max_retained_share=1.0)
        self.shrunk: dict[str, tuple[int, int]] = {}
        """Hits in tokens, before and after, of requests for which every lease had not given way."""
        self._there: dict[str, int] = {}
        waiting: Any = self.half._waiting
        waiting._reclaim, waiting._has_leases = (
            self._noting(waiting._reclaim),
            self._noting(waiting._has_leases),
        )

    def _noting(self, ask: Callable[..., bool]) -> Callable[..., bool]:
        def asked(*args: int) -> bool:
            answer = ask(*args)
            if not answer:  # no lease is left: vLLM does what it would have done without any
                self._there.clear()
            return answer

        return asked

    def arrive(self, name: str, tokens: list[int], max_tokens: int, params: dict[str, Any]) -> int:
        """A request arrives: how many tokens it would hit."""
        request = self.add(name, tokens, max_tokens, dict(params))
        self._there[name] = self.scheduler.kv_cache_manager.get_computed_blocks(request)[1]
        return self._there[name]

    def go(self, max_steps: int = 3_000) -> None:
        """Step until nothing is left to do, or so often."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished_requests():
                assert not self.half._waiting._wanted, "of requests that are gone"
                return
            for new in self.step().scheduled_new_reqs:
                before = self._there.pop(new.req_id, 0)
                if new.num_computed_tokens < before:
                    self.shrunk[new.req_id] = before, new.num_computed_tokens
            self.half._waiting.check_integrity()
        assert max_steps < 3_000, "a request is stuck"

    def leases(self) -> int:
        """Leases that could give way."""
        return self.counters()['kvloop_leases{state="granted"}']


def filled(config: VllmConfig) -> Watched:
    """Free blocks that hold what nobody leases, freed first, and leases on the rest."""
    engine = Watched(config)
    engine.arrive("unleased", prompt(0, 10 * BLOCK + 1), 1, NOT_RETAINED)
    engine.go()
    for number in range(1, 7):
        engine.arrive(f"leased{number}", prompt(number, 7 * BLOCK + 1), 1, RETAINED)
        engine.go()
    return engine


def test_leases_give_way_before_a_waiting_request_s_hit(config: VllmConfig) -> None:
    """Two long requests run, and need more than the free blocks that hold nothing; the third waits for its
    turn, and finds all of its ten blocks."""
    engine = filled(config)
    leases = engine.leases()
    assert leases == 6
    for number in (20, 21):
        engine.arrive(f"long{number}", prompt(number, 10 * BLOCK), 40, NOT_RETAINED)
    assert engine.arrive("waits", prompt(0, 10 * BLOCK + 1), 1, NOT_RETAINED) == 10 * BLOCK
    engine.go()
    assert not engine.shrunk
    assert 0 < engine.leases() < leases, "some leases give way, not all"


def test_without_the_guard_it_would_shrink(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above sees what it is for."""
    monkeypatch.setattr(module.WaitingHits, "arrive", lambda *_: None)
    engine = filled(config)
    for number in (20, 21):
        engine.arrive(f"long{number}", prompt(number, 10 * BLOCK), 40, NOT_RETAINED)
    engine.arrive("waits", prompt(0, 10 * BLOCK + 1), 1, NOT_RETAINED)
    engine.go()
    assert engine.shrunk


def test_other_free_blocks_are_handed_out_first(config: VllmConfig) -> None:
    """Where there are enough that nobody waits for, no lease gives way, though they are younger."""
    engine = Watched(config)
    engine.arrive("waited for", prompt(0, 10 * BLOCK + 1), 1, NOT_RETAINED)
    engine.go()
    engine.arrive("leased", prompt(1, 7 * BLOCK + 1), 1, RETAINED)
    engine.go()
    for number in (20, 21):
        engine.arrive(f"long{number}", prompt(number, 10 * BLOCK), 40, NOT_RETAINED)
    engine.arrive("waits", prompt(0, 10 * BLOCK + 1), 1, NOT_RETAINED)
    engine.go()
    assert not engine.shrunk
    assert engine.leases() == 1


def test_requests_that_are_gone_want_nothing(config: VllmConfig) -> None:
    """One that is aborted while it waits, and one of whose kind there are two."""
    engine = filled(config)
    for number in (20, 21):
        engine.arrive(f"long{number}", prompt(number, 10 * BLOCK), 40, NOT_RETAINED)
    for name in ("one", "two"):
        engine.arrive(name, prompt(0, 10 * BLOCK + 1), 1, NOT_RETAINED)
    engine.go(1)
    engine.scheduler.finish_requests("one", RequestStatus.FINISHED_ABORTED)
    engine.half._waiting.check_integrity()
    assert engine.half._waiting._wanted
    engine.go()
    assert not engine.shrunk


@pytest.mark.parametrize(("name", "limit"), [("MAX_HASHES", 9), ("MAX_PASSED_OVER", 3)])
def test_what_is_kept_for_those_that_wait_is_bounded(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, name: str, limit: int
) -> None:
    """Beyond its bound the guard lets vLLM do as it would."""
    monkeypatch.setattr(module, name, limit)
    engine = filled(config)
    for number in (20, 21):
        engine.arrive(f"long{number}", prompt(number, 10 * BLOCK), 40, NOT_RETAINED)
    engine.arrive("waits", prompt(0, 10 * BLOCK + 1), 1, NOT_RETAINED)
    engine.go()
    assert engine.shrunk
    assert engine.leases() > 0


ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 4),  # steps since the one before
        st.integers(0, 9),  # which prompt
        st.integers(1, 400),  # its tokens
        st.integers(1, 60),  # its answer's
        st.booleans(),  # retained
    ),
    min_size=3,
    max_size=25,
)


@settings(max_examples=60, deadline=None, phases=[Phase.explicit, Phase.generate])  # shrinks take minutes
@given(arrivals=ARRIVALS)
def test_no_hit_shrinks_while_a_lease_is_left(
    config: VllmConfig, arrivals: list[tuple[int, int, int, int, bool]]
) -> None:
    """Whatever arrives when: a request hits at least what it would have when it came, or no lease is left."""
    engine = Watched(config)
    for number, (steps, which, tokens, answer, retain) in enumerate(arrivals):
        engine.go(steps)
        params = RETAINED if retain else NOT_RETAINED
        engine.arrive(f"request{number}", prompt(which, tokens), answer, params)
    engine.go()
    assert not engine.shrunk
    assert engine.counters()["kvloop_unbalanced_blocks"] == 0
