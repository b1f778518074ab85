"""`kv_transfer_params` in both directions: what router and prefill ask of an engine, and what it answers.

A request's say which hop it is, what to read back from and where to pull the prompt from; an answer's carry
prefill's hand-over with its account, or decode's handle.
"""

from typing import Any

import msgspec

from kvloop.sim.request import Finished, Handover, Hop

_HANDOVER_FIELDS = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "remote_block_ids")


class Params(msgspec.Struct):
    """`kv_transfer_params`, as the router and prefill set them."""

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    kvloop_handle: Any = None
    kvloop_incarnation: str = ""
    kvloop_retain: bool = True
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    remote_block_ids: list[list[int]] | None = None
    remote_num_tokens: int = 0
    remote_prefill_cached_tokens: int | None = None


def hop_of(params: Params) -> Hop:
    """Which hop a request is."""
    if params.do_remote_decode:
        return Hop.PREFILL
    return Hop.DECODE if params.do_remote_prefill else Hop.ALONE


def handover_of(params: Params, prompt_tokens: int) -> Handover | None:
    """Where to pull the prompt from; None where that is not said, or not as vLLM's prefill says it."""
    if not params.do_remote_prefill or any(getattr(params, name) is None for name in _HANDOVER_FIELDS):
        return None
    blocks = params.remote_block_ids
    if not blocks or len(blocks) != 1 or min(blocks[0], default=0) < 0:
        return None
    return Handover(
        engine_id=params.remote_engine_id or "",
        incarnation=params.kvloop_incarnation,
        request_id=params.remote_request_id or "",
        address=(params.remote_host or "", params.remote_port or 0),
        blocks=tuple(blocks[0]),
        token_count=min(params.remote_num_tokens, prompt_tokens),
        cached_tokens=params.remote_prefill_cached_tokens or 0,
    )


def answered(finished: Finished) -> dict[str, Any] | None:
    """`kv_transfer_params` of an answer: prefill's hand-over with its account, or decode's handle."""
    if finished.handover is not None:
        return _shown(finished.handover) | {"kvloop_turn": finished.turn}
    if finished.handle is None:
        return None
    return {"kvloop_handle": finished.handle, "kvloop_turn": finished.decoded}


def _shown(handover: Handover) -> dict[str, Any]:
    host, port = handover.address
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [handover.blocks],
        "remote_engine_id": handover.engine_id,
        "remote_request_id": handover.request_id,
        "remote_host": host,
        "remote_port": port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": handover.token_count,
        "remote_blocks_expiry_time": None,
        "kvloop_incarnation": handover.incarnation,
        "remote_prefill_cached_tokens": handover.cached_tokens,
    }
