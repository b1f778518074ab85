"""A taken port is found before minutes are spent."""

import socket
from collections.abc import Iterator

import pytest

from kvloop.errors import UserError
from kvloop.local.ports import free_port_run, free_ports, require_free

HOST = "127.0.0.1"


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that something listens on."""
    with socket.create_server((HOST, 0)) as server:
        yield server.getsockname()[1]


def test_a_busy_port_is_named_with_its_purpose(taken: int) -> None:
    """One line that says which port, what for, and what to do."""
    with pytest.raises(UserError, match=rf"port {taken} \(--port\) is in use on {HOST}") as caught:
        require_free(HOST, [("--port", taken)])
    assert "\n" not in str(caught.value)


def test_a_port_in_time_wait_is_free(taken: int) -> None:
    """A server that was stopped a moment ago can be started again."""
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection((HOST, port)), server.accept()[0]:
            pass
    require_free(HOST, [("--port", port)])
    assert port != taken


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_what_is_no_port_is_refused(port: int) -> None:
    """Not a traceback from the socket."""
    with pytest.raises(UserError, match="not a port number"):
        require_free(HOST, [("--port", port)])


def test_an_address_of_another_machine_is_refused() -> None:
    """A control host that is not ours fails here, not in the engine."""
    with pytest.raises(UserError, match=r"cannot listen on 192\.0\.2\.1"):
        require_free("192.0.2.1", [("--control-port", 5570)])


def test_free_ports_differ() -> None:
    """However many are asked for at once."""
    assert len(set(free_ports(30))) == 30


def test_a_run_of_ports_is_free_throughout() -> None:
    """One per data-parallel rank, consecutive."""
    first = free_port_run(4)
    require_free(HOST, [("rank", port) for port in range(first, first + 4)])
