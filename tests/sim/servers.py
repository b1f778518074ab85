"""Simulated engines behind their API, and a router in front of them, in the test's own loop."""

import contextlib
import secrets
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from kvloop.local.ports import free_ports
from kvloop.router.config import Choice, Leases, RouterConfig, Timeouts
from kvloop.router.serve import serving as serving_router
from kvloop.sim.command import serving
from kvloop.sim.config import EngineConfig
from kvloop.sim.driver import Driver
from kvloop.sim.engine import Engine
from kvloop.sim.profile import Profile, load_profile

KEY = b"0123456789abcdef0123456789abcdef"
HOST = "127.0.0.1"
MODEL = "sim"


@contextlib.asynccontextmanager
async def engine(
    name: str, port: int = 0, profile: Profile | None = None, **changes: Any
) -> AsyncIterator[tuple[str, Driver]]:
    """One engine: its URL, and what drives it."""
    ports = free_ports(3, HOST)
    config = EngineConfig(
        engine_id=name,
        incarnation=secrets.token_hex(4),
        key=KEY,
        control=(HOST, ports[0]),
        side_channel=(HOST, ports[1]),
        max_bulk_steps=8,
    )
    port = port or ports[2]
    made = Engine(replace(config, **changes), profile or load_profile("instant"))
    async with serving(made, HOST, port, MODEL) as driver:
        yield f"http://{HOST}:{port}", driver


@dataclass
class Deployment:
    """A router between simulated engines."""

    client: httpx.AsyncClient
    prefill: list[Driver]
    decode: list[Driver]

    async def chat(self, messages: list[dict[str, Any]], **fields: Any) -> httpx.Response:
        """One chat turn, 40 tokens of answer if not said otherwise."""
        headers = fields.pop("headers", None)
        body = {"model": MODEL, "messages": messages, "max_tokens": 40, **fields}
        answer = await self.client.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer

    def wrong_answers(self) -> int:
        """Requests that any engine computed from other tokens' KV."""
        return sum(one.engine.counters.get("wrong_answers", 0) for one in self.prefill + self.decode)

    def check(self) -> None:
        """The engines' books balance."""
        for driver in self.prefill + self.decode:
            driver.engine.check_integrity()


@contextlib.asynccontextmanager
async def deployment(
    prefill: int = 1,
    decode: int = 1,
    profile: Profile | None = None,
    returns: bool = True,
    **changes: Any,
) -> AsyncIterator[Deployment]:
    """Engines, prefill without a prefix cache of its own, and a router."""
    async with contextlib.AsyncExitStack() as stack:
        secret = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "secret"
        secret.write_bytes(KEY)
        plain = {"profile": profile, **changes}
        prefills = [
            await stack.enter_async_context(engine(f"p{number}", retains=False, prefix_cache=False, **plain))
            for number in range(prefill)
        ]
        decodes = [
            await stack.enter_async_context(engine(f"d{number}", reads=False, **plain))
            for number in range(decode)
        ]
        config = RouterConfig(
            prefill=tuple(url for url, _ in prefills),
            decode=tuple(url for url, _ in decodes),
            host=HOST,
            port=0,
            admin_port=0,
            return_enabled=returns,
            choice=Choice("sticky"),
            leases=Leases(secret_file=str(secret)),
            timeouts=Timeouts(drain_timeout_s=0.2),
        )
        ports = await stack.enter_async_context(serving_router(config))
        client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://{HOST}:{ports.port}", timeout=20)
        )
        yield Deployment(client, [driver for _, driver in prefills], [driver for _, driver in decodes])
