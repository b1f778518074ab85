"""A port that is taken is found before the engine waits for a listener that never comes up."""

import socket

import pytest

from kvloop.control.address import require_free
from kvloop.errors import UserError
from kvloop.local.ports import free_ports


def test_a_taken_port_is_named() -> None:
    """The setting to change is named; a free port passes, and is free afterwards."""
    address = ("127.0.0.1", free_ports(1)[0])
    require_free(address, "VLLM_NIXL_SIDE_CHANNEL_PORT")
    with socket.create_server(address), pytest.raises(UserError, match="VLLM_NIXL_SIDE_CHANNEL_PORT"):
        require_free(address, "VLLM_NIXL_SIDE_CHANNEL_PORT")
