"""TLS towards clients, and the authorities that engines' certificates are checked against.

The flags are uvicorn's and vLLM's. A certificate is renewed every few weeks, so its files are looked at as
all others are: new connections get the new one, open ones are left alone.
"""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator

from kvloop.errors import UserError
from kvloop.router.config import RouterConfig, Tls
from kvloop.router.watch import Reloads, WatchedFile, running

HANDSHAKE_TIMEOUT_S = 10.0  # a connection counts as a client's from the handshake's end


@contextlib.asynccontextmanager
async def client_tls(config: RouterConfig, reloads: Reloads) -> AsyncIterator[ssl.SSLContext | None]:
    """What clients' connections are encrypted with, renewed with its files; None for not at all.

    UserError for files that cannot be used.
    """
    tls = config.tls
    if tls.ssl_certfile is None:
        yield None
        return
    context = _context(tls)
    tasks = []
    for setting, path in (("--ssl-certfile", tls.ssl_certfile), ("--ssl-keyfile", tls.ssl_keyfile)):
        if path is not None:
            file = WatchedFile(
                setting, path, lambda *_: _context(tls), lambda _: _load(context, tls), reloads
            )
            follow = file.follow(config.timeouts.reload_interval_s)
            tasks.append(asyncio.get_running_loop().create_task(follow))
    async with running(*tasks):
        yield context


def engine_tls(config: RouterConfig) -> ssl.SSLContext | None:
    """What engines' certificates are checked against; None for what the system trusts."""
    path = config.tls.engine_ca_file
    if path is None:
        return None
    try:
        return ssl.create_default_context(cafile=path)
    except (OSError, ssl.SSLError) as error:
        raise UserError(f"--engine-ca-file {path!r} cannot be used: {error}") from None


def _context(tls: Tls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load(context, tls)
    if tls.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(tls.ssl_ca_certs)
        except (OSError, ssl.SSLError) as error:
            raise UserError(f"--ssl-ca-certs {tls.ssl_ca_certs!r} cannot be used: {error}") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _load(context: ssl.SSLContext, tls: Tls) -> None:
    assert tls.ssl_certfile is not None
    try:
        context.load_cert_chain(
            tls.ssl_certfile, tls.ssl_keyfile, lambda: b""
        )  # no key may ask for a password
    except (OSError, ssl.SSLError) as error:
        files = tls.ssl_certfile + (f" and {tls.ssl_keyfile}" if tls.ssl_keyfile else "")
        raise UserError(f"--ssl-certfile, --ssl-keyfile: {files} cannot be used: {error}") from None
