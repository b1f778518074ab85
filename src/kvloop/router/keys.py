"""API keys: who may ask the router, as which tenant, how often, and for how much at once.

The file (`--api-keys-file`) holds digests and no keys:

    keys:
      - name: alice
        sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
        tenant: acme                # the name, if it is not said
        requests_per_minute: 600    # no limit, if it is not said; likewise:
        concurrency: 16

A key is 256 random bits, so that a plain SHA-256 cannot be turned around, and a table that is looked up by
what a stranger's guess hashes to tells him nothing by its time. When the file is read again, a key that is in
it before and after goes on with what it has used up.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from kvloop.core.rate import TokenBucket
from kvloop.router.strict import Section, read_strictly

MAX_KEYS = 5_000
MAX_KEY_BYTES = 1024  # of what a client presents
ENV_NAME = "env"  # of the key in the environment
KEY_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class KeySpec:
    """A key as the file has it. `tenant` None leaves it to the tenant header."""

    name: str
    digest: bytes
    tenant: str | None
    requests_per_minute: int | None = None
    concurrency: int | None = None


class Key:
    """A key in use."""

    def __init__(self, spec: KeySpec) -> None:
        self.spec = spec
        self.in_flight = 0
        self.admitted = 0
        self.over_rate = 0
        self.over_concurrency = 0
        rate = spec.requests_per_minute
        self._bucket = None if rate is None else TokenBucket(rate)

    def begin(self, now_ns: int) -> tuple[str, int]:
        """Let a request in, to be ended: `("", 0)`. Else which limit it is over, and for how many seconds."""
        limit = self.spec.concurrency
        if limit is not None and self.in_flight >= limit:
            self.over_concurrency += 1
            return "concurrency", 1
        wait_ns = 0 if self._bucket is None else self._bucket.take(now_ns)
        if wait_ns:
            self.over_rate += 1
            return "requests_per_minute", -(-wait_ns // _NS_PER_S)
        self.in_flight += 1
        self.admitted += 1
        return "", 0

    def end(self) -> None:
        """A request that was let in is over."""
        self.in_flight -= 1

    def change(self, spec: KeySpec) -> None:
        """The file says something else of it now; what is in flight stays counted."""
        rate = spec.requests_per_minute
        if rate != self.spec.requests_per_minute:
            self._bucket = None if rate is None else TokenBucket(rate)
        self.spec = spec


class KeyRing:
    """All keys, by the digest of each. `strangers` counts requests without one of them."""

    def __init__(self) -> None:
        self.strangers = 0
        self._keys: dict[bytes, Key] = {}

    def set(self, specs: Iterable[KeySpec]) -> None:
        """All keys that there are, from now on."""
        keys: dict[bytes, Key] = {}
        for spec in specs:
            known = self._keys.get(spec.digest)
            if known is None:
                known = Key(spec)
            else:
                known.change(spec)
            keys[spec.digest] = known
        self._keys = keys

    def find(self, presented: bytes) -> Key | None:
        """The key that a client has shown, if it is one."""
        if len(presented) > MAX_KEY_BYTES:
            return None
        return self._keys.get(hashlib.sha256(presented).digest())

    def listed(self) -> list[Key]:
        """Every key."""
        return list(self._keys.values())


def spec_of(key: str, name: str, tenant: str | None) -> KeySpec:
    """The entry of a key that is known in clear."""
    return KeySpec(name, hashlib.sha256(key.encode()).digest(), tenant)


def read_keys(path: str, data: bytes) -> list[KeySpec]:
    """The keys that a file's content names. UserError for what cannot be."""
    file = read_strictly(path, data)
    file.only("keys")
    specs: list[KeySpec] = []
    seen: set[str | bytes] = set()
    for section in file.sections("keys"):
        spec = _spec(section)
        for one, field in ((spec.name, "name"), (spec.digest, "sha256")):
            if one in seen:
                section.refuse(field, "is there twice")
            seen.add(one)
        specs.append(spec)
        if len(specs) > MAX_KEYS:
            section.refuse("name", f"is one of more than {MAX_KEYS} keys")
    return specs


def _spec(section: Section) -> KeySpec:
    section.only("name", "sha256", "tenant", "requests_per_minute", "concurrency")
    name = section.needed("name")
    if name == ENV_NAME:
        section.refuse("name", "is what the key in KVLOOP_API_KEY is called")
    if not KEY_NAME.fullmatch(name):
        section.refuse("name", "must be 1 to 64 letters, digits, dots, dashes or underscores")
    digest = section.needed("sha256")
    if not _DIGEST.fullmatch(digest):
        section.refuse("sha256", "must be 64 hexadecimal digits, in small letters and quotes")
    tenant = section.text("tenant", name)
    if not tenant or len(tenant) > 256:
        section.refuse("tenant", "must have 1 to 256 characters")
    rate = section.whole("requests_per_minute", None, 1)
    return KeySpec(name, bytes.fromhex(digest), tenant, rate, section.whole("concurrency", None, 1))
