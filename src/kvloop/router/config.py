"""What a router is told at its start, and the flags that say it. Nothing else configures it."""

import argparse
from dataclasses import dataclass, field, fields
from enum import StrEnum
from urllib.parse import urlsplit

from kvloop.core.policy import POLICIES
from kvloop.core.returns import DEFAULT_BREAK_EVEN_NS
from kvloop.errors import UserError
from kvloop.wire.control import MAX_TERM_MS

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what a client or an engine may make the router hold."""

    max_connections: int = 8192
    max_header_bytes: int = 64 * 1024  # as large as the strictest common proxy's, twice
    max_body_bytes: int = 64 * _MIB  # a dozen images as base64
    max_buffered_bytes: int = 1024 * _MIB  # all requests' bodies together
    max_answer_bytes: int = 64 * _MIB  # a JSON answer, held until its handle is out
    max_event_bytes: int = 8 * _MIB  # one line of a stream
    max_responses: int = 20_000  # of the Responses API, to go on from
    max_response_bytes: int = 256 * _MIB  # all of them together, with their conversations
    max_conversation_keys: int = 400_000
    max_conversation_bytes: int = 128 * _MIB


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Waits, in seconds."""

    connect_timeout_s: float = 5.0
    client_timeout_s: float = 60.0  # for a request to come in whole, once it has begun
    keep_alive_s: float = 75.0
    idle_timeout_s: float = 3600.0  # without one byte from decode (an unstreamed answer is silent to its end)
    response_age_s: float = 3600.0  # a stored response is kept so long after its last use
    drain_timeout_s: float = 10.0  # for answers under way when told to stop


class LeasePolicy(StrEnum):
    """Which leases are renewed: while a return is likely enough to pay, or all until their retention ends."""

    ADAPTIVE = "adaptive"
    FIXED = "fixed"


@dataclass(frozen=True, slots=True)
class Leases:
    """How decode's leases are renewed. Without the secret they are not, and live one term."""

    secret_file: str | None = None
    lease_policy: LeasePolicy = LeasePolicy.ADAPTIVE
    lease_term_s: float = 60.0  # a router that stops renewing has given everything back within it
    renew_interval_s: float = 20.0  # a third: two messages may be lost before a lease is
    break_even_s: float = DEFAULT_BREAK_EVEN_NS / 1e9
    max_leases: int = 100_000  # as many as one decode engine's table holds


@dataclass(frozen=True, slots=True)
class Choice:
    """How turns are sent through the engines."""

    policy: str = "kv"
    append_max_tokens: int = 1024
    append_budget_tokens: int = 2048
    append_stall_weight: float = 0.125
    explain_log_every: int = 0


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Engines' base URLs, where to listen, and how to behave. UserError for what cannot work."""

    decode: tuple[str, ...]
    prefill: tuple[str, ...] = ()
    host: str = "0.0.0.0"  # as vLLM's own server does
    port: int = 8000
    admin_host: str = "127.0.0.1"
    admin_port: int = 8001
    return_enabled: bool = True
    prefill_timeout_s: float = 300.0
    retention_s: float = 480.0  # decoder_kv_blocks_ttl: a handle is worth nothing after it
    tenant_header: str = "authorization"
    choice: Choice = field(default_factory=Choice)
    models_interval_s: float = 30.0
    leases: Leases = field(default_factory=Leases)
    limits: Limits = field(default_factory=Limits)
    timeouts: Timeouts = field(default_factory=Timeouts)

    def __post_init__(self) -> None:
        if not self.decode:
            raise UserError("at least one --decode URL is needed")
        for url in (*self.prefill, *self.decode):
            check_url(url)
        for group in (self.limits, self.timeouts):
            for bound in fields(group):
                if getattr(group, bound.name) <= 0:
                    raise UserError(f"--{bound.name.replace('_', '-')} must be positive")
        if min(self.prefill_timeout_s, self.retention_s) <= 0:
            raise UserError("--prefill-timeout-s and --retention-s must be positive")
        if min(getattr(self.choice, bound.name) for bound in fields(Choice) if bound.name != "policy") < 0:
            raise UserError("--append-... and --explain-log-every must not be negative")
        if self.models_interval_s < 0:
            raise UserError("--models-interval-s must not be negative")
        if min(self.leases.max_leases, self.leases.break_even_s) <= 0:
            raise UserError("--max-leases and --break-even-s must be positive")
        if not 0 < self.leases.renew_interval_s < self.leases.lease_term_s <= MAX_TERM_MS / 1000:
            raise UserError("--renew-interval-s must be positive, and shorter than --lease-term-s")


def check_url(url: str) -> None:
    """UserError unless `url` is `http(s)://host[:port]`."""
    try:
        parts = urlsplit(url)
        named = bool(parts.hostname) and (parts.port is None or 0 < parts.port < 65536)
    except ValueError:
        named = False
    if not named or parts.scheme not in ("http", "https") or parts.path not in ("", "/") or parts.query:
        raise UserError(f"{url!r} is not an engine's base URL, like http://127.0.0.1:8100")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The router's flags."""
    default = RouterConfig(decode=("http://localhost",))
    parser.add_argument(
        "--prefill",
        metavar="URL",
        action="append",
        default=[],
        help="a prefill engine; repeat for more (without any, decode computes all, and nothing returns)",
    )
    parser.add_argument(
        "--decode", metavar="URL", action="append", default=[], help="a decode engine; repeat for more"
    )
    parser.add_argument("--host", default=default.host, help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", type=int, default=default.port, help="port to listen on (default: %(default)s)"
    )
    parser.add_argument(
        "--admin-host",
        default=default.admin_host,
        help="address of metrics and conversations (default: %(default)s)",
    )
    parser.add_argument(
        "--admin-port",
        type=int,
        default=default.admin_port,
        help="port of metrics and conversations (default: %(default)s)",
    )
    parser.add_argument(
        "--return",
        dest="return_mode",
        choices=("on", "off"),
        default="on",
        help="read earlier turns back from decode, or compute every prompt on prefill (default: %(default)s)",
    )
    parser.add_argument(
        "--tenant-header",
        metavar="NAME",
        default=default.tenant_header,
        help="the request header that says whose conversations it may reuse (default: %(default)s)",
    )
    _add_bound(
        parser,
        "prefill_timeout_s",
        default.prefill_timeout_s,
        "for a prompt's prefill before another way is taken",
    )
    _add_bound(parser, "retention_s", default.retention_s, "a handle's life; decode's decoder_kv_blocks_ttl")
    _add_choice(parser, default.choice)
    _add_bound(
        parser,
        "models_interval_s",
        default.models_interval_s,
        "between two readings of what models an engine serves; 0: any engine may serve any model",
    )
    _add_leases(parser, default.leases)
    for group in (default.timeouts, default.limits):
        for bound in fields(group):
            _add_bound(parser, bound.name, getattr(group, bound.name), _BOUND_HELP[bound.name])


def _add_choice(parser: argparse.ArgumentParser, default: Choice) -> None:
    parser.add_argument(
        "--policy",
        default=default.policy,
        metavar="NAME",
        help=f"{', '.join(POLICIES)}, or one's own as module:Class (default: %(default)s)",
    )
    for name, what in _CHOICE_HELP.items():
        _add_bound(parser, name, getattr(default, name), what)


def _add_leases(parser: argparse.ArgumentParser, default: Leases) -> None:
    parser.add_argument(
        "--secret-file",
        metavar="FILE",
        default=default.secret_file,
        help="the engines' secret (see `kvloop keygen`); without it no lease is renewed",
    )
    parser.add_argument(
        "--lease-policy",
        choices=[policy.value for policy in LeasePolicy],
        default=default.lease_policy.value,
        help="renew a lease while a return is likely enough to pay, or to the end of its retention "
        "(default: %(default)s)",
    )
    _add_bound(
        parser, "lease_term_s", default.lease_term_s, "a lease lives after each renewal; decode's lease term"
    )
    _add_bound(parser, "renew_interval_s", default.renew_interval_s, "between two renewals of a lease")
    _add_bound(
        parser,
        "break_even_s",
        default.break_even_s,
        "that holding a token's KV may last to cost as much as computing it; longer keeps more",
    )
    _add_bound(parser, "max_leases", default.max_leases, "leases that are renewed")


def from_args(namespace: argparse.Namespace) -> RouterConfig:
    """The config that the parsed flags describe. UserError for what cannot work."""
    return RouterConfig(
        prefill=tuple(namespace.prefill),
        decode=tuple(namespace.decode),
        host=namespace.host,
        port=namespace.port,
        admin_host=namespace.admin_host,
        admin_port=namespace.admin_port,
        return_enabled=namespace.return_mode == "on",
        prefill_timeout_s=namespace.prefill_timeout_s,
        retention_s=namespace.retention_s,
        tenant_header=namespace.tenant_header.lower(),
        choice=Choice(**{bound.name: getattr(namespace, bound.name) for bound in fields(Choice)}),
        models_interval_s=namespace.models_interval_s,
        leases=Leases(
            secret_file=namespace.secret_file,
            lease_policy=LeasePolicy(namespace.lease_policy),
            lease_term_s=namespace.lease_term_s,
            renew_interval_s=namespace.renew_interval_s,
            break_even_s=namespace.break_even_s,
            max_leases=namespace.max_leases,
        ),
        limits=Limits(**{bound.name: getattr(namespace, bound.name) for bound in fields(Limits)}),
        timeouts=Timeouts(**{bound.name: getattr(namespace, bound.name) for bound in fields(Timeouts)}),
    )


_CHOICE_HELP = {
    "append_max_tokens": "tokens of a turn that decode may compute by itself, 0 for none",
    "append_budget_tokens": "such tokens under way at one decode engine",
    "append_stall_weight": "what a second's standstill of an answer weighs against one of a first token",
    "explain_log_every": "one decision of so many is logged, 0 for none",
}
_BOUND_HELP = {
    "connect_timeout_s": "for a connection to an engine",
    "client_timeout_s": "for a request to come in whole",
    "keep_alive_s": "a client's connection is kept without a request",
    "idle_timeout_s": "an answer may stand still",
    "drain_timeout_s": "for answers under way when told to stop",
    "max_connections": "clients' connections",
    "max_header_bytes": "a request's line and headers; more is answered with 431",
    "max_body_bytes": "a request's body; more is answered with 413",
    "max_buffered_bytes": "all requests' bodies together; more is answered with 503",
    "max_answer_bytes": "a JSON answer; more is answered with 502",
    "max_event_bytes": "one event of a stream",
    "response_age_s": "a response is kept after its last use, to go on from",
    "max_responses": "responses that are kept to go on from",
    "max_response_bytes": "memory for the responses that are kept",
    "max_conversation_keys": "message prefixes and names that are remembered",
    "max_conversation_bytes": "memory for the conversations that are remembered",
}


def _add_bound(parser: argparse.ArgumentParser, name: str, default: float, what: str) -> None:
    parser.add_argument(
        f"--{name.replace('_', '-')}",
        type=type(default),
        default=default,
        metavar="SECONDS" if name.endswith("_s") else "BYTES" if name.endswith("_bytes") else "COUNT",
        help=f"{what} (default: %(default)s)",
    )
