"""Settings: names and meanings of upstream's keys, bounds, and one clear line for what cannot be."""

from pathlib import Path
from typing import Any

import pytest

from kvloop.connector.settings import Settings, check_failure_policy, read_settings
from kvloop.errors import UserError

SECRET = b"0123456789abcdef" * 4
MS, S = 1_000_000, 1_000_000_000


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    """A deployment's secret as `openssl rand -hex 32` writes it."""
    path = tmp_path / "kvloop.key"
    path.write_bytes(SECRET + b"\n")
    return path


@pytest.fixture
def read(secret_file: Path) -> Any:
    """`read_settings` with a good secret."""

    def call(data_parallel_index: int = 0, host: str = "10.0.0.7", **extra: Any) -> Settings:
        extra.setdefault("kvloop_secret_file", str(secret_file))
        return read_settings(extra, side_channel_host=host, data_parallel_index=data_parallel_index)

    return call


def test_defaults(read: Any) -> None:
    """Only the secret has to be named. The line's end is not part of it."""
    assert read() == Settings(
        role="both",
        key=SECRET,
        control_host="10.0.0.7",
        control_port=5570,
        recompute_threshold_tokens=64,
        lease_ttl_ns=480 * S,
        lease_term_ns=60 * S,
        claim_timeout_ns=1_000 * MS,
        claim_term_ns=5_000 * MS,
        max_retained_share=0.9,
        progress_delay_us=None,
        checks_every_step=False,
    )


def test_every_key_is_read(read: Any) -> None:
    """Upstream's keys keep their names and units; vLLM's own NIXL options pass by."""
    settings = read(
        kvloop_role="decode",
        kvloop_control_host="fd00::7",
        kvloop_control_port=6000,
        kv_recompute_threshold=0,
        decoder_kv_blocks_ttl=0.5,
        kvloop_lease_term=0.25,
        kvloop_claim_timeout_ms=40,
        kvloop_claim_term_ms=2500.5,
        kvloop_max_retained=0.25,
        kvloop_progress_delay_us=500,
        kvloop_check_every_step=True,
        num_threads=0,
        backends=["UCX"],
        bidirectional_kv_xfer=False,
    )
    assert settings == Settings(
        role="decode",
        key=SECRET,
        control_host="fd00::7",
        control_port=6000,
        recompute_threshold_tokens=0,
        lease_ttl_ns=S // 2,
        lease_term_ns=S // 4,
        claim_timeout_ns=40 * MS,
        claim_term_ns=2500 * MS + MS // 2,
        max_retained_share=0.25,
        progress_delay_us=500,
        checks_every_step=True,
    )


@pytest.mark.parametrize(
    ("role", "reads", "retains"), [("both", True, True), ("prefill", True, False), ("decode", False, True)]
)
def test_roles(read: Any, role: str, reads: bool, retains: bool) -> None:
    """Prefill reads, decode retains; by default an engine does both."""
    settings = read(kvloop_role=role)
    assert (settings.reads, settings.retains) == (reads, retains)


def test_the_control_port_moves_with_the_data_parallel_index(read: Any) -> None:
    """As vLLM's side channel does: one port per rank, whatever rank is on which machine."""
    assert read(data_parallel_index=3, kvloop_control_port=6000).control_port == 6003


BOUNDS = [
    ("kvloop_control_port", 1, 65535, True),
    ("kv_recompute_threshold", 0, 10_000_000, True),
    ("kvloop_progress_delay_us", 0, 1_000_000, True),
    ("decoder_kv_blocks_ttl", 0.001, 86_400, False),
    ("kvloop_claim_timeout_ms", 1, 60_000, False),
    ("kvloop_claim_term_ms", 500, 600_000, False),
    ("kvloop_lease_term", 0.001, 86_400, False),
    ("kvloop_max_retained", 0, 1, False),
]


@pytest.mark.parametrize(("name", "low", "high", "whole"), BOUNDS)
def test_numbers_have_bounds(read: Any, name: str, low: float, high: float, whole: bool) -> None:
    """Both ends are allowed; a step beyond either is an error that names the key and the bounds."""
    step = 1 if whole else 1e-6
    for good in (low, high):
        read(**{name: good})
    for bad in (low - step, high + step, float("nan"), float("inf")):
        with pytest.raises(UserError, match=rf"{name} must be a number from .* to .*, not"):
            read(**{name: bad})


@pytest.mark.parametrize("name", [name for name, *_ in BOUNDS])
@pytest.mark.parametrize("bad", ["64", True, [1], {}, "auto"])
def test_a_number_is_a_number(read: Any, name: str, bad: Any) -> None:
    """No strings, no truth values."""
    with pytest.raises(UserError, match=f"{name} must be a number"):
        read(**{name: bad})


@pytest.mark.parametrize("name", [name for name, _, _, whole in BOUNDS if whole])
def test_ports_tokens_and_microseconds_are_whole(read: Any, name: str) -> None:
    """64.0 is as good as 64; 64.5 is refused, not cut off."""
    read(**{name: 64.0})
    with pytest.raises(UserError, match=f"{name} must be a whole number, not 64.5"):
        read(**{name: 64.5})


def test_a_lease_s_term_is_no_longer_than_its_ttl(read: Any) -> None:
    """An operator who sets the TTL alone means it."""
    assert read(decoder_kv_blocks_ttl=6).lease_term_ns == 6 * S
    assert read(decoder_kv_blocks_ttl=6, kvloop_lease_term=9).lease_term_ns == 6 * S
    assert read(decoder_kv_blocks_ttl=60, kvloop_lease_term=9).lease_term_ns == 9 * S


@pytest.mark.parametrize("bad", [1, 0, "true", None])
def test_a_flag_is_true_or_false(read: Any, bad: Any) -> None:
    """Nothing that only looks like it."""
    with pytest.raises(UserError, match="kvloop_check_every_step must be true or false"):
        read(kvloop_check_every_step=bad)


def test_a_data_parallel_rank_must_have_a_port(read: Any) -> None:
    """The last rank's port is a port too."""
    read(kvloop_control_port=65_500, data_parallel_index=35)
    with pytest.raises(UserError, match="kvloop_control_port plus the data-parallel index is 65536"):
        read(kvloop_control_port=65_500, data_parallel_index=36)


def test_an_unknown_key_of_kvloop_s_is_an_error(read: Any) -> None:
    """It is named, and so are those that there are; it would otherwise do nothing, silently."""
    with pytest.raises(UserError, match=r"unknown key 'kvloop_claim_timeout'.*kvloop_claim_timeout_ms"):
        read(kvloop_claim_timeout=40)


@pytest.mark.parametrize("role", ["", "Prefill", "kv_both", None, 1, ["prefill"]])
def test_an_unknown_role_is_an_error(read: Any, role: Any) -> None:
    """The error lists the roles."""
    with pytest.raises(UserError, match="kvloop_role must be one of both, prefill, decode"):
        read(kvloop_role=role)


def test_vllm_s_own_return_path_is_refused(read: Any) -> None:
    """Both at once would report transfers of requests that vLLM has freed, which ends its process."""
    with pytest.raises(UserError, match=r"bidirectional_kv_xfer .*: remove it"):
        read(bidirectional_kv_xfer=True)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*"])
def test_a_wildcard_is_no_address_for_a_handle(read: Any, host: str) -> None:
    """Prefill would ask itself. The same holds where it is vLLM's side channel that names it."""
    for arguments in ({"kvloop_control_host": host}, {"host": host}):
        with pytest.raises(UserError, match=r"kvloop_control_host \(now '.*'\) .* reach this one"):
            read(**arguments)


@pytest.mark.parametrize("host", ["", "h" * 129, "[::1]", "tcp://h", "a b", "h\n", "hôte", 7, None])
def test_a_host_is_one_that_a_handle_can_carry(read: Any, host: Any) -> None:
    """Bare, printable, and short enough."""
    read(kvloop_control_host="h" * 128)
    with pytest.raises(UserError, match="kvloop_control_host"):
        read(kvloop_control_host=host)


@pytest.mark.parametrize("path", [None, "", 7])
def test_without_a_secret_there_is_no_engine(path: Any) -> None:
    """The error says how to make one."""
    with pytest.raises(UserError, match=r"kvloop_secret_file is not set.*openssl rand"):
        read_settings({"kvloop_secret_file": path}, side_channel_host="h", data_parallel_index=0)


def test_a_secret_that_cannot_be_read(read: Any, tmp_path: Path) -> None:
    """The file and the system's reason stand in the error."""
    with pytest.raises(UserError, match=r"gone.key' cannot be read: No such file"):
        read(kvloop_secret_file=str(tmp_path / "gone.key"))
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        read(kvloop_secret_file=str(tmp_path))


@pytest.mark.parametrize(("size", "good"), [(0, False), (15, False), (16, True), (64, True), (65, False)])
def test_a_secret_has_16_to_64_bytes(read: Any, secret_file: Path, size: int, good: bool) -> None:
    """What the digests take, checked when the engine starts and not at its first request."""
    secret_file.write_bytes(b"\n" + b"s" * size + b" \n")
    if good:
        assert read().key == b"s" * size
    else:
        with pytest.raises(UserError, match=f"must hold 16 to 64 bytes, not {size}"):
            read()


def test_a_failed_read_must_be_recomputed() -> None:
    """vLLM's default policy would answer the request with an error."""
    check_failure_policy("recompute")
    with pytest.raises(UserError, match="kv_load_failure_policy is 'fail'; kvloop needs 'recompute'"):
        check_failure_policy("fail")
