"""What an operator may set in `kv_connector_extra_config`, checked once when the engine starts.

vLLM hands the connector an untyped dict in which its own NIXL options live too, so keys are claimed by
name: upstream's two (`kv_recompute_threshold`, `decoder_kv_blocks_ttl`) keep their names and meaning,
everything of kvloop's own starts with `kvloop_`, and a `kvloop_` key that is not known is an error rather
than a silent no-op. What would only fail in the middle of a request, or be answered wrongly, is refused
here: the engine does not start.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvloop.control.secret import read_secret
from kvloop.errors import UserError
from kvloop.wire.handle import HOST_MAX_BYTES

DEFAULT_CONTROL_PORT = 5570
MAX_PORT = 65535
MIN_CLAIM_TERM_MS = 500
"""Five times what the reader takes off for clocks and steps: under a shorter claim no read ends in time."""
NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000

_WILDCARDS = ("*", "0.0.0.0", "::")
_ROLES = ("both", "prefill", "decode")
_KNOWN = frozenset(
    {
        "kvloop_role",
        "kvloop_secret_file",
        "kvloop_control_host",
        "kvloop_control_port",
        "kvloop_claim_timeout_ms",
        "kvloop_claim_term_ms",
        "kvloop_lease_term",
        "kvloop_max_retained",
        "kvloop_progress_delay_us",
        "kvloop_check_every_step",
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
    lease_term_ns: int
    claim_timeout_ns: int
    claim_term_ns: int
    max_retained_share: float
    progress_delay_us: int | None
    checks_every_step: bool

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


def _whole(extra: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = _number(extra, name, default, low, high)
    if value != int(value):
        raise UserError(f"kv_connector_extra_config.{name} must be a whole number, not {value!r}")
    return int(value)


def _flag(extra: Mapping[str, Any], name: str) -> bool:
    value = extra.get(name, False)
    if not isinstance(value, bool):
        raise UserError(f"kv_connector_extra_config.{name} must be true or false, not {value!r}")
    return value


def _host(extra: Mapping[str, Any], default: str) -> str:
    host = extra.get("kvloop_control_host", default)
    where = f"kv_connector_extra_config.kvloop_control_host (now {host!r})"
    if not isinstance(host, str) or not 0 < len(host) <= HOST_MAX_BYTES:
        raise UserError(f"{where} must be a host name or address of at most {HOST_MAX_BYTES} characters")
    if host in _WILDCARDS:
        raise UserError(f"{where} must be an address at which other engines reach this one: handles carry it")
    if not all(" " < char < "\x7f" and char not in "[]/" for char in host):
        raise UserError(f"{where} must be a bare host name or address, IPv6 without brackets")
    return host


def _secret(extra: Mapping[str, Any]) -> bytes:
    path = extra.get("kvloop_secret_file")
    if not isinstance(path, str) or not path:
        raise UserError(
            "kv_connector_extra_config.kvloop_secret_file is not set: write one secret for the deployment "
            "(`openssl rand -hex 32 > kvloop.key`) and name that file on every engine"
        )
    return read_secret(path, "kvloop_secret_file")


def check_failure_policy(policy: str) -> None:
    """UserError unless a failed read is recomputed: vLLM's default answers the request with an error."""
    if policy != "recompute":
        raise UserError(
            f"--kv-transfer-config: kv_load_failure_policy is {policy!r}; kvloop needs 'recompute'"
        )


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
    if extra.get("bidirectional_kv_xfer"):
        raise UserError(
            "kv_connector_extra_config.bidirectional_kv_xfer turns on vLLM's own return path, which kvloop "
            "replaces: remove it"
        )
    port = _whole(extra, "kvloop_control_port", DEFAULT_CONTROL_PORT, 1, MAX_PORT) + data_parallel_index
    if port > MAX_PORT:
        raise UserError(
            f"kv_connector_extra_config.kvloop_control_port plus the data-parallel index is {port}: "
            f"ports end at {MAX_PORT}"
        )
    delay = None
    if extra.get("kvloop_progress_delay_us") is not None:
        delay = _whole(extra, "kvloop_progress_delay_us", 0, 0, 1_000_000)
    ttl_s = _number(extra, "decoder_kv_blocks_ttl", 480, 0.001, 86_400)
    term_s = _number(extra, "kvloop_lease_term", 60, 0.001, 86_400)
    return Settings(
        role=role,
        key=_secret(extra),
        control_host=_host(extra, side_channel_host),
        control_port=port,
        recompute_threshold_tokens=_whole(extra, "kv_recompute_threshold", 64, 0, 10_000_000),
        lease_ttl_ns=int(ttl_s * NS_PER_S),
        lease_term_ns=int(min(term_s, ttl_s) * NS_PER_S),
        claim_timeout_ns=int(_number(extra, "kvloop_claim_timeout_ms", 1_000, 1, 60_000) * NS_PER_MS),
        claim_term_ns=int(
            _number(extra, "kvloop_claim_term_ms", 5_000, MIN_CLAIM_TERM_MS, 600_000) * NS_PER_MS
        ),
        max_retained_share=_number(extra, "kvloop_max_retained", 0.9, 0.0, 1.0),
        progress_delay_us=delay,
        checks_every_step=_flag(extra, "kvloop_check_every_step"),
    )
