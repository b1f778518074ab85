"""The routers that are measured, how each is started, and where the others come from.

All of them stand in front of one prefill and one decode engine, with the switches that their own documents
name for vLLM's P/D disaggregation and with everything else as it is delivered. kvloop has API keys, sampled
explanations and filed handles on besides. The others come from PyPI into an environment of their own, for
what they need does not fit into kvloop's; it is kept between runs. A router that cannot be had is a reason,
not an error.
"""

import os
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

KVLOOP = "kvloop"
VLLM_ROUTER = "vllm-router"
SMG = "SMG"
INSTALL_TIMEOUT_S = 900.0
MAX_REASON_CHARS = 200


@dataclass(frozen=True, slots=True)
class Places:
    """Where a router finds what it needs. URLs without a slash at the end."""

    prefill: str
    decode: str
    port: int
    other_port: int  # of metrics or the like
    max_clients: int
    keys_file: Path


@dataclass(frozen=True, slots=True)
class Peer:
    """A router from PyPI. `program`: its console script; `needs`: what to install for it."""

    name: str
    program: str
    needs: tuple[str, ...]
    words: Callable[[Places], list[str]]


def kvloop_command(places: Places) -> list[str]:
    """kvloop's own router, of this installation."""
    return [
        *(sys.executable, "-m", "kvloop.cli", "route"),
        *("--prefill", places.prefill, "--decode", places.decode),
        *("--host", "127.0.0.1", "--port", str(places.port), "--admin-port", str(places.other_port)),
        *("--api-keys-file", str(places.keys_file), "--explain-log-every", "1000"),
        *("--max-connections", str(places.max_clients)),
    ]


def _vllm_router(places: Places) -> list[str]:
    return [
        *("--host", "127.0.0.1", "--port", str(places.port), "--vllm-pd-disaggregation"),
        *("--prefill", places.prefill, "--decode", places.decode),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(places.other_port)),
        *("--max-concurrent-requests", str(places.max_clients), "--log-level", "warning"),
    ]


def _smg(places: Places) -> list[str]:
    return [
        *("launch", "--host", "127.0.0.1", "--port", str(places.port)),
        *("--pd-disaggregation", "--backend", "vllm"),
        *("--prefill", places.prefill, "--decode", places.decode),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(places.other_port)),
        *("--max-concurrent-requests", str(places.max_clients), "--log-level", "warn"),
    ]


PEERS = (
    # Its launcher is written in Python and needs more than its package says.
    Peer(
        VLLM_ROUTER,
        "vllm-router",
        ("vllm-router==0.1.17", "aiohttp", "fastapi", "orjson", "requests", "setproctitle", "uvicorn"),
        _vllm_router,
    ),
    Peer(SMG, "smg", ("tokenspeed-smg==1.13.0.post20261027",), _smg),
)
NAMES = (KVLOOP, *(peer.name for peer in PEERS))

Command = Callable[[Places], list[str]]
Install = Callable[[Path, tuple[str, ...]], str | None]


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Where the peers' environment is kept, in the user's cache."""
    base = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "kvloop" / "bench-router"


def install(folder: Path, needs: tuple[str, ...]) -> str | None:
    """Install packages into the environment at `folder`, made if it is not there. Why not, or None."""
    python = folder / "bin" / "python"
    try:
        if not python.exists():
            venv.create(folder, with_pip=True)
        subprocess.run(
            [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *needs],
            check=True,
            capture_output=True,
            text=True,
            timeout=INSTALL_TIMEOUT_S,
        )
    except subprocess.CalledProcessError as error:
        lines = [line for line in (error.stderr or "").splitlines() if line.startswith("ERROR")]
        return (lines[-1] if lines else "pip failed")[:MAX_REASON_CHARS]
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)[:MAX_REASON_CHARS]
    return None


def commands(
    folder: Path, wanted: tuple[str, ...], install: Install = install
) -> tuple[dict[str, Command], list[str]]:
    """How to start each of the routers `wanted`, and why some cannot be. What is not in `folder` is installed
    there."""
    found: dict[str, Command] = {}
    failures: list[str] = []
    if KVLOOP in wanted:
        found[KVLOOP] = kvloop_command
    for peer in PEERS:
        if peer.name not in wanted:
            continue
        program = folder / "bin" / peer.program
        reason = None if program.exists() else install(folder, peer.needs)
        if reason is None and os.access(program, os.X_OK):
            found[peer.name] = _after(program, peer.words)
        else:
            failures.append(f"{peer.name}: {reason or 'it has no program ' + peer.program}")
    return found, failures


def _after(program: Path, words: Callable[[Places], list[str]]) -> Command:
    return lambda places: [str(program), *words(places)]
