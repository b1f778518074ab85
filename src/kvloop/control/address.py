"""Addresses as ZMQ wants them: IPv6 literals in brackets, and names looked up where ZMQ would not."""

import errno
import socket

import zmq

from kvloop.errors import UserError

Address = tuple[str, int]


def endpoint_of(address: Address) -> str:
    """The ZMQ endpoint of a host and port, IPv6 literals in brackets."""
    host, port = address
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def require_free(address: Address, setting: str) -> None:
    """UserError where something listens on `address` already; `setting` names what to change."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as probe:
        try:
            probe.bind(endpoint_of(address))
        except zmq.ZMQError as error:
            raise UserError(
                f"cannot listen on {endpoint_of(address)} ({error.strerror}): set {setting}"
            ) from error


def listen(router: "zmq.Socket[bytes]", address: Address) -> None:
    """Bind `router` to `address`. ZMQ takes addresses and interfaces here, so a host name is looked up, as
    ZMQ does it for those who connect. ZMQError or OSError where that cannot be."""
    try:
        router.bind(endpoint_of(address))
    except zmq.ZMQError as error:
        if error.errno != errno.ENODEV:
            raise
        host, port = address
        found = socket.getaddrinfo(host, port, socket.AF_INET6, socket.SOCK_STREAM, 0, socket.AI_V4MAPPED)
        router.bind(endpoint_of((str(found[0][4][0]), port)))
