"""What there is to know about an engine before it is asked anything: where it is and what it is for.

A target is what a request is sent to. Mostly that is a URL; of a server with data-parallel ranks each rank is
a target of its own, with its own queue and its own cache, and vLLM is told which by a header. Two sources may
name the same target: then it has both roles.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from urllib.parse import urlsplit

from kvloop.errors import UserError

MAX_RANKS = 1024  # of one server
MAX_TARGETS = 4096


class Role(StrEnum):
    """What an engine may be asked for."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class Target:
    """One engine, or one rank of it.

    url: without a slash at the end. weight: how much more than another engine it can take. server_name: what
    its certificate has to be for, where that is not the URL's host.
    """

    url: str
    role: Role
    rank: int | None = None
    weight: float = 1.0
    labels: tuple[tuple[str, str], ...] = ()
    server_name: str | None = None

    @property
    def name(self) -> str:
        """What it is called everywhere: its URL, and `#rank` if it has one."""
        return self.url if self.rank is None else f"{self.url}#{self.rank}"


def check_url(url: str) -> None:
    """UserError unless `url` is `http(s)://host[:port]`."""
    try:
        parts = urlsplit(url)
        named = bool(parts.hostname) and (parts.port is None or 0 < parts.port < 65536)
    except ValueError:
        named = False
    bare = named and parts.path in ("", "/") and not parts.query and not parts.fragment and "@" not in url
    if not bare or parts.scheme not in ("http", "https"):
        raise UserError(f"{url!r} is not an engine's base URL, like http://127.0.0.1:8100")


def targets_of(urls: Iterable[str], role: Role) -> list[Target]:
    """One target per URL."""
    return [Target(url.rstrip("/"), role) for url in urls]


def united(targets: Iterable[Target]) -> dict[str, Target]:
    """Targets by name, in order; of one that is there more than once, the last, with all its roles."""
    by_name: dict[str, Target] = {}
    for target in targets:
        known = by_name.get(target.name)
        if known is not None and known.role is not target.role:
            target = replace(target, role=Role.BOTH)
        by_name[target.name] = target
    return by_name
