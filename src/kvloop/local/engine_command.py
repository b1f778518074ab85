"""`kvloop engine`: become one vLLM server with the settings of its role.

The process is replaced by vLLM (`exec`), so signals, exit codes and supervision are vLLM's own, and nothing
of ours stays between an operator's process manager and the engine.
"""

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import NoReturn

from kvloop.errors import UserError
from kvloop.local.engine import EngineCommand, EngineOptions, build_engine_command, data_parallel_ranks
from kvloop.local.flags import VllmFlags
from kvloop.local.installation import Installation, find_vllm
from kvloop.local.models import resolve_model
from kvloop.local.ports import free_port_run, require_free
from kvloop.local.transfer_config import OFFERED, Connector, Role

DEFAULT_CONTROL_PORT = 5570
DEFAULT_SIDE_CHANNEL_PORT = 5600
DEFAULT_HTTP_PORT = 8000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that are kvloop's own; every other flag is vLLM's."""
    parser.epilog = (
        "Every other flag goes to vLLM unchanged, e.g. --port, --tensor-parallel-size, --max-model-len."
    )
    parser.add_argument(
        "--role", required=True, choices=[role.value for role in Role], help="what this engine does"
    )
    parser.add_argument(
        "--model", required=True, help="a model for vLLM (folder or hub id), or smollm2, or tiny"
    )
    parser.add_argument(
        "--connector",
        default=Connector.KVLOOP.value,
        choices=[connector.value for connector in OFFERED],
        help="kvloop's connector, or vLLM's own bidirectional one for comparison (default: kvloop)",
    )
    parser.add_argument(
        "--control-host",
        default="127.0.0.1",
        metavar="HOST",
        help="the address at which the other engines reach this one, for claims and KV (default: 127.0.0.1)",
    )
    parser.add_argument(
        "--control-port",
        type=int,
        default=DEFAULT_CONTROL_PORT,
        metavar="N",
        help="port for claims; rank r of data parallel listens on N+r; 0: a free one (default: %(default)s)",
    )
    parser.add_argument(
        "--side-channel-port",
        type=int,
        default=None,
        metavar="N",
        help="port for the NIXL handshake; rank r listens on N+r; 0 takes a free one "
        f"(default: VLLM_NIXL_SIDE_CHANNEL_PORT or {DEFAULT_SIDE_CHANNEL_PORT})",
    )
    parser.add_argument("--secret-file", metavar="FILE", help="the deployment's secret (see `kvloop keygen`)")
    parser.add_argument("--engine-id", metavar="ID", help="unique name of this engine, kept over restarts")
    parser.add_argument(
        "--cores", metavar="LIST", help='CPU only: cores of the engine\'s workers, e.g. "0-3" or "0|1"'
    )
    parser.add_argument("--print-command", action="store_true", help="print what would be executed and exit")


def _number(text: str, name: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{name} must be a port number, not {text!r}") from None


def _options(args: argparse.Namespace, flags: VllmFlags, installation: Installation) -> EngineOptions:
    ranks = data_parallel_ranks(flags)
    side_channel = args.side_channel_port
    if side_channel is None:
        text = os.environ.get("VLLM_NIXL_SIDE_CHANNEL_PORT", str(DEFAULT_SIDE_CHANNEL_PORT))
        side_channel = _number(text, "VLLM_NIXL_SIDE_CHANNEL_PORT")
    model = resolve_model(args.model)
    if model.dtype is not None and installation.is_cpu and not flags.has("--dtype"):
        flags = VllmFlags(("--dtype", model.dtype, *flags.words))
    if model.name is not None and not flags.has("--served-model-name"):
        flags = VllmFlags(("--served-model-name", model.name, *flags.words))
    return EngineOptions(
        role=Role(args.role),
        model=model.location,
        control_host=args.control_host,
        control_port=args.control_port or free_port_run(ranks, args.control_host),
        side_channel_port=side_channel or free_port_run(ranks, args.control_host),
        connector=Connector(args.connector),
        secret_file=str(Path(args.secret_file).absolute()) if args.secret_file else None,
        engine_id=args.engine_id,
        cores=args.cores,
        flags=flags,
    )


def _require_ports(options: EngineOptions) -> None:
    ranks = data_parallel_ranks(options.flags)
    http = _number(options.flags.value("--port") or str(DEFAULT_HTTP_PORT), "--port")
    require_free(options.flags.value("--host") or "0.0.0.0", [("--port", http)])
    wanted = [("--side-channel-port", options.side_channel_port + rank) for rank in range(ranks)]
    if options.connector is Connector.KVLOOP:
        wanted += [("--control-port", options.control_port + rank) for rank in range(ranks)]
    require_free(options.control_host, wanted)


def _describe(command: EngineCommand, environment: dict[str, str]) -> str:
    changed = [
        f"{key}={value}" for key, value in sorted(command.env.items()) if environment.get(key) != value
    ]
    return shlex.join(["env", *changed, *command.argv])


def _become(command: EngineCommand) -> NoReturn:
    os.execvpe(command.argv[0], command.argv, dict(command.env))


def run(args: argparse.Namespace, vllm_words: list[str]) -> int:
    """Replace this process by the engine. Returns only with `--print-command`; raises `UserError`."""
    installation = find_vllm()
    options = _options(args, VllmFlags(tuple(vllm_words)), installation)
    if options.secret_file is not None and not Path(options.secret_file).is_file():
        raise UserError(
            f"--secret-file {options.secret_file} does not exist: make it with `kvloop keygen FILE`"
        )
    environment = dict(os.environ) | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(options.side_channel_port)}
    command = build_engine_command(options, installation, environment)
    if args.print_command:
        sys.stdout.write(_describe(command, dict(os.environ)) + "\n")
        return 0
    _require_ports(options)
    sys.stderr.write(
        f"kvloop engine: {options.role} on {installation.distribution} {installation.version}, control "
        f"{options.control_host}:{options.control_port}, side channel port {options.side_channel_port}\n"
    )
    sys.stderr.flush()
    _become(command)
