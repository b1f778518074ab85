"""Channels that are stopped when a test is over."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.control.peer import Open, Peer


@pytest.fixture
def opened() -> Iterator[Open]:
    """Opens channels, and stops them when the test is over."""
    with ExitStack() as stack:

        def begin(*args: object, **kwargs: object) -> Peer:
            peer = Peer(*args, **kwargs)  # type: ignore[arg-type]
            stack.callback(peer.channel.stop)
            return peer

        yield begin
