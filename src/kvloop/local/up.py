"""`kvloop up`: the whole loop on one machine, in one command, until Ctrl-C.

Everything it starts is under wardens (see `warden`), so nothing is left behind whatever ends it. Exit status:
0 after Ctrl-C once it is ready, or after a demo that went well; 2 where something did not start, failed
in the demo, or ended; 128 plus the number of a signal that ended it.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from kvloop.errors import UserError
from kvloop.local.chat import served_model
from kvloop.local.demo import DemoTarget, run_demo
from kvloop.local.server import describe_status
from kvloop.local.simulated import DEFAULT_PROFILE, build_simulated, simulated_model
from kvloop.local.stack import Stack
from kvloop.local.stack_config import StackConfig
from kvloop.local.transfer_config import OFFERED, Connector

DEFAULT_PORT = 8000
WATCH_INTERVAL_S = 0.5
# Everything shares the cores. With eleven runnable processes on two of them, two claims in four went
# unanswered for a quarter of a second; and here, where prefill takes seconds, waiting is worth it.
CLAIM_TIMEOUT_MS = 2000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `kvloop up`."""
    parser.add_argument("--prefill", type=int, default=1, metavar="N", help="prefill engines (default: 1)")
    parser.add_argument("--decode", type=int, default=1, metavar="M", help="decode engines (default: 1)")
    parser.add_argument(
        "--model",
        default="smollm2",
        metavar="PATH|smollm2|tiny",
        help="a folder with a model for vLLM, or a built-in one: smollm2 (real) or tiny (random weights) "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, metavar="P", help="the router's port (default: %(default)s)"
    )
    parser.add_argument(
        "--admin-port",
        type=int,
        metavar="P",
        help="the router's port for metrics and conversations (default: a free one, which is printed)",
    )
    parser.add_argument(
        "--connector",
        choices=[connector.value for connector in OFFERED],
        default=Connector.KVLOOP.value,
        help="kvloop's connector, or vLLM's own bidirectional one for comparison (default: kvloop)",
    )
    parser.add_argument(
        "--return",
        dest="return_mode",
        choices=("on", "off"),
        default="on",
        help="read earlier turns back from decode, or run plain one-way prefill and decode (default: on)",
    )
    parser.add_argument(
        "--policy",
        default="kv",
        metavar="NAME",
        help="the router's: which way a turn goes, and through which engines (default: %(default)s)",
    )
    parser.add_argument(
        "--prefill-cache",
        choices=("on", "off"),
        default="off",
        help="prefill's own prefix cache; off shows what comes back from decode, production keeps it on "
        "(default: off)",
    )
    parser.add_argument(
        "--sim",
        nargs="?",
        const=DEFAULT_PROFILE,
        metavar="PROFILE",
        help=f"simulated engines instead of vLLM's, with the timing of a profile (alone: {DEFAULT_PROFILE})",
    )
    demo = parser.add_mutually_exclusive_group()
    demo.add_argument("--no-demo", action="store_true", help="do not hold the scripted conversation")
    demo.add_argument("--demo-only", action="store_true", help="stop after the scripted conversation")
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="keep logs here (default: a temporary folder)"
    )


def stack_config(args: argparse.Namespace) -> StackConfig:
    """The deployment that the flags describe. Raises `UserError`."""
    connector = Connector(args.connector)
    return StackConfig(
        model=args.model,
        prefill=args.prefill,
        decode=args.decode,
        connector=connector,
        returns=args.return_mode == "on",
        port=args.port,
        admin_port=args.admin_port,
        router_flags=("--policy", args.policy),
        prefill_flags=() if args.prefill_cache == "on" else ("--no-enable-prefix-caching",),
        prefill_extra={"kvloop_claim_timeout_ms": CLAIM_TIMEOUT_MS} if connector is Connector.KVLOOP else {},
        folder=args.folder.absolute() if args.folder else None,
    )


def say(line: str) -> None:
    """Print a line at once. Where nobody reads them any more, raises `SystemExit`."""
    try:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # Nobody reads any more: end like every other writer in a pipeline, once, and in silence.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None


@contextlib.contextmanager
def _signals_end_it() -> Iterator[None]:
    """The first of the signals unwinds the stack; what follows while it unwinds changes nothing."""
    ended = False

    def end(number: int, _: FrameType | None) -> None:
        nonlocal ended
        if not ended:
            ended = True
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    # SIGINT even where a shell that put us in the background had it ignored, so that `kill -INT` works there;
    # SIGHUP not where `nohup` had.
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    previous = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _greet(stack: Stack) -> None:
    body = {
        "model": served_model(stack.url),
        "stream": True,
        "messages": [{"role": "user", "content": "Hello!"}],
    }
    url = f"{stack.url}/v1/chat/completions"
    say(f"ready: {stack.url}  (metrics and conversations: {stack.router.admin_url})")
    say(f"try: curl -N {url} -H 'content-type: application/json' -d {shlex.quote(json.dumps(body))}")


def _demo(stack: Stack, args: argparse.Namespace) -> None:
    config = stack.config
    off = None
    if config.returns:
        say("starting a second router, with reuse off, for comparison")
        off = stack.add_router("router-off", ("--return", "off"))
    target = DemoTarget(
        url=stack.url,
        url_off=off.url if off is not None else None,
        metrics_url=stack.router.admin_url,
        prefill=config.prefill,
        decode=config.decode,
        prefill_cache=args.prefill_cache == "on",
        returns=config.returns,
        counts=config.connector is Connector.KVLOOP,
    )
    try:
        run_demo(target, say)
    finally:
        if off is not None:
            off.shut_down()
            del stack.routers[off.name]


def _watch(stack: Stack) -> int:
    """Until the router ends; an engine that ends is reported once and left to the router's fallbacks."""
    watched = stack.servers
    while stack.router.running:
        for server in [server for server in watched if not server.running]:
            status = describe_status(server.process.status if server.process else None)
            say(f"{server.name} ended with {status}; its log: {server.spec.log_path}")
            watched.remove(server)
        time.sleep(WATCH_INTERVAL_S)
    status = describe_status(stack.router.process.status if stack.router.process else None)
    raise UserError(f"the router ended with {status}; the end of its log:\n{stack.router.log_tail()}")


def serve(stack: Stack, args: argparse.Namespace) -> int:
    """Start the stack, hold the demo, and serve until Ctrl-C. Returns the exit status."""
    ready = False
    try:
        with _signals_end_it(), stack:
            ready = True
            _greet(stack)
            if not args.no_demo:
                _demo(stack, args)
            if args.demo_only:
                return 0
            say("serving until Ctrl-C")
            return _watch(stack)
    except KeyboardInterrupt:
        say("stopped")
        return 0 if ready else 128 + signal.SIGINT


def run(args: argparse.Namespace) -> int:
    """The command. Raises `UserError`."""
    config = stack_config(args)
    if args.sim is None:
        return serve(Stack(config, say=say), args)
    if config.connector is not Connector.KVLOOP:
        raise UserError("--sim has no engines with vLLM's own connector")
    model = simulated_model(args.sim)
    return serve(Stack(config, build=build_simulated(args.sim), model=model, say=say), args)
