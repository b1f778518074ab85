"""`kvloop sim engine`: one simulated engine as a process, until SIGINT or SIGTERM."""

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator

import uvicorn
import uvloop

from kvloop.control.secret import read_secret
from kvloop.errors import UserError
from kvloop.sim.api import Api
from kvloop.sim.config import NS_PER_MS, NS_PER_S, EngineConfig
from kvloop.sim.driver import Driver
from kvloop.sim.engine import Engine
from kvloop.sim.profile import Profile, built_in, load_profile

ROLES = ("both", "prefill", "decode")
BACKLOG = 2048
KEEP_ALIVE_S = 5  # vLLM's own
BULK_NS = NS_PER_MS  # steps are taken at once only as far as nobody can see it: timers are no finer
MAX_BULK_STEPS = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `kvloop sim engine`."""
    known = ", ".join(built_in())
    parser.add_argument("--role", choices=ROLES, default="both", help="what this engine does (default: both)")
    parser.add_argument(
        "--profile",
        default="smollm2-cpu",
        metavar="NAME|FILE",
        help=f"what takes how long: {known}, or a file (default: %(default)s)",
    )
    parser.add_argument("--speed", type=float, default=1.0, metavar="X", help="so many times as fast (1)")
    parser.add_argument("--model", metavar="NAME", help="the name to serve it under (default: the profile's)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    parser.add_argument(
        "--control-host",
        default="127.0.0.1",
        metavar="HOST",
        help="the address at which other engines reach this one (default: %(default)s)",
    )
    parser.add_argument("--control-port", type=int, default=5570, metavar="N", help="port for claims (5570)")
    parser.add_argument(
        "--side-channel-port", type=int, default=5600, metavar="N", help="port for reads of memory (5600)"
    )
    parser.add_argument("--secret-file", metavar="FILE", help="the deployment's secret (see `kvloop keygen`)")
    parser.add_argument("--engine-id", metavar="ID", help="unique name of this engine, kept over restarts")
    parser.add_argument(
        "--prefix-cache", choices=("on", "off"), default="on", help="its own prefix cache (default: on)"
    )
    for name, default, what in _SETTINGS:
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=type(default), default=default, help=f"{what} (default: %(default)s)")


_SETTINGS: tuple[tuple[str, float, str], ...] = (
    ("recompute_threshold", 64, "fewer proven tokens than this are computed, not read"),
    ("lease_term_s", 60.0, "seconds that a lease lasts without a renewal"),
    ("lease_ttl_s", 480.0, "seconds after its last use that a lease lasts at most"),
    ("claim_timeout_ms", 1000, "a claim without an answer for so long is given up"),
    ("claim_term_ms", 5000, "a read that has not ended by then is given up"),
    ("handover_s", 480.0, "seconds that a prompt is kept which decode never reads"),
    ("max_retained", 0.9, "share of the blocks that leases may hold"),
)


def read_config(args: argparse.Namespace, profile: Profile) -> EngineConfig:
    """The engine that the flags describe. UserError for what cannot be."""
    step_ns = profile.step.takes_ns([(1, 0)])
    if args.secret_file is None:
        raise UserError("--secret-file is missing: make one for the deployment with `kvloop keygen FILE`")
    terms = (args.lease_term_s, args.lease_ttl_s, args.claim_timeout_ms, args.claim_term_ms, args.handover_s)
    if min(terms) <= 0:
        raise UserError("terms and timeouts must be positive")
    return EngineConfig(
        engine_id=args.engine_id or f"sim-{os.urandom(6).hex()}",
        incarnation=os.urandom(8).hex(),
        key=read_secret(args.secret_file, "--secret-file"),
        control=(args.control_host, args.control_port),
        side_channel=(args.control_host, args.side_channel_port),
        reads=args.role != "decode",
        retains=args.role != "prefill",
        prefix_cache=args.prefix_cache == "on",
        recompute_threshold_tokens=args.recompute_threshold,
        lease_term_ns=round(args.lease_term_s * NS_PER_S),
        lease_ttl_ns=round(args.lease_ttl_s * NS_PER_S),
        claim_timeout_ns=args.claim_timeout_ms * NS_PER_MS,
        claim_term_ns=args.claim_term_ms * NS_PER_MS,
        handover_ns=round(args.handover_s * NS_PER_S),
        max_retained_permille=round(1000 * args.max_retained),
        max_bulk_steps=min(MAX_BULK_STEPS, max(1, BULK_NS // step_ns)) if step_ns else MAX_BULK_STEPS,
    )


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop. UserError where that cannot begin."""
    profile = load_profile(args.profile).faster(args.speed)
    engine = Engine(read_config(args, profile), profile)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(args, engine))
    return 0


async def _run(args: argparse.Namespace, engine: Engine) -> None:
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    async with serving(engine, args.host, args.port, args.model or engine.profile.model):
        sys.stderr.write(f"ready: simulated {args.role} engine on http://{args.host}:{args.port}\n")
        await stopping.wait()


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are the command's own


@contextlib.asynccontextmanager
async def serving(engine: Engine, host: str, port: int, model: str) -> AsyncIterator[Driver]:
    """An engine behind its API at `host` and `port`, on the running loop, as long as the block lasts."""
    driver = Driver(engine)
    settings = uvicorn.Config(
        Api(driver, model),
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=1,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    server = _Uvicorn(settings)
    task: asyncio.Task[None] | None = None
    try:
        listening = _listen(host, port)
        await driver.start()
        task = asyncio.get_running_loop().create_task(server.serve(sockets=[listening]))
        yield driver
    except OSError as error:
        raise UserError(f"cannot listen on --side-channel-port: {error.strerror or error}") from None
    finally:
        server.should_exit = True
        if task is not None:
            await task
        driver.stop()


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=BACKLOG)
    except OSError as error:
        raise UserError(f"cannot listen on {host}:{port} (--host, --port): {error.strerror}") from None
