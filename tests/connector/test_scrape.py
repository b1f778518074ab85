"""The API server asks its engines over the control channel, and does not wait for one that is gone."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvloop.connector import scrape as module
from kvloop.connector.scrape import Scraper, local_engines
from kvloop.control.channel import ControlChannel
from kvloop.local.ports import free_ports
from kvloop.wire.control import Failed, Message, Stat, StatReply
from kvloop.wire.seal import Seal
from tests.connector.fakes import KEY

HOST = "127.0.0.1"


def serving(port: int, reply: Message, key: bytes = KEY) -> ControlChannel:
    """An engine's control channel that answers every question so."""

    def serve(message: Message, _: Any) -> Message:
        assert isinstance(message, Stat)
        return reply

    channel = ControlChannel((HOST, port), Seal(key, f"engine/{port}"), on_reply=lambda *_: None, serve=serve)
    channel.start()
    return channel


def scraped(engines: dict[int, int]) -> str:
    """What is read of engines at these ports."""

    async def run() -> str:
        scraper = Scraper(KEY, {rank: (HOST, port) for rank, port in engines.items()})
        try:
            return await scraper.text()
        finally:
            scraper.stop()

    return asyncio.run(run())


def reply(blocks: int) -> StatReply:
    """An engine that holds so many blocks."""
    return StatReply("e", "i", {"kvloop_lease_blocks": blocks})


def test_each_engine_is_asked_and_told_apart() -> None:
    """By its data-parallel rank, as vLLM's own metrics are."""
    one, other = free_ports(2, HOST)
    channels = [serving(one, reply(3)), serving(other, reply(5))]
    text = scraped({0: one, 1: other})
    for channel in channels:
        channel.stop()
    assert 'kvloop_lease_blocks{engine="0"} 3\n' in text
    assert 'kvloop_lease_blocks{engine="1"} 5\n' in text


@pytest.mark.parametrize("how", ["gone", "foreign", "confused"])
def test_an_engine_that_does_not_answer_is_left_out(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Nobody there, somebody with another secret, or one that cannot say."""
    monkeypatch.setattr(module, "REPLY_TIMEOUT_S", 0.5)
    one, other = free_ports(2, HOST)
    channels = [serving(one, reply(3))]
    if how == "foreign":
        channels.append(serving(other, reply(5), key=bytes(32)))
    elif how == "confused":
        channels.append(serving(other, Failed("internal error")))
    text = scraped({0: one, 1: other})
    for channel in channels:
        channel.stop()
    assert 'engine="0"' in text
    assert 'engine="1"' not in text


def config(secret: Path, connector: str = "KvloopConnector", **parallel: Any) -> Any:
    """The API server's configuration."""
    extra = {
        "kvloop_secret_file": str(secret),
        "kvloop_control_host": "10.0.0.1",
        "kvloop_control_port": 6000,
    }
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector=connector, kv_connector_extra_config=extra),
        parallel_config=SimpleNamespace(
            **{"data_parallel_rank": 0, "data_parallel_size_local": 1} | parallel
        ),
    )


@pytest.mark.parametrize(
    ("parallel", "ports"),
    [
        ({}, {0: 6000}),
        ({"data_parallel_size_local": 3}, {0: 6000, 1: 6001, 2: 6002}),
        ({"data_parallel_rank": 4, "data_parallel_size_local": 2}, {4: 6004, 5: 6005}),
        ({"data_parallel_rank": 7}, {7: 6007}),
    ],
)
def test_the_ranks_of_this_machine_are_asked(
    tmp_path: Path, parallel: dict[str, int], ports: dict[int, int]
) -> None:
    """Each at the port that its connector listens on."""
    secret = tmp_path / "secret"
    secret.write_bytes(KEY)
    engines = local_engines(config(secret, **parallel))
    assert engines == (KEY, {rank: ("10.0.0.1", port) for rank, port in ports.items()})


def test_where_there_is_no_engine_of_ours_nobody_is_asked(tmp_path: Path) -> None:
    """No connector, another one, or all ranks on other machines."""
    secret = tmp_path / "secret"
    secret.write_bytes(KEY)
    assert local_engines(SimpleNamespace(kv_transfer_config=None)) is None
    assert local_engines(config(secret, connector="NixlConnector")) is None
    assert local_engines(config(secret, data_parallel_size_local=0)) is None
