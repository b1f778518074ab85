"""The router's process: its event loop, its two ports, its end.

Both ports are served by one loop, so that nothing needs a lock. SIGINT or SIGTERM makes the health
checks say so, stops taking requests after a delay, lets answers under way finish for a bounded time, and
ends; a second one ends at once.
"""

import asyncio
import contextlib
import gc
import logging
import resource
import secrets
import signal
import socket
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import uvicorn
import uvloop
from starlette.applications import Starlette

from kvloop.core.decision import AppendLimits
from kvloop.core.lineage import LineageTable
from kvloop.errors import UserError
from kvloop.router.access import KeyState, engine_key, key_ring
from kvloop.router.admin import admin_app
from kvloop.router.app import App
from kvloop.router.config import RouterConfig
from kvloop.router.conversations import Conversations
from kvloop.router.downstream import ClientConnection, Service
from kvloop.router.fleet import Fleet
from kvloop.router.fleet_metrics import FleetState
from kvloop.router.gate import Gate, limited
from kvloop.router.health import Prober
from kvloop.router.heartbeat import renewing
from kvloop.router.log import configure
from kvloop.router.membership import Membership, rules_of
from kvloop.router.metrics import Metrics
from kvloop.router.models import Models
from kvloop.router.opening import Opening
from kvloop.router.passing import Passing
from kvloop.router.policies import load_policy
from kvloop.router.proxy import Proxy
from kvloop.router.request import BodyBudget
from kvloop.router.responses import Responses
from kvloop.router.sources import sourced
from kvloop.router.store import MemoryStore
from kvloop.router.tls import HANDSHAKE_TIMEOUT_S, client_tls, engine_tls
from kvloop.router.watch import Reloads

LINEAGE_KEY_BYTES = 32
LISTEN_BACKLOG = 2048
DRAIN_POLL_S = 0.05
OPEN_FILES = 65536
YOUNG_OBJECTS = 20_000  # some hundred requests' between two looks for cycles; next to none are left behind

logger = logging.getLogger("kvloop.router")


@dataclass(frozen=True, slots=True)
class Ports:
    """Where a router listens, also where it was told to take any free port (0)."""

    port: int
    admin_port: int


def run(config: RouterConfig) -> None:
    """Serve until SIGINT or SIGTERM. UserError if a port is taken."""
    configure(config.log_format)
    _raise_open_files()
    gc.freeze()  # what is there now stays: no collection has to walk through it again
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(config))


def _raise_open_files() -> None:
    """Each request takes up to three sockets, and the usual soft limit is 1,024 files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _url(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


async def _run(config: RouterConfig) -> None:
    loop = asyncio.get_running_loop()
    stopping, hurry = asyncio.Event(), asyncio.Event()

    def stop() -> None:
        (hurry if stopping.is_set() else stopping).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    async with serving(config, hurry) as ports:
        scheme = "http" if config.tls.ssl_certfile is None else "https"
        logger.info("ready on %s", _url(scheme, config.host, ports.port))
        logger.info("metrics and conversations on %s", _url("http", config.admin_host, ports.admin_port))
        await stopping.wait()
        logger.info("stopping")


@contextlib.asynccontextmanager
async def serving(config: RouterConfig, hurry: asyncio.Event | None = None) -> AsyncIterator[Ports]:
    """A router on the running loop, as long as the block lasts.

    On leaving it drains, unless `hurry` is set.
    """
    metrics, reloads = Metrics(), Reloads()
    async with (
        renewing(config, metrics) as leases,
        key_ring(config, reloads) as ring,
        client_tls(config, reloads) as tls,
    ):
        fleet = _fleet(config)
        membership = Membership(fleet, rules_of(config, engine_tls(config)))
        conversations = Conversations(
            LineageTable(config.limits.max_conversation_keys, config.limits.max_conversation_bytes),
            secrets.token_bytes(LINEAGE_KEY_BYTES),
            config.tenant_header,
            config.retention_s,
            time.monotonic_ns,
            leases,
        )
        conversations.on_incarnation = fleet.saw_incarnation
        store = _store(config)
        metrics.observe(conversations.table, store)
        metrics.registry.register(FleetState(membership, reloads))
        if ring is not None:
            metrics.registry.register(KeyState(ring))
        models = Models(fleet.servers, config.models_interval_s)
        budget = BodyBudget(config.limits.max_buffered_bytes)
        responses = Responses(store, conversations, budget, config.limits.max_body_bytes)
        proxy = Proxy(
            config, fleet, conversations, metrics, Opening(conversations, models, responses), models
        )
        app = App(proxy, Passing(config, fleet, models, metrics), fleet, models, responses)
        service = Service(
            app if ring is None else limited(app),
            config.limits,
            config.timeouts,
            budget,
            Gate(ring, config.access.engine_api_key_file is not None),
        )
        admin = admin_app(fleet, conversations, metrics, proxy.explanations, membership)
        try:
            async with (
                engine_key(config, reloads, membership),
                sourced(config, membership, reloads),
                contextlib.aclosing(Prober(fleet, config.health)),
                models.watching(),
                _public(config, service, tls) as (server, port),
                _admin(config, admin) as admin_port,
            ):
                yield Ports(port, admin_port)
                fleet.stopping = True
                await _wait(config.drain_delay_s, hurry)
                server.close()
                await _drain(service, config.timeouts.drain_timeout_s, hurry)
        finally:
            _end(service, proxy, fleet)


def _end(service: Service, proxy: Proxy, fleet: Fleet) -> None:
    for connection in list(service.connections):
        connection.abort()
    proxy.close()
    fleet.close()


def _store(config: RouterConfig) -> MemoryStore:
    limits, age_ns = config.limits, int(config.timeouts.response_age_s * 1e9)
    return MemoryStore(limits.max_responses, limits.max_response_bytes, age_ns, time.monotonic_ns)


def _fleet(config: RouterConfig) -> Fleet:
    return Fleet(
        [],
        [],
        time.monotonic_ns,
        load_policy(config.choice.policy),
        AppendLimits(
            config.choice.append_max_tokens,
            config.choice.append_budget_tokens,
            round(1000 * config.choice.append_stall_weight),
        ),
    )


@contextlib.asynccontextmanager
async def _public(
    config: RouterConfig, service: Service, tls: ssl.SSLContext | None
) -> AsyncIterator[tuple[asyncio.Server, int]]:
    """The clients' port, open as long as the block lasts."""
    listening = _listen(config.host, config.port, "--host, --port")
    server = await asyncio.get_running_loop().create_server(
        lambda: ClientConnection(service),
        sock=listening,
        backlog=LISTEN_BACKLOG,
        ssl=tls,
        ssl_handshake_timeout=None if tls is None else HANDSHAKE_TIMEOUT_S,
    )
    try:
        yield server, listening.getsockname()[1]
    finally:
        server.close()


async def _wait(delay_s: float, hurry: asyncio.Event | None) -> None:
    """Let load balancers see that the router is about to stop, before it does."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(delay_s):
            await (hurry or asyncio.Event()).wait()


async def _drain(service: Service, timeout_s: float, hurry: asyncio.Event | None) -> None:
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    for connection in list(service.connections):
        connection.drain()
    while service.connections and asyncio.get_running_loop().time() < deadline_s:
        if hurry is not None and hurry.is_set():
            return
        await asyncio.sleep(DRAIN_POLL_S)


class _AdminServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are the router's own


@contextlib.asynccontextmanager
async def _admin(config: RouterConfig, app: Starlette) -> AsyncIterator[int]:
    """The admin application on its own port, which comes back."""
    listening = _listen(config.admin_host, config.admin_port, "--admin-host, --admin-port")
    settings = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1
    )
    server = _AdminServer(settings)
    task = asyncio.get_running_loop().create_task(server.serve(sockets=[listening]))
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        await task


def _listen(host: str, port: int, flags: str) -> socket.socket:
    """A listening socket. UserError, which names the flags, if there cannot be one."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address[:2], family=family, backlog=LISTEN_BACKLOG)
    except OSError as error:
        raise UserError(f"cannot listen on {host}:{port} ({flags}): {error.strerror or error}") from None
