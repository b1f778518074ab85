"""The router's flags: what they default to, what they refuse, and that every bound has one."""

import argparse
from dataclasses import fields

import pytest

from kvloop.core.keeper import KeeperTimes
from kvloop.errors import UserError
from kvloop.router.config import (
    Access,
    Discovery,
    Health,
    LeasePolicy,
    Leases,
    Limits,
    RouterConfig,
    Timeouts,
    Tls,
)
from kvloop.router.flags import add_arguments, from_args
from kvloop.router.heartbeat import keeper_of

S = 1_000_000_000


def parsed(*words: str) -> RouterConfig:
    """The config of a command line."""
    parser = argparse.ArgumentParser(prog="kvloop route", allow_abbrev=False)
    add_arguments(parser)
    return from_args(parser.parse_args(words))


def test_defaults() -> None:
    """Flags and the dataclass have the same defaults."""
    assert parsed("--decode", "http://d:1") == RouterConfig(decode=("http://d:1",))


def test_everything_said() -> None:
    """Engines repeat, the return path has a switch, headers are told in any case."""
    config = parsed(
        *[
            "--prefill",
            "http://p:1",
            "--prefill",
            "https://[::1]:2/",
            "--decode",
            "http://d:1",
            "--host",
            "::1",
            "--port",
            "9000",
        ],
        *[
            "--admin-host",
            "::1",
            "--admin-port",
            "9001",
            "--return",
            "off",
            "--tenant-header",
            "X-Org",
            "--retention-s",
            "60",
        ],
        *["--max-body-bytes", "1000", "--keep-alive-s", "1.5", "--prefill-timeout-s", "2"],
        *["--secret-file", "s", "--lease-policy", "fixed", "--lease-term-s", "30"],
        *["--renew-interval-s", "9", "--break-even-s", "8", "--max-leases", "7"],
    )
    assert config == RouterConfig(
        prefill=("http://p:1", "https://[::1]:2/"),
        decode=("http://d:1",),
        host="::1",
        port=9000,
        admin_host="::1",
        admin_port=9001,
        return_enabled=False,
        tenant_header="x-org",
        retention_s=60.0,
        prefill_timeout_s=2.0,
        leases=Leases("s", LeasePolicy.FIXED, 30.0, 9.0, 8.0, 7),
        limits=Limits(max_body_bytes=1000),
        timeouts=Timeouts(keep_alive_s=1.5),
    )


def test_what_is_around_it() -> None:
    """Where engines are found, keys and certificates: each flag says its own field."""
    config = parsed(
        *["--config", "e.yaml", "--decode-dns", "http://d:1", "--decode-dns", "http://e:1"],
        *["--prefill-dns", "http://p:1", "--prefill-selector", "a=b", "--decode-selector", "c=d"],
        *["--pod-selector", "e=f", "--pod-role-label", "r", "--pod-namespace", "n", "--pod-port", "9"],
        *["--kubeconfig", "k", "--api-keys-file", "keys", "--engine-api-key-file", "key"],
        *["--ssl-certfile", "c", "--ssl-keyfile", "k", "--ssl-ca-certs", "a", "--engine-ca-file", "e"],
        *["--drain-delay-s", "3", "--probe-fall", "4", "--breaker-ratio", "0.25"],
    )
    assert config == RouterConfig(
        decode=(),
        config_file="e.yaml",
        drain_delay_s=3.0,
        discovery=Discovery(
            ("http://p:1",), ("http://d:1", "http://e:1"), "a=b", "c=d", "e=f", "r", "n", 9, "k"
        ),
        access=Access("keys", None, "key"),
        tls=Tls("c", "k", "a", "e"),
        health=Health(probe_fall=4, breaker_ratio=0.25),
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "--decode"),
        (("--decode", "d:1"), "base URL"),
        (("--decode", "ftp://d"), "base URL"),
        (("--decode", "http://d:99999"), "base URL"),
        (("--decode", "http://d/v1"), "base URL"),
        (("--decode", "http://"), "base URL"),
        (("--decode", "http://d", "--prefill", "x"), "base URL"),
        (("--decode", "http://d", "--max-body-bytes", "0"), "--max-body-bytes"),
        (("--decode", "http://d", "--keep-alive-s", "-1"), "--keep-alive-s"),
        (("--decode", "http://d", "--retention-s", "0"), "--retention-s"),
        (("--decode", "http://d", "--max-leases", "0"), "--max-leases"),
        (("--decode", "http://d", "--break-even-s", "0"), "--break-even-s"),
        (("--decode", "http://d", "--renew-interval-s", "0"), "--renew-interval-s"),
        (("--decode", "http://d", "--probe-fall", "0"), "--probe-fall"),
        (("--decode-selector", "a=b", "--pod-port", "0"), "--pod-port"),
        (("--decode-dns", "d:1"), "base URL"),
        (("--decode", "http://d", "--ssl-keyfile", "k"), "--ssl-certfile"),
        (("--decode", "http://d", "--drain-delay-s", "-1"), "--drain-delay-s"),
        (("--prefill-dns", "http://p"), "--decode"),
        (("--decode", "http://d", "--drain-delay-s", "nan"), "--drain-delay-s"),
        (("--decode", "http://d", "--probe-interval-s", "nan"), "--probe-interval-s"),
        (("--decode", "http://d", "--breaker-ratio", "1.1"), "--breaker-ratio"),
        (("--decode", "http://u:p@d"), "base URL"),
        (("--decode", "http://d", "--lease-term-s", "20"), "--lease-term-s"),
        (("--decode", "http://d", "--lease-term-s", "1e9"), "--lease-term-s"),
        (("--decode", "http://d", "--lease-term-s", "nan"), "--lease-term-s"),
    ],
)
def test_refused(words: tuple[str, ...], message: str) -> None:
    """What cannot work is one sentence that names the flag or the URL."""
    with pytest.raises(UserError, match=message):
        parsed(*words)


def test_every_bound_has_a_flag() -> None:
    """No bound can only be changed in the code."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    said = parser.format_help()
    for group in (Leases, Limits, Timeouts, Health):
        for bound in fields(group):
            assert f"--{bound.name.replace('_', '-')}" in said


def test_the_keepers_times_are_the_flags() -> None:
    """Drops are gathered for a twentieth of what lies between renewals: a second, by default."""
    base = ("--decode", "http://d:1")
    assert keeper_of(parsed(*base)).times == KeeperTimes()
    flags = (
        "--renew-interval-s",
        "2",
        "--lease-term-s",
        "6",
        "--retention-s",
        "48",
        "--lease-policy",
        "fixed",
    )
    keeper = keeper_of(parsed(*base, *flags))
    assert keeper.fixed
    assert keeper.times == KeeperTimes(2 * S, 6 * S, 48 * S, S // 10)
