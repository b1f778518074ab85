"""The router's memory: which handle a request may read back from, and whose it is.

A request belongs to a tenant: a digest of its API key's, or of the header that says who is calling
(Authorization, unless configured otherwise). The tenant goes into every key of the lineage table, and into
the cache salt that the engines see, so that neither side ever meets another tenant's blocks; a request
without either is everybody's, and its own salt goes on as it is. Names come from wherever clients put them
today, each under its own kind.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvloop.core.lineage import FiledTurn, LineageTable, Match, Name, Prompt, content_keys, name_key
from kvloop.router.leases import LeaseUse, TurnLeases, is_return
from kvloop.router.request import Request
from kvloop.router.retain import retention_asked_ns
from kvloop.wire.openai import SALT_PREFIX, Endpoint, Generation, RequestError, filed_handle

MAX_NAME_CHARS = 256
MAX_HANDLE_BYTES = 256 * 1024  # upstream's lists the blocks of every group; ours has under 300 bytes
# From the one that names a single conversation most surely to the one that several may share.
NAME_FIELDS = (
    "conversation_id",
    "session_id",
    "session_params.session_id",
    "metadata.session_id",
    "prompt_cache_key",
)
NAME_HEADERS = (
    "x-conversation-id",
    "x-session-id",
    "x-claude-code-session-id",
    "thread-id",
    "session-id",
    "x-dynamo-session-id",
    "x-smg-routing-key",
)
_HEADER_KEYS = tuple((kind, kind.encode()) for kind in NAME_HEADERS)
PROMPT_UNIT_BYTES = 1024  # a prompt is cut finely in its first KiB, then by the KiB
_PROMPT_FINE_BYTES = 128
# What comes before the first message in the prompt, or changes how all of them are rendered.
ROOT_FIELDS = (
    "tools",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
    "add_special_tokens",
    "mm_processor_kwargs",
)
_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Lookup:
    """A request as the table sees it. `salt` is the engines' cache salt, None for none.

    `keep_ns`: how long its client wants what it leaves to be kept, 0 for not at all, None if it does not say.
    `gap_ns`: how long ago the turn ended that it goes on from, None where it shares only a part with it.
    """

    tenant: str
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

    def look_up(self, request: Request, generation: Generation) -> Lookup:
        """Whose request it is, and the turn it goes on from.

        RequestError for a tenant that contradicts itself, or a retention that is none.
        """
        keep_ns = retention_asked_ns(request)
        caller = self._caller(request)
        tenant, salt = "", generation.cache_salt
        if caller is not None:
            tenant = hashlib.blake2b(
                caller, key=self._key, digest_size=16, person=b"kvloop.tenant"
            ).hexdigest()
            salt = _salt(caller, generation.cache_salt)
        content = content_keys(self._key, _root(generation, tenant, salt), units_of(generation))
        names = [
            (name, name_key(self._key, tenant, generation.model, name))
            for name in _names(request, generation)
        ]
        now_ns = self.clock_ns()
        match = self.table.find(content, names, now_ns)
        self._end_leases(())
        gap_ns = None
        if match is not None:
            if is_return(match):
                gap_ns = now_ns - (match.turn.expires_ns - self._retention_ns)
            if self.leases is not None and self.leases.are_gone(match.turn):
                match = None
        return Lookup(tenant, salt, content, names, match, keep_ns, gap_ns)

    def use(self, lookup: Lookup) -> LeaseUse | None:
        """The request may claim what it found, until it ends this; None where there is no lease."""
        return None if lookup.match is None or self.leases is None else self.leases.use(lookup.match)

    def file(self, lookup: Lookup, handle: bytes, engine: str, ending: str, prompt: Prompt) -> bool:
        """Remember the handle that `engine` gave for the request's turn. False if it is not worth it."""
        filed = filed_handle(handle) if len(handle) <= MAX_HANDLE_BYTES else None
        if filed is None or lookup.keep_ns == 0:
            return False
        now_ns = self.clock_ns()
        names = tuple(name for name, _ in lookup.names)
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
        self._end_leases(self.table.file(turn, lookup.content, [key for _, key in lookup.names], now_ns))
        return True

    def remove(self, kind: str, value: str) -> int:
        """Forget the turns named so and let their leases go; how many turns that were."""
        removed = self.table.remove(kind, value)
        self._end_leases(())
        return removed

    def expire(self) -> None:
        """Forget turns that have passed their time."""
        self.table.expire(self.clock_ns())
        self._end_leases(())

    def _end_leases(self, superseded: Sequence[FiledTurn]) -> None:
        """End those of superseded turns, and of all that the table has let go of."""
        turns = [*superseded, *self.table.take_dropped()]
        if turns and self.leases is not None:
            self.leases.ended(turns)

    def _caller(self, request: Request) -> bytes | None:
        if request.admitted.tenant is not None:  # no header can say this: it has no NUL
            return b"\0tenant:" + request.admitted.tenant.encode()
        values = [value for name, value in request.headers if name == self._tenant_header]
        if len(values) > 1:
            header = self._tenant_header.decode()
            raise RequestError(f"the request has {len(values)} {header} headers", header, "invalid_value")
        return values[0] if values else None


def _root(generation: Generation, tenant: str, salt: str | None) -> list[bytes]:
    """What identifies the stretch of a prompt before its first unit, and whose it is."""
    root = [tenant.encode(), generation.endpoint.encode(), generation.model.encode(), (salt or "").encode()]
    root += [bytes(generation.fields.get(name, b"")) for name in ROOT_FIELDS]
    return root


def units_of(generation: Generation) -> Sequence[bytes]:
    """What a prompt consists of: each message's own bytes, or whole stretches of a prompt's bytes.

    A prompt's last stretch counts only if it is whole, for the next turn's prompt goes on in the middle of
    it.
    """
    if generation.endpoint is Endpoint.CHAT:
        return generation.messages
    prompt = bytes(generation.fields.get("prompt", b"")).rstrip(b'"] \t\r\n')
    ends = [*range(_PROMPT_FINE_BYTES, PROMPT_UNIT_BYTES, _PROMPT_FINE_BYTES)]
    ends += range(PROMPT_UNIT_BYTES, len(prompt) + 1, PROMPT_UNIT_BYTES)
    return [prompt[start:end] for start, end in zip([0, *ends], ends, strict=False) if end <= len(prompt)]


def _salt(caller: bytes, own: str | None) -> str:
    """The cache salt of a tenant's requests, fit for vLLM's alphabet: the tenant's, and its own salt's.

    Without a key, for a restarted router or another one has to make the same: the engines' caches live on.
    """
    digest = hashlib.blake2b(
        len(caller).to_bytes(8, "little") + caller, digest_size=16, person=b"kvloop.salt"
    )
    digest.update(b"\0" if own is None else b"\1" + own.encode())
    return SALT_PREFIX + digest.hexdigest()


def _names(request: Request, generation: Generation) -> list[Name]:
    names = [Name(kind, value) for kind in NAME_FIELDS if (value := generation.text(kind))]
    names += [Name(kind, sent.decode("latin-1")) for kind, key in _HEADER_KEYS if (sent := request.get(key))]
    return [name for name in names if len(name.value) <= MAX_NAME_CHARS]
