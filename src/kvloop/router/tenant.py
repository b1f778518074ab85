"""Who is calling, as far as a request's headers say.

OpenAI's clients send their key in `Authorization`, Anthropic's in `x-api-key`, and some send both. The same
key is the same caller either way. Two that differ are refused: whichever of them was checked by somebody in
front of the router, the other could be anybody's. Where another header was configured to say who calls, it is
the only one that counts, for its values are no secrets, and a caller's own key must not be taken for one.
"""

import hashlib

from kvloop.router.request import Request
from kvloop.wire.openai import SALT_PREFIX
from kvloop.wire.refusal import RequestError

AUTHORIZATION = b"authorization"
API_KEY = b"x-api-key"
_SCHEME = b"bearer "


def caller_of(request: Request, header: bytes) -> bytes | None:
    """Who calls: its API key's tenant, else by the tenant header; None where nothing says so. RequestError
    for a contradiction."""
    if request.admitted.tenant is not None:  # no header can say this: it has no NUL
        return b"\0tenant:" + request.admitted.tenant.encode()
    caller = _only(request, header)
    if header != AUTHORIZATION:
        return caller
    key = _only(request, API_KEY)
    if key is None:
        return caller
    if caller is not None and _key_in(caller) != key:
        name = API_KEY.decode()
        raise RequestError(f"{name} and authorization are not the same key", name, "invalid_value")
    return caller if caller is not None else b"Bearer " + key


def salt_of(caller: bytes, own: str | None) -> str:
    """The cache salt of a tenant's requests, fit for vLLM's alphabet: the tenant's, and its own salt's.

    Without a key, for a restarted router or another one has to make the same: the engines' caches live on.
    """
    digest = hashlib.blake2b(
        len(caller).to_bytes(8, "little") + caller, digest_size=16, person=b"kvloop.salt"
    )
    digest.update(b"\0" if own is None else b"\1" + own.encode())
    return SALT_PREFIX + digest.hexdigest()


def _only(request: Request, header: bytes) -> bytes | None:
    if header not in request.named:
        return None
    values = [value for name, value in request.headers if name == header]
    if len(values) > 1:
        name = header.decode()
        raise RequestError(f"the request has {len(values)} {name} headers", name, "invalid_value")
    return values[0]


def _key_in(authorization: bytes) -> bytes:
    return authorization[len(_SCHEME) :] if authorization.lower().startswith(_SCHEME) else authorization
