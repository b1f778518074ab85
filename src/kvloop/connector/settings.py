"""What an operator may set in `kv_connector_extra_config`, checked once when the engine starts.

vLLM hands the connector an untyped dict in which its own NIXL options live too, so keys are claimed by
name: upstream's two (`kv_recompute_threshold`, `decoder_kv_blocks_ttl`) keep their names and meaning,
everything of kvloop's own starts with `kvloop_`, and a `kvloop_` key that is not known is an error rather
than a silent no-op.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvloop.errors import UserError

DEFAULT_CONTROL_PORT = 5570
MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 4096
NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000

_ROLES = ("both", "prefill", "decode")
_KNOWN = frozenset(
    {
        "kvloop_role",
        "kvloop_secret_file",
        "kvloop_control_host",
        "kvloop_control_port",
        "kvloop_claim_timeout_ms",
        "kvloop_claim_term_ms",
        "kvloop_max_retained",
        "kvloop_progress_delay_us",
    }
)


@dataclass(frozen=True, slots=True)
class Settings:
    """The connector's configuration. Durations are nanoseconds, sizes are tokens, shares are fractions of
    1."""

    role: str
    key: bytes
    control_host: str
    control_port: int
    recompute_threshold_tokens: int
    lease_ttl_ns: int
    claim_timeout_ns: int
    claim_term_ns: int
    max_retained_share: float
    progress_delay_us: int | None

    @property
    def reads(self) -> bool:
        """Whether this engine may read KV back (the prefill side)."""
        return self.role in ("both", "prefill")

    @property
    def retains(self) -> bool:
        """Whether this engine keeps the KV of finished requests (the decode side)."""
        return self.role in ("both", "decode")


def _number(extra: Mapping[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = extra.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise UserError(
            f"kv_connector_extra_config.{name} must be a number from {low:g} to {high:g}, not {value!r}"
        )
    return value


def _secret(extra: Mapping[str, Any]) -> bytes:
    path = extra.get("kvloop_secret_file")
    if not isinstance(path, str) or not path:
        raise UserError(
            "kv_connector_extra_config.kvloop_secret_file is not set: write one secret for the deployment "
            "(`openssl rand -hex 32 > kvloop.key`) and name that file on every engine"
        )
    try:
        key = Path(path).read_bytes().strip()
    except OSError as error:
        raise UserError(f"kvloop_secret_file {path!r} cannot be read: {error.strerror}") from error
    if not MIN_SECRET_BYTES <= len(key) <= MAX_SECRET_BYTES:
        raise UserError(
            f"kvloop_secret_file {path!r} must hold {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes"
        )
    return key


def read_settings(extra: Mapping[str, Any], *, side_channel_host: str, data_parallel_index: int) -> Settings:
    """Check `kv_connector_extra_config`. UserError names the key and how to mend it.

    The control port is moved up by the data-parallel index, as vLLM moves its side channel's port.
    """
    unknown = sorted(key for key in extra if key.startswith("kvloop_") and key not in _KNOWN)
    if unknown:
        raise UserError(
            f"unknown key {unknown[0]!r} in kv_connector_extra_config; known: {', '.join(sorted(_KNOWN))}"
        )
    role = extra.get("kvloop_role", "both")
    if role not in _ROLES:
        raise UserError(
            f"kv_connector_extra_config.kvloop_role must be one of {', '.join(_ROLES)}, not {role!r}"
        )
    host = extra.get("kvloop_control_host", side_channel_host)
    if not isinstance(host, str) or not host:
        raise UserError("kv_connector_extra_config.kvloop_control_host must be a host name or address")
    port = int(_number(extra, "kvloop_control_port", DEFAULT_CONTROL_PORT, 1, 65535)) + data_parallel_index
    delay = None
    if extra.get("kvloop_progress_delay_us") is not None:
        delay = int(_number(extra, "kvloop_progress_delay_us", 0, 0, 1_000_000))
    return Settings(
        role=role,
        key=_secret(extra),
        control_host=host,
        control_port=port,
        recompute_threshold_tokens=int(_number(extra, "kv_recompute_threshold", 64, 0, 10_000_000)),
        lease_ttl_ns=int(_number(extra, "decoder_kv_blocks_ttl", 480, 0.001, 86_400) * NS_PER_S),
        claim_timeout_ns=int(_number(extra, "kvloop_claim_timeout_ms", 250, 1, 60_000) * NS_PER_MS),
        claim_term_ns=int(_number(extra, "kvloop_claim_term_ms", 5_000, 10, 600_000) * NS_PER_MS),
        max_retained_share=_number(extra, "kvloop_max_retained", 0.9, 0.0, 1.0),
        progress_delay_us=delay,
    )
