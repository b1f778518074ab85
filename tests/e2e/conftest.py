"""Real engines, shared by all tests of a session: they start once, and their logs are shown where a test
fails.

`pair` is the plain deployment: no prefix cache on either side, so that every token is local, returned or
computed for one reason only. `small` is the awkward one: prefill with a prefix cache, few blocks, short
leases, short claims.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from kvloop.local.server import Server
from kvloop.local.stack import BuildEngine, Stack
from kvloop.local.stack_config import StackConfig
from tests.e2e.counters import check_living
from tests.e2e.turns import Pair

CLAIM_TERM_MS = 3_000
# A claim takes a millisecond; on a machine that tests share, the thread that answers may have to wait for
# its core.
CLAIM_TIMEOUT_MS = 5_000
LOG_TAIL_LINES = 40
BLOCK_TOKENS = 32


def run_stack(
    request: pytest.FixtureRequest, config: StackConfig, build: BuildEngine | None = None
) -> Iterator[Stack]:
    """Start a stack, show its logs with failures while it lives, stop it."""
    with Stack(config) if build is None else Stack(config, build=build) as stack:
        request.config.stash.setdefault(_STACKS, []).append(stack)
        yield stack


_STACKS: pytest.StashKey[list[Stack]] = pytest.StashKey()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Show the engines' last lines with a failure."""
    report = yield
    if report.failed:
        for stack in item.config.stash.get(_STACKS, []):
            for server in stack.servers:
                report.sections.append((f"log of {server.name}", server.log_tail(LOG_TAIL_LINES)))
    return report


@pytest.fixture(scope="session")
def pair_stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """One prefill engine and one decode engine, both without a prefix cache."""
    yield from run_stack(
        request,
        StackConfig(
            router=False,
            engine_flags=("--max-model-len", "4096", "--block-size", str(BLOCK_TOKENS)),
            prefill_flags=("--no-enable-prefix-caching",),
            decode_flags=("--no-enable-prefix-caching",),
            engine_extra={
                "kvloop_claim_timeout_ms": CLAIM_TIMEOUT_MS,
                "kvloop_claim_term_ms": CLAIM_TERM_MS,
                "kvloop_check_every_step": True,
            },
        ),
    )


def whole_again(stack: Stack) -> Pair:
    """The stack's first two engines, those that a test has killed started anew."""
    dead: list[Server] = [engine for engine in (*stack.prefill, *stack.decode) if not engine.running]
    for engine in dead:
        engine.start()
    stack.wait(dead)
    return Pair(stack.prefill[0], stack.decode[0])


@pytest.fixture
def pair(pair_stack: Stack) -> Iterator[Pair]:
    """The pair, with both engines running when the test begins, and their books right when it ends."""
    pair = whole_again(pair_stack)
    yield pair
    check_living(pair)


@pytest.fixture(scope="session")
def secret(pair_stack: Stack) -> bytes:
    """The deployment's secret."""
    return (pair_stack.folder / "secret").read_bytes().strip()
