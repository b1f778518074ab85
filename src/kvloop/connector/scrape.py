"""Asks this server's engines for their counters when Prometheus asks the server for its own.

The engines' schedulers live in other processes than the API server, and each has a control channel that
answers `stat` on a thread of its own: also while its engine computes, or is idle. So the numbers are of now,
whatever the engine does, and nothing is counted twice by several API servers.
"""

import asyncio
import secrets
from collections.abc import Mapping
from typing import Any

from kvloop.connector.metrics import exposition
from kvloop.connector.settings import read_settings
from kvloop.control.address import Address
from kvloop.control.channel import ControlChannel
from kvloop.wire.control import Message, Stat, StatReply
from kvloop.wire.seal import Seal

CONNECTOR = "KvloopConnector"
REPLY_TIMEOUT_S = 1.0
"""An answer takes a millisecond; a scrape must not wait for an engine that is stuck or gone."""


def local_engines(vllm_config: Any) -> tuple[bytes, dict[int, Address]] | None:
    """The deployment's key, and the control address of each data-parallel rank on this machine. None for a
    server whose connector is not kvloop's.

    The control host is the same for all of them, and the ports follow each other (see `settings`). Ranks on
    other machines are seen by those machines' scrapes.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector != CONNECTOR:
        return None
    from vllm import envs

    parallel = vllm_config.parallel_config
    first = parallel.data_parallel_rank
    settings = {
        rank: read_settings(
            transfer.kv_connector_extra_config,
            side_channel_host=str(envs.VLLM_NIXL_SIDE_CHANNEL_HOST),
            data_parallel_index=rank,
        )
        for rank in range(first, first + parallel.data_parallel_size_local)
    }
    if not settings:
        return None
    addresses = {rank: (found.control_host, found.control_port) for rank, found in settings.items()}
    return settings[first].key, addresses


class Scraper:
    """Asks a fixed set of engines. For one event loop."""

    def __init__(self, key: bytes, addresses: Mapping[int, Address]) -> None:
        self._addresses = addresses
        self._channel = ControlChannel(
            None, Seal(key, f"scrape/{secrets.token_hex(8)}"), on_reply=self._on_reply
        )
        self._channel.start()

    async def text(self) -> str:
        """Prometheus' text of what the engines count. Those that do not answer in time are left out."""
        replies = await asyncio.gather(*(self._ask(address) for address in self._addresses.values()))
        counted = zip(self._addresses, replies, strict=True)
        return exposition({rank: reply.counters for rank, reply in counted if reply is not None})

    async def _ask(self, address: Address) -> StatReply | None:
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Message] = loop.create_future()
        if not self._channel.send(address, Stat(), (loop, reply)):
            return None
        try:
            answer = await asyncio.wait_for(reply, REPLY_TIMEOUT_S)
        except TimeoutError:
            return None
        return answer if isinstance(answer, StatReply) else None

    def _on_reply(self, tag: Any, message: Message) -> None:
        loop, reply = tag
        loop.call_soon_threadsafe(_settle, reply, message)

    def stop(self) -> None:
        """Close the channel."""
        self._channel.stop()


def _settle(reply: "asyncio.Future[Message]", message: Message) -> None:
    if not reply.done():
        reply.set_result(message)
