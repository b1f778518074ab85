"""What a router is told at its start. Nothing else configures it; its flags are in `router.flags`."""

from dataclasses import dataclass, field, fields
from enum import StrEnum
from math import inf

from kvloop.core.returns import DEFAULT_BREAK_EVEN_NS
from kvloop.errors import UserError
from kvloop.router.log import LogFormat
from kvloop.router.target import check_url
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
    max_continuation_bytes: int = 256 * _MIB  # tokens of all the streams that can be gone on with
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
    dns_interval_s: float = 10.0
    reload_interval_s: float = 2.0  # as fast as an operator looks for an effect


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
class Health:
    """When an engine is left out, and how it comes back. See `core.breaker` and `core.probing`."""

    breaker_failures: int = 5  # in a row, of those that may be the requests' own fault
    breaker_ratio: float = 0.5  # of the hops within the window, once there are 20
    breaker_window_s: float = 10.0
    breaker_backoff_max_s: float = 8.0  # an engine that is back is found within this
    probe_interval_s: float = 5.0
    probe_timeout_s: float = 5.0  # a server that takes in long prompts is slow to answer anything
    probe_fall: int = 3  # one lost packet takes nobody out
    probe_rise: int = 2
    slow_start_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Access:
    """Who may ask the router, and as whom it asks the engines. Without keys everybody may."""

    api_keys_file: str | None = None
    api_key: str | None = field(default=None, repr=False)
    engine_api_key_file: str | None = None


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM. With `ssl_ca_certs` clients have to show a certificate of these authorities."""

    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None
    engine_ca_file: str | None = None


@dataclass(frozen=True, slots=True)
class Discovery:
    """Engines behind DNS names (base URLs), and engines that are pods.

    A pod is found by the selector of its role, or by `pod_selector` with its role in the label
    `pod_role_label`.
    """

    prefill_dns: tuple[str, ...] = ()
    decode_dns: tuple[str, ...] = ()
    prefill_selector: str | None = None
    decode_selector: str | None = None
    pod_selector: str | None = None
    pod_role_label: str = "kvloop-role"
    pod_namespace: str = "default"
    pod_port: int = 8000  # vLLM's own
    kubeconfig: str | None = None

    @property
    def wants_pods(self) -> bool:
        """Whether the API server is asked at all."""
        return any((self.prefill_selector, self.decode_selector, self.pod_selector))


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Engines' base URLs, where to listen, and how to behave. UserError for what cannot work."""

    decode: tuple[str, ...]
    prefill: tuple[str, ...] = ()
    config_file: str | None = None  # names more engines, and is read again when it changes
    host: str = "0.0.0.0"  # as vLLM's own server does
    port: int = 8000
    admin_host: str = "127.0.0.1"
    admin_port: int = 8001
    return_enabled: bool = True
    continue_streams: bool = True
    drain_delay_s: float = 0.0  # between /health's saying so and the end of taking requests
    prefill_timeout_s: float = 300.0
    retention_s: float = 480.0  # decoder_kv_blocks_ttl: a handle is worth nothing after it
    tenant_header: str = "authorization"
    choice: Choice = field(default_factory=Choice)
    models_interval_s: float = 30.0
    log_format: LogFormat = LogFormat.TEXT
    turn_log: str | None = None
    leases: Leases = field(default_factory=Leases)
    limits: Limits = field(default_factory=Limits)
    timeouts: Timeouts = field(default_factory=Timeouts)
    health: Health = field(default_factory=Health)
    discovery: Discovery = field(default_factory=Discovery)
    access: Access = field(default_factory=Access)
    tls: Tls = field(default_factory=Tls)

    def __post_init__(self) -> None:
        found = self.discovery
        if not self.decode and not self.config_file and not found.decode_dns and not found.wants_pods:
            raise UserError("at least one --decode URL is needed, or a --config file that names engines")
        if not 0 < found.pod_port < 65536:
            raise UserError(f"--pod-port {found.pod_port} is not a port number")
        for url in (*self.prefill, *self.decode, *found.prefill_dns, *found.decode_dns):
            check_url(url)
        for group in (self.limits, self.timeouts, self.health):
            for bound in fields(group):
                if not 0 < getattr(group, bound.name) < inf:
                    raise UserError(f"--{bound.name.replace('_', '-')} must be positive")
        if self.health.breaker_ratio > 1:
            raise UserError("--breaker-ratio must be at most 1")
        if min(self.prefill_timeout_s, self.retention_s) <= 0:
            raise UserError("--prefill-timeout-s and --retention-s must be positive")
        if min(getattr(self.choice, bound.name) for bound in fields(Choice) if bound.name != "policy") < 0:
            raise UserError("--append-... and --explain-log-every must not be negative")
        if self.models_interval_s < 0:
            raise UserError("--models-interval-s must not be negative")
        if self.tls.ssl_certfile is None and (self.tls.ssl_keyfile or self.tls.ssl_ca_certs):
            raise UserError("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile")
        if not 0 <= self.drain_delay_s < inf:
            raise UserError("--drain-delay-s must be at least 0")
        if min(self.leases.max_leases, self.leases.break_even_s) <= 0:
            raise UserError("--max-leases and --break-even-s must be positive")
        if not 0 < self.leases.renew_interval_s < self.leases.lease_term_s <= MAX_TERM_MS / 1000:
            raise UserError("--renew-interval-s must be positive, and shorter than --lease-term-s")
