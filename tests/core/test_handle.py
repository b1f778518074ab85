"""What a handle is allowed to say."""

from dataclasses import FrozenInstanceError, fields

import pytest

from kvloop.core.handle import HANDLE_VERSION, Handle, LeaseRef


def test_a_handle_names_no_blocks_and_no_tokens() -> None:
    """It says where to ask and for which lease; what is held there is decode's to know."""
    assert [field.name for field in fields(Handle)] == [
        "version",
        "engine_id",
        "incarnation",
        "lease_id",
        "control_host",
        "control_port",
        "tp_size",
        "pp_size",
        "dcp_size",
        "token_count",
        "expires_in_ms",
    ]


def test_a_handle_does_not_change() -> None:
    """It is a value: nobody who holds one can alter another's."""
    handle = Handle(HANDLE_VERSION, "e", "i", "l", "localhost", 1, 1, 1, 1, 200, 1000)
    with pytest.raises(FrozenInstanceError):
        handle.lease_id = "m"  # type: ignore[misc]
    assert hash(handle) == hash(Handle(HANDLE_VERSION, "e", "i", "l", "localhost", 1, 1, 1, 1, 200, 1000))


def test_a_router_knows_where_to_renew() -> None:
    """The lease, the run of the engine that holds it, its control port, its tokens, its first term."""
    handle = Handle(HANDLE_VERSION, "e", "i", "l", "fd00::1", 5570, 8, 1, 1, 200, 60_000)
    assert LeaseRef.of(handle) == LeaseRef("l", "i", ("fd00::1", 5570), 200, 60_000)
