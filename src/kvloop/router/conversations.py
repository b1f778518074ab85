"""The router's memory: which handle a request may read back from, and whose it is.

A request belongs to a tenant: a digest of its API key's, or of who is calling (`router.tenant`). The tenant
goes into every key of the lineage table, and into the cache salt that the engines see, so that neither side
ever meets another tenant's blocks; a request that does not say is everybody's, and its own salt goes on as it
is. Names come from wherever clients put them today, each under its own kind.
"""

import hashlib
from collections.abc import Callable, Sequence

import msgspec

from kvloop.core.lineage import FiledTurn, LineageTable, Match, Name, Prompt, content_keys, name_key
from kvloop.router.leases import LeaseUse, TurnLeases, is_return
from kvloop.router.names import RESPONSE, names_of
from kvloop.router.request import Request
from kvloop.router.retain import retention_asked_ns
from kvloop.router.tenant import caller_of, salt_of
from kvloop.wire.openai import Generation, filed_handle
from kvloop.wire.units import root_of

MAX_HANDLE_BYTES = 256 * 1024  # upstream's lists the blocks of every group; ours has under 300 bytes
_NS_PER_S = 1_000_000_000


class Lookup(msgspec.Struct, frozen=True):
    """A request as the table sees it. `salt` is the engines' cache salt, None for none.

    `keep_ns`: how long its client wants what it leaves to be kept, 0 for not at all, None if it does not say.
    `gap_ns`: how long ago the turn ended that it goes on from, None where it shares only a part with it.
    """

    tenant: str
    model: str
    salt: str | None
    content: list[bytes]
    names: list[tuple[Name, bytes]]
    match: Match | None
    keep_ns: int | None
    gap_ns: int | None = None


class Conversations:
    """The lineage table with its clock, its key and its retention.

    `leases`: those of the filed turns, where the router renews them. `on_incarnation(engine, incarnation)` is
    told which run of an engine each handle is of.
    """

    def __init__(
        self,
        table: LineageTable,
        key: bytes,
        tenant_header: str,
        retention_s: float,
        clock_ns: Callable[[], int],
        leases: TurnLeases | None = None,
    ) -> None:
        self.table = table
        self.leases = leases
        self.clock_ns = clock_ns
        self._key = key
        self.on_incarnation: Callable[[str, str], None] | None = None
        self._tenant_header = tenant_header.encode()
        self._retention_ns = int(retention_s * _NS_PER_S)

    def look_up(self, request: Request, generation: Generation, previous_id: str | None = None) -> Lookup:
        """Whose request it is, and the turn it goes on from. `previous_id`: the response before it, if told.

        RequestError for a tenant that contradicts itself, or a retention that is none.
        """
        keep_ns = retention_asked_ns(request)
        caller = caller_of(request, self._tenant_header)
        tenant, salt = self._tenant(caller), generation.cache_salt
        if caller is not None:
            salt = salt_of(caller, generation.cache_salt)
        content = content_keys(self._key, _root(generation, tenant, salt), generation.units)
        own, origins = names_of(request, generation, previous_id)
        names = [(name, name_key(self._key, tenant, generation.model, name)) for name in own]
        asked = names + [
            (origin.sent, name_key(self._key, tenant, generation.model, origin.filed)) for origin in origins
        ]
        now_ns = self.clock_ns()
        match = self.table.find(content, asked, now_ns)
        self._end_leases(())
        gap_ns = None
        if match is not None:
            if is_return(match):
                gap_ns = now_ns - (match.turn.expires_ns - self._retention_ns)
            if self.leases is not None and self.leases.are_gone(match.turn):
                match = None
        return Lookup(tenant, generation.model, salt, content, names, match, keep_ns, gap_ns)

    def tenant(self, request: Request) -> str:
        """Whose request it is. RequestError for one that contradicts itself."""
        return self._tenant(caller_of(request, self._tenant_header))

    def use(self, lookup: Lookup) -> LeaseUse | None:
        """The request may claim what it found, until it ends this; None where there is no lease."""
        return None if lookup.match is None or self.leases is None else self.leases.use(lookup.match)

    def file(
        self,
        lookup: Lookup,
        handle: bytes,
        engine: str,
        ending: str,
        prompt: Prompt,
        response_id: str | None = None,
    ) -> bool:
        """Remember the handle that `engine` gave for the request's turn. False if it is not worth it.

        `response_id`: its answer's, where it can be named.
        """
        filed = filed_handle(handle) if len(handle) <= MAX_HANDLE_BYTES else None
        if filed is None or lookup.keep_ns == 0:
            return False
        now_ns = self.clock_ns()
        named = list(lookup.names)
        if response_id is not None:
            name = Name(RESPONSE, response_id)
            named.append((name, name_key(self._key, lookup.tenant, lookup.model, name)))
        names = tuple(name for name, _ in named)
        lease = self.leases.read(filed) if self.leases is not None else None
        expires_ns = now_ns + self._retention_ns
        turn = FiledTurn(
            handle=filed,
            engine=engine,
            tenant=lookup.tenant,
            depth=len(lookup.content),
            expires_ns=expires_ns,
            names=names,
            lease=lease,
            prompt=prompt,
        )
        if lease is not None and self.on_incarnation is not None:
            self.on_incarnation(engine, lease.incarnation)
        if self.leases is not None:
            self.leases.filed(turn, ending, lookup.keep_ns)
        self._end_leases(self.table.file(turn, lookup.content, [key for _, key in named], now_ns))
        return True

    def kept_tokens(self, handle: bytes) -> int | None:
        """Tokens of which decode keeps the KV, by a handle of its; None for one that does not say."""
        filed = filed_handle(handle) if self.leases is not None and len(handle) <= MAX_HANDLE_BYTES else None
        lease = None if filed is None or self.leases is None else self.leases.read(filed)
        return None if lease is None else lease.token_count

    def keep(self, kind: str, value: str, keep_ns: int) -> int:
        """Let decode keep the turns named so for so long from now; how many of them it does."""
        if self.leases is None:
            return 0
        return sum([self.leases.keep(turn, keep_ns) for turn, _ in self.table.named(kind, value)])

    def remove(self, kind: str, value: str) -> int:
        """Forget the turns named so and let their leases go; how many turns that were."""
        removed = self.table.remove(kind, value)
        self._end_leases(())
        return removed

    def expire(self) -> None:
        """Forget turns that have passed their time."""
        self.table.expire(self.clock_ns())
        self._end_leases(())

    def _tenant(self, caller: bytes | None) -> str:
        if caller is None:
            return ""
        return hashlib.blake2b(caller, key=self._key, digest_size=16, person=b"kvloop.tenant").hexdigest()

    def _end_leases(self, superseded: Sequence[FiledTurn]) -> None:
        """End those of superseded turns, and of all that the table has let go of."""
        turns = [*superseded, *self.table.take_dropped()]
        if turns and self.leases is not None:
            self.leases.ended(turns)


def _root(generation: Generation, tenant: str, salt: str | None) -> list[bytes]:
    """What identifies the stretch of a prompt before its first unit, and whose it is."""
    root = [tenant.encode(), generation.endpoint.encode(), generation.model.encode(), (salt or "").encode()]
    return root + root_of(generation.endpoint, generation.fields)
