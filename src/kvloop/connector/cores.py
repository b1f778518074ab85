"""How an engine's threads wait, where engines share the cores of a machine.

On a GPU machine with cores to spare, polling without a pause is wanted: it saves microseconds. On shared
cores it takes half of what the computing threads need. Two kinds of threads of an engine poll so: NIXL's
progress thread, for as long as the engine lives, and the readers of vLLM's message queues, for a second
after each message, which while requests come is always.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.distributed.device_communicators import shm_broadcast

QUEUE_DELAY_S = 0.0002
"""Between two looks of a message queue's reader. Measured on two cores: a returned turn's first token comes
13 of 450 ms earlier."""


def pace(delay_us: int) -> None:
    """Let this process's polling threads sleep: NIXL's for `delay_us`, queue readers for `QUEUE_DELAY_S`.

    To be called before they are made; 0 restores polling without a pause.
    """
    _pace_progress_thread(delay_us)
    _pace_message_queues(QUEUE_DELAY_S if delay_us else None)


def _pace_message_queues(delay_s: float | None) -> None:
    """vLLM's queue readers call `sched_yield` of their module between two looks."""
    queues: Any = shm_broadcast
    original = getattr(queues, "kvloop_original", queues.sched_yield)
    queues.kvloop_original = original
    queues.sched_yield = original if delay_s is None else lambda: time.sleep(delay_s)


def _pace_progress_thread(delay_us: int) -> None:
    """Make NIXL's progress thread sleep `delay_us` between polls; 0 restores its spinning.

    NIXL's C++ configuration has the delay (`pthrDelay`, microseconds); its Python API sets it to 0.
    """
    for binding in _bindings():
        config = binding.nixlAgentConfig
        base = getattr(config, "kvloop_base", config)

        class PacedConfig(base):  # type: ignore[misc, valid-type]
            kvloop_base = base

            def __setattr__(self, name: str, value: Any) -> None:
                super().__setattr__(name, delay_us if name == "pthrDelay" else value)

        binding.nixlAgentConfig = PacedConfig


@contextmanager
def cores_kept() -> Iterator[None]:
    """Undo what the block does to this thread's cores.

    On a CPU vLLM's NIXL worker moves the thread that builds it to the last core of each NUMA node, away from
    the one that `VLLM_CPU_OMP_THREADS_BIND` gave it. That thread computes, too: without this, two engines
    pinned to two cores both compute on the second.
    """
    cores = os.sched_getaffinity(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _bindings() -> list[Any]:
    found = []
    for package in ("nixl_cu13", "nixl_cu12", "nixl_rocm"):
        try:
            api = __import__(f"{package}._api", fromlist=["_api"])
        except ImportError:
            continue
        found.append(api.nixlBind)
    return found
