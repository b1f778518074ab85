"""The router's flags about what is around it: where engines are found, and who may talk to whom."""

import argparse
from dataclasses import fields
from typing import Any

from kvloop.router.config import Discovery


def add_discovery(parser: argparse.ArgumentParser, default: Discovery) -> None:
    """Flags that find engines."""
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}-dns",
            metavar="URL",
            action="append",
            default=[],
            help=f"a base URL; every address of its host's name is a {role} engine; repeat for more",
        )
        parser.add_argument(
            f"--{role}-selector",
            metavar="LABELS",
            help=f"a Kubernetes label selector; every ready pod that it finds is a {role} engine",
        )
    parser.add_argument(
        "--pod-selector", metavar="LABELS", help="the same for pods that say their role in a label"
    )
    parser.add_argument(
        "--pod-role-label",
        metavar="NAME",
        default=default.pod_role_label,
        help="that label; it says prefill, decode or both (default: %(default)s)",
    )
    parser.add_argument(
        "--pod-namespace",
        metavar="NAME",
        default=default.pod_namespace,
        help="the namespace of the pods (default: %(default)s)",
    )
    parser.add_argument(
        "--pod-port",
        type=int,
        metavar="PORT",
        default=default.pod_port,
        help="the port that engines in pods listen on (default: %(default)s)",
    )
    parser.add_argument(
        "--kubeconfig", metavar="FILE", help="how to log in to Kubernetes (default: as a pod of the cluster)"
    )


def add_access(parser: argparse.ArgumentParser) -> None:
    """Flags about keys."""
    parser.add_argument(
        "--api-keys-file",
        metavar="FILE",
        help="the API keys that clients need, as `kvloop keygen --api-key` writes them, read again when it "
        "changes; a single key can be given in KVLOOP_API_KEY instead",
    )
    parser.add_argument(
        "--engine-api-key-file",
        metavar="FILE",
        help="the key that engines ask for (vLLM's --api-key), sent to them instead of the client's",
    )


def add_tls(parser: argparse.ArgumentParser) -> None:
    """Flags about certificates."""
    for flag, what in (
        ("--ssl-certfile", "the public port's certificate and its chain; read again when it changes"),
        ("--ssl-keyfile", "its key, where the certificate's file does not hold it"),
        ("--ssl-ca-certs", "authorities; clients have to show a certificate of one of them"),
        ("--engine-ca-file", "authorities that engines' certificates are of (default: the system's)"),
    ):
        parser.add_argument(flag, metavar="FILE", help=what)


def discovery_of(namespace: argparse.Namespace) -> Discovery:
    """What the flags say about finding engines."""
    said: dict[str, Any] = {one.name: getattr(namespace, one.name) for one in fields(Discovery)}
    said |= {name: tuple(said[name]) for name in ("prefill_dns", "decode_dns")}
    return Discovery(**said)
