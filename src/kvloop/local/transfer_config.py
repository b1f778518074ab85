"""The `--kv-transfer-config` of one engine: what its role needs, merged with what the user wrote.

The user's value wins wherever the engine still keeps kvloop's promises with it. Where it would not, starting
is an error of one line: vLLM would accept the combination and then answer with errors, or from another
request's KV.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvloop.errors import UserError

# Measured on two cores: with no delay the transfer thread takes a core of its own, and prefill takes twice as
# long.
CPU_PROGRESS_DELAY_US = 500


class Role(StrEnum):
    """What an engine does in the loop."""

    PREFILL = "prefill"
    DECODE = "decode"


class Connector(StrEnum):
    """Whose connector moves KV: ours, or vLLM's own for comparison; none where nothing is to move."""

    KVLOOP = "kvloop"
    UPSTREAM = "upstream"
    NONE = "none"


OFFERED = (Connector.KVLOOP, Connector.UPSTREAM)
"""Those that prefill and decode engines can be started with."""


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """What the launcher decides about KV transfer. `engine_id` is unique in the deployment and kept over
    restarts."""

    role: Role
    connector: Connector
    engine_id: str
    control_host: str
    control_port: int
    secret_file: str | None
    is_cpu: bool
    keep_for_return: bool = True


def _extra(options: TransferOptions) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    if options.is_cpu:
        extra["num_threads"] = 0
    if options.connector is Connector.UPSTREAM:
        extra["bidirectional_kv_xfer"] = options.keep_for_return
        return extra
    extra["kvloop_role"] = options.role.value
    extra["kvloop_control_host"] = options.control_host
    extra["kvloop_control_port"] = options.control_port
    if options.secret_file is not None:
        extra["kvloop_secret_file"] = options.secret_file
    if options.is_cpu:
        extra["kvloop_progress_delay_us"] = CPU_PROGRESS_DELAY_US
    return extra


def _defaults(options: TransferOptions) -> dict[str, Any]:
    config: dict[str, Any] = {"kv_connector": "NixlConnector"}
    if options.connector is Connector.KVLOOP:
        config = {"kv_connector": "KvloopConnector", "kv_connector_module_path": "kvloop.connector.connector"}
    return config | {
        "kv_role": "kv_both",
        "engine_id": options.engine_id,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": _extra(options),
    }


# Fields that the user may repeat but not change, and what would go wrong.
_FIXED = {
    "kv_connector": "use --connector to choose it",
    "kv_connector_module_path": "use --connector to choose the connector",
    "kv_role": "KV goes both ways, so both roles need kv_both",
    "kv_load_failure_policy": "anything else turns a lost read into an HTTP error",
}


def read_user_config(text: str) -> dict[str, Any]:
    """The user's `--kv-transfer-config`. Raises `UserError` unless it is one JSON object."""
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"--kv-transfer-config is not JSON: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("kv_connector_extra_config", {}), dict):
        raise UserError("--kv-transfer-config and its kv_connector_extra_config must be JSON objects")
    return config


def merge_transfer_config(options: TransferOptions, user: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration to start with. Raises `UserError` where the user's would break the loop."""
    config = _defaults(options)
    for key, reason in _FIXED.items():
        if key in user and user[key] != config.get(key):
            raise UserError(
                f"--kv-transfer-config: {key} must be {config.get(key)!r}, not {user[key]!r}: {reason}"
            )
    extra = config["kv_connector_extra_config"]
    user_extra = user.get("kv_connector_extra_config", {})
    if user_extra.get("kvloop_role", options.role.value) != options.role.value:
        raise UserError(
            f"--kv-transfer-config: kvloop_role is {user_extra['kvloop_role']!r} but --role is {options.role}"
        )
    merged = extra | user_extra
    if options.connector is Connector.KVLOOP and not merged.get("kvloop_secret_file"):
        raise UserError(
            "--secret-file is missing: make one file for the whole deployment with `kvloop keygen FILE`"
        )
    return config | dict(user) | {"kv_connector_extra_config": merged}
