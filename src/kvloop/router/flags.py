"""The router's flags: one for everything that its config has, with the config's own defaults."""

import argparse
from dataclasses import fields

from kvloop.core.policy import POLICIES
from kvloop.router.config import (
    Access,
    Choice,
    Health,
    LeasePolicy,
    Leases,
    Limits,
    RouterConfig,
    Timeouts,
    Tls,
)
from kvloop.router.flags_outside import add_access, add_discovery, add_tls, discovery_of
from kvloop.router.log import LogFormat


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The router's flags."""
    default = RouterConfig(decode=("http://localhost",))
    _add_engines(parser)
    _add_ports(parser, default)
    add_discovery(parser, default.discovery)
    add_access(parser)
    add_tls(parser)
    _add_turns(parser, default)
    _add_leases(parser, default.leases)
    _add_bound(
        parser,
        "models_interval_s",
        default.models_interval_s,
        "between two readings of what models an engine serves; 0: any engine may serve any model",
    )
    for group in (default.timeouts, default.limits, default.health):
        for bound in fields(group):
            _add_bound(parser, bound.name, getattr(group, bound.name), _BOUND_HELP[bound.name])


def _add_engines(parser: argparse.ArgumentParser) -> None:
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
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="a YAML file that names engines, read again when it changes (see docs/operations.md)",
    )


def _add_ports(parser: argparse.ArgumentParser, default: RouterConfig) -> None:
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
        "--log-format",
        choices=[one.value for one in LogFormat],
        default=default.log_format.value,
        help="lines for people, or JSON objects (default: %(default)s)",
    )
    parser.add_argument(
        "--turn-log", metavar="FILE", help="append a line of JSON for every answered turn, without text"
    )
    _add_bound(
        parser,
        "drain_delay_s",
        default.drain_delay_s,
        "that a router which is told to stop still takes requests while its /health is 503",
    )


def _add_turns(parser: argparse.ArgumentParser, default: RouterConfig) -> None:
    parser.add_argument(
        "--return",
        dest="return_mode",
        choices=("on", "off"),
        default="on",
        help="read earlier turns back from decode, or compute every prompt on prefill (default: %(default)s)",
    )
    parser.add_argument(
        "--continue-streams",
        action=argparse.BooleanOptionalAction,
        default=default.continue_streams,
        help="let another engine go on with a stream whose engine dies, where the request allows it "
        "(default: %(default)s)",
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


def from_args(namespace: argparse.Namespace, api_key: str | None = None) -> RouterConfig:
    """The config that the parsed flags describe. UserError for what cannot work.

    `api_key`: the one that clients need, from the environment, for a flag would show it to everybody.
    """
    return RouterConfig(
        prefill=tuple(namespace.prefill),
        decode=tuple(namespace.decode),
        config_file=namespace.config,
        host=namespace.host,
        port=namespace.port,
        admin_host=namespace.admin_host,
        admin_port=namespace.admin_port,
        continue_streams=namespace.continue_streams,
        return_enabled=namespace.return_mode == "on",
        drain_delay_s=namespace.drain_delay_s,
        prefill_timeout_s=namespace.prefill_timeout_s,
        retention_s=namespace.retention_s,
        tenant_header=namespace.tenant_header.lower(),
        models_interval_s=namespace.models_interval_s,
        log_format=LogFormat(namespace.log_format),
        turn_log=namespace.turn_log,
        choice=Choice(**{bound.name: getattr(namespace, bound.name) for bound in fields(Choice)}),
        leases=Leases(
            secret_file=namespace.secret_file,
            lease_policy=LeasePolicy(namespace.lease_policy),
            lease_term_s=namespace.lease_term_s,
            renew_interval_s=namespace.renew_interval_s,
            break_even_s=namespace.break_even_s,
            max_leases=namespace.max_leases,
        ),
        discovery=discovery_of(namespace),
        access=Access(namespace.api_keys_file, api_key or None, namespace.engine_api_key_file),
        tls=Tls(**{one.name: getattr(namespace, one.name) for one in fields(Tls)}),
        limits=Limits(**{bound.name: getattr(namespace, bound.name) for bound in fields(Limits)}),
        timeouts=Timeouts(**{bound.name: getattr(namespace, bound.name) for bound in fields(Timeouts)}),
        health=Health(**{bound.name: getattr(namespace, bound.name) for bound in fields(Health)}),
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
    "breaker_failures": "failures in a row, 5xx or broken off, after which an engine is left out",
    "breaker_ratio": "share of failures within the window from which it is left out",
    "breaker_window_s": "in which failures are counted",
    "breaker_backoff_max_s": "an engine is left out at most before it is tried again",
    "probe_interval_s": "between two probes of an engine's /health, give or take a fifth",
    "probe_timeout_s": "for a probe's answer",
    "probe_fall": "missed probes in a row that take an engine out",
    "probe_rise": "passed probes in a row that bring it back",
    "slow_start_s": "in which a new or returned engine's share of the load grows to the whole",
    "dns_interval_s": "between two questions for a --prefill-dns or --decode-dns name, give or take a fifth",
    "reload_interval_s": "between two looks at the files that are read again when they change",
    "max_connections": "clients' connections",
    "max_header_bytes": "a request's line and headers; more is answered with 431",
    "max_body_bytes": "a request's body; more is answered with 413",
    "max_buffered_bytes": "all requests' bodies together; more is answered with 503",
    "max_answer_bytes": "a JSON answer; more is answered with 502",
    "max_event_bytes": "one event of a stream",
    "response_age_s": "a response is kept after its last use, to go on from",
    "max_continuation_bytes": "memory for the tokens of streams that another engine could go on with",
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
        metavar=_metavar(name),
        help=f"{what} (default: %(default)s)",
    )


def _metavar(name: str) -> str:
    endings = {"_s": "SECONDS", "_bytes": "BYTES", "_ratio": "SHARE"}
    return next((word for ending, word in endings.items() if name.endswith(ending)), "COUNT")
