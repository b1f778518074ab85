"""One stack for everything that may happen to leases: few blocks, short terms, books that are checked in
every step, and wall clocks that a test may set.

It belongs to this folder's tests alone, so that it is gone when others need the cores. Prefill keeps nothing
itself: what it does not compute it has from decode. After each test the books are right, and the leases that
it has left are ended, so that the next one begins with none; tests that are about how they end wait for it.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kvloop.local.ports import free_ports
from kvloop.local.server import ServerSpec
from kvloop.local.stack import Router, Stack
from kvloop.local.stack_config import StackConfig
from tests.e2e.conftest import BLOCK_TOKENS, run_stack, whole_again
from tests.e2e.counters import check_living
from tests.e2e.leases.books import end_leases
from tests.e2e.leases.clocks import Clocks
from tests.e2e.leases.front import Front
from tests.e2e.link import HOST, Link
from tests.e2e.turns import Pair

LEASE_S = 2.5
RENEW_S = 0.3
TERM_RENEWALS = 9
"""More renewals than fit into a lease's term: who has heard so many holds a lease by nothing else."""
CLAIM_TERM_MS = 4_000
CLAIM_TIMEOUT_MS = 3_500
PREFILL_BLOCKS = 96
DECODE_BLOCKS = 128

StartRouter = Callable[..., Router]


@pytest.fixture(scope="package")
def clocks(tmp_path_factory: pytest.TempPathFactory) -> Clocks:
    """The processes' wall clocks."""
    return Clocks(tmp_path_factory.mktemp("clocks"))


@pytest.fixture(scope="package")
def lease_stack(request: pytest.FixtureRequest, clocks: Clocks) -> Iterator[Stack]:
    """A prefill engine without a prefix cache, and a decode engine with one."""
    config = StackConfig(
        router=False,
        engine_flags=(
            *("--max-model-len", "1024"),
            *("--block-size", str(BLOCK_TOKENS)),
            *("--max-num-batched-tokens", "256"),
        ),
        prefill_flags=("--no-enable-prefix-caching", "--num-gpu-blocks-override", str(PREFILL_BLOCKS)),
        decode_flags=("--num-gpu-blocks-override", str(DECODE_BLOCKS)),
        engine_extra={
            "kvloop_check_every_step": True,
            "kvloop_lease_term": LEASE_S,
            "kvloop_claim_term_ms": CLAIM_TERM_MS,
            "kvloop_claim_timeout_ms": CLAIM_TIMEOUT_MS,
        },
        env={"VLLM_SERVER_DEV_MODE": "1"},  # has the prefix cache's reset
    )
    yield from run_stack(request, config, clocks.build)


@pytest.fixture(scope="package")
def secret(lease_stack: Stack) -> bytes:
    """The deployment's secret."""
    return (lease_stack.folder / "secret").read_bytes().strip()


@pytest.fixture
def pair(lease_stack: Stack, clocks: Clocks) -> Iterator[Pair]:
    """Both engines, running when the test begins."""
    pair = whole_again(lease_stack)
    yield pair
    clocks.set_right()
    check_living(pair)
    if pair.decode.running:
        end_leases(pair.decode)


@pytest.fixture
def link(pair: Pair, secret: bytes) -> Iterator[Link]:
    """A link to decode's control port, on which all is well until a test says otherwise."""
    with Link(secret, pair.decode.control_port) as link:
        yield link


@pytest.fixture
def front(pair: Pair, link: Link, secret: bytes) -> Iterator[Front]:
    """Decode for those whose control messages are to take the link."""
    with Front(pair.decode, link, secret) as front:
        yield front


@pytest.fixture
def start_router(pair: Pair, lease_stack: Stack, clocks: Clocks) -> Iterator[StartRouter]:
    """Starts a router in front of the pair; it ends with the test."""
    with ExitStack() as routers:

        def start(
            decode_url: str = pair.decode.url, policy: str = "fixed", placement: str = "sticky"
        ) -> Router:
            port, admin = free_ports(2, HOST)
            argv = [
                *(sys.executable, "-m", "kvloop.cli", "route", "--host", HOST, "--port", str(port)),
                *("--admin-host", HOST, "--admin-port", str(admin)),
                *("--prefill", pair.prefill.url, "--decode", decode_url),
                *("--secret-file", str(lease_stack.folder / "secret"), "--lease-policy", policy),
                *("--lease-term-s", str(LEASE_S), "--renew-interval-s", str(RENEW_S)),
                *("--policy", placement),
            ]
            log = lease_stack.folder / f"router-{port}.log"
            environment = clocks.router.environment(os.environ)
            router = Router(ServerSpec("router", tuple(argv), environment, HOST, port, log), admin)
            routers.callback(router.shut_down)
            router.start()
            lease_stack.wait([router])
            return router

        yield start
