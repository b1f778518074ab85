"""An engine's polling threads sleep between looks, where it is told so, and its worker keeps its cores."""

import os
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.device_communicators import shm_broadcast

from kvloop.connector import cores


@pytest.fixture(autouse=True)
def paced_no_longer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test leaves this process's own queue readers asleep."""
    yield
    monkeypatch.setattr(cores, "_bindings", list)
    cores.pace(0)


class AgentConfig:
    """NIXL's configuration, as its Python API fills it."""

    pthrDelay = 0  # noqa: N815 - NIXL's name
    useProgThread = False  # noqa: N815


def built(binding: Any) -> Any:
    """A configuration, filled as NIXL's Python API does it."""
    config = binding.nixlAgentConfig()
    config.useProgThread = True
    config.pthrDelay = 0
    return config


def test_the_progress_thread_is_paced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever delay NIXL's API sets; nothing else is touched, the last call counts, and 0 restores it."""
    bindings = [SimpleNamespace(nixlAgentConfig=AgentConfig) for _ in range(2)]
    monkeypatch.setattr(cores, "_bindings", lambda: bindings)
    for delay_us in (500, 700, 0):
        cores.pace(delay_us)
        for binding in bindings:
            config = built(binding)
            assert isinstance(config, AgentConfig)
            assert (config.pthrDelay, config.useProgThread) == (delay_us, True)
            assert len(type(config).__mro__) == 3, "configurations are not stacked"


def test_a_machine_without_nixl_has_nothing_to_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router's machine, or one with another transport."""
    monkeypatch.setattr(cores, "_bindings", list)
    cores.pace(500)


def test_readers_of_message_queues_sleep_between_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they call between two looks sleeps while engines share cores, and yields as vLLM's again after."""
    slept: list[float] = []
    monkeypatch.setattr(cores, "_bindings", list)
    monkeypatch.setattr(time, "sleep", slept.append)
    queues: Any = shm_broadcast
    yielding = queues.sched_yield
    for delay_us, naps in ((500, 1), (700, 2), (0, 2)):
        cores.pace(delay_us)
        queues.sched_yield()
        assert slept == [cores.QUEUE_DELAY_S] * naps
    assert queues.sched_yield is yielding


def test_cores_are_given_back() -> None:
    """Also where the block fails."""
    before = os.sched_getaffinity(0)

    def build() -> None:
        os.sched_setaffinity(0, {min(before)})
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), cores.cores_kept():
        build()
    assert os.sched_getaffinity(0) == before
