"""One vLLM server with the settings that its role needs: a command line and an environment, nothing started
yet.

`kvloop engine` and `kvloop up` both build their engines here, so what the one-machine demo shows is what an
operator gets. Each setting is one that is wrong by default: the plugin allow-list (endpoint plugins load only
when named), the failure policy (a lost read must become a recompute), the transfer thread's pace (on a CPU it
spins), and ports per data-parallel rank (vLLM adds the rank to the side channel's port, the connector to the
control port).
"""

import json
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvloop.errors import UserError
from kvloop.local.flags import VllmFlags
from kvloop.local.installation import Installation, general_plugin_names
from kvloop.local.transfer_config import (
    CPU_PROGRESS_DELAY_US,
    Connector,
    Role,
    TransferOptions,
    merge_transfer_config,
    read_user_config,
)

PLUGIN = "kvloop"
TRANSFER_FLAG = "--kv-transfer-config"
EAGER_FLAG = "--enforce-eager"
_MODEL_FLAGS = ("--model", "--model-tag")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """One engine as its operator describes it. `cores` is a vLLM CPU list ("0", "0-3", "0|1"); None leaves it
    to vLLM."""

    role: Role
    model: str
    control_host: str = "127.0.0.1"
    control_port: int = 5570
    side_channel_port: int = 5600
    connector: Connector = Connector.KVLOOP
    secret_file: str | None = None
    engine_id: str | None = None
    cores: str | None = None
    keep_for_return: bool = True
    flags: VllmFlags = field(default_factory=VllmFlags)


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """What to execute. `env` is complete: the caller's environment with the engine's settings in it."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    transfer_config: Mapping[str, object]


def _size(flags: VllmFlags, name: str, *others: str) -> int:
    text = flags.value(name, *others) or "1"
    if not text.isdigit() or int(text) < 1:
        raise UserError(f"{name} must be a positive number, not {text!r}")
    return int(text)


def data_parallel_ranks(flags: VllmFlags) -> int:
    """How many data-parallel ranks this server runs, and so how many consecutive ports it needs."""
    if flags.has("--data-parallel-size-local", "-dpl"):
        return _size(flags, "--data-parallel-size-local", "-dpl")
    return _size(flags, "--data-parallel-size", "-dp")


def worker_count(flags: VllmFlags) -> int:
    """How many workers this server runs: vLLM wants a core list for each."""
    tensor = _size(flags, "--tensor-parallel-size", "-tp")
    return data_parallel_ranks(flags) * tensor * _size(flags, "--pipeline-parallel-size", "-pp")


def _check_flags(flags: VllmFlags) -> None:
    dotted = flags.dotted(TRANSFER_FLAG)
    if dotted is not None:
        raise UserError(
            f"{dotted}: give {TRANSFER_FLAG} as one JSON object, so that kvloop can merge its own settings in"
        )
    for name in _MODEL_FLAGS:
        if flags.has(name):
            raise UserError(f"{name} was given twice, or after other vLLM flags as an abbreviation")


def _plugins(environment: Mapping[str, str]) -> str:
    chosen = environment.get("VLLM_PLUGINS")
    names = list(general_plugin_names()) if chosen is None else [name for name in chosen.split(",") if name]
    return ",".join(dict.fromkeys([*names, PLUGIN]))


def _environment(options: EngineOptions, environment: Mapping[str, str], is_cpu: bool) -> dict[str, str]:
    defaults = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": options.control_host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(options.side_channel_port),
    }
    if is_cpu:
        defaults["KVLOOP_PROGRESS_DELAY_US"] = str(CPU_PROGRESS_DELAY_US)
        defaults["UCX_TLS"] = "tcp,self,sm"
        if not options.flags.has(EAGER_FLAG):
            # Eager is not all: the sampler has functions of its own, compiled within the first request for
            # log-probabilities, with a C++ compiler and for a minute.
            defaults["TORCH_COMPILE_DISABLE"] = "1"
    env = defaults | dict(environment) | {"VLLM_PLUGINS": _plugins(environment)}
    if options.cores is not None:
        env["VLLM_CPU_OMP_THREADS_BIND"] = options.cores
    return env


def _default_flags(flags: VllmFlags, is_cpu: bool) -> list[str]:
    wanted = ["--enable-prompt-tokens-details"]
    if is_cpu:
        wanted.append(EAGER_FLAG)
    return [name for name in wanted if not flags.has(name)]


def build_engine_command(
    options: EngineOptions, installation: Installation, environment: Mapping[str, str]
) -> EngineCommand:
    """The command and environment for one engine.

    Every flag in `options.flags` reaches vLLM unchanged and in order, except `--kv-transfer-config`, which is
    merged. Raises `UserError` where the flags contradict what the loop needs.
    """
    _check_flags(options.flags)
    server = ["serve", options.model] if installation.has_command else ["--model", options.model]
    argv = [sys.executable, "-m", installation.server_module, *server]
    argv += _default_flags(options.flags, installation.is_cpu)
    env = _environment(options, environment, installation.is_cpu)
    if options.connector is Connector.NONE:
        return EngineCommand((*argv, *options.flags.words), env, {})
    user_config = options.flags.value(TRANSFER_FLAG)
    transfer = TransferOptions(
        role=options.role,
        connector=options.connector,
        engine_id=options.engine_id or f"{options.role}-{uuid.uuid4().hex[:12]}",
        control_host=options.control_host,
        control_port=options.control_port,
        secret_file=options.secret_file,
        is_cpu=installation.is_cpu,
        keep_for_return=options.keep_for_return,
    )
    config = merge_transfer_config(transfer, read_user_config(user_config) if user_config is not None else {})
    argv += [*options.flags.without(TRANSFER_FLAG).words, TRANSFER_FLAG, json.dumps(config)]
    return EngineCommand(tuple(argv), env, config)
