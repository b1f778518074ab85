"""TLS on the public port and towards engines, with certificates of the test's own making."""

import asyncio
import contextlib
import ssl
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvloop.errors import UserError
from kvloop.router.config import RouterConfig, Timeouts, Tls
from kvloop.router.engine import Engine, EngineRules
from kvloop.router.serve import Ports, serving
from kvloop.router.target import Role, Target
from kvloop.router.upstream import EngineFailureError
from tests.router.certificates import Authority
from tests.router.fake_engine import DONE, FakeEngine, decode_plan, engines
from tests.router.harness import HELLO, RawClient, get, in_loop, post


@contextlib.contextmanager
def authority() -> Iterator[Authority]:
    """An authority whose files are gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        yield Authority(folder)


@contextlib.asynccontextmanager
async def encrypted(engine: FakeEngine, **tls: Any) -> AsyncIterator[Ports]:
    """A router that takes encrypted connections only."""
    timeouts = Timeouts(reload_interval_s=0.02, drain_timeout_s=0.2)
    config = RouterConfig(
        (engine.url,),
        host="127.0.0.1",
        port=0,
        admin_port=0,
        models_interval_s=0,
        tls=Tls(**tls),
        timeouts=timeouts,
    )
    async with serving(config) as ports:
        yield ports


@contextlib.asynccontextmanager
async def client_of(port: int, context: ssl.SSLContext | None) -> AsyncIterator[RawClient]:
    """An encrypted connection of which every byte is the test's."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        yield RawClient(reader, writer)
    finally:
        writer.transport.abort()


def trusting(one: Authority) -> ssl.SSLContext:
    """A client that trusts this authority and nobody else."""
    return ssl.create_default_context(cafile=one.file)


@in_loop
async def test_turns_over_tls() -> None:
    """Turns, streams and refusals are what they are without; who speaks plainly is not understood."""
    async with engines(decode_plan) as (engine,):
        with authority() as ca:
            certificate, key = ca.issue("router")
            async with encrypted(engine, ssl_certfile=certificate, ssl_keyfile=key) as ports:
                async with client_of(ports.port, trusting(ca)) as client:
                    client.send(post({"model": "m", "messages": [HELLO]}))
                    assert (await client.answer())[0] == 200
                    client.send(post({"model": "m", "messages": [HELLO], "stream": True}))
                    assert DONE in (await client.answer())[2]
                    client.send(b"GET / HTTP/1.1\r\nA : b\r\n\r\n")
                    assert (await client.answer())[0] == 400
                    assert await client.closed()
                async with client_of(ports.port, None) as client:
                    client.send(get("/health"))
                    assert await client.closed()
                with pytest.raises(ssl.SSLCertVerificationError):
                    async with client_of(ports.port, ssl.create_default_context()):
                        pass


@in_loop
async def test_clients_certificates() -> None:
    """With --ssl-ca-certs only clients with a certificate of these authorities are served."""
    async with engines(decode_plan) as (engine,):
        with authority() as ca, authority() as other:
            certificate, key = ca.issue("router")
            tls = {"ssl_certfile": certificate, "ssl_keyfile": key, "ssl_ca_certs": ca.file}
            async with encrypted(engine, **tls) as ports:
                for issuer, served in ((ca, True), (other, False), (None, False)):
                    context = trusting(ca)
                    if issuer is not None:
                        context.load_cert_chain(*issuer.issue("client"))
                    assert await _served(ports.port, context) is served


async def _served(port: int, context: ssl.SSLContext) -> bool:
    try:
        async with client_of(port, context) as client:
            client.send(get("/health"))
            return (await client.answer())[0] == 200
    except (OSError, asyncio.IncompleteReadError):
        return False


@in_loop
async def test_a_renewed_certificate_is_taken() -> None:
    """New connections get the new one without a restart; half of a new pair changes nothing."""
    async with engines(decode_plan) as (engine,):
        with authority() as ca, authority() as later:
            certificate, key = ca.issue("router")
            async with (
                encrypted(engine, ssl_certfile=certificate, ssl_keyfile=key) as ports,
                client_of(ports.port, trusting(ca)) as client,
            ):
                new_certificate, new_key = later.issue("router")
                Path(certificate).write_bytes(Path(new_certificate).read_bytes())
                await asyncio.sleep(0.1)
                assert await _served(ports.port, trusting(ca))
                Path(key).write_bytes(Path(new_key).read_bytes())
                while not await _served(ports.port, trusting(later)):
                    await asyncio.sleep(0.01)
                assert not await _served(ports.port, trusting(ca))
                client.send(get("/health"))
                assert (await client.answer())[0] == 200


@in_loop
async def test_engines_certificates() -> None:
    """An engine has to have a certificate of the given authority, for its host or its service's name."""
    with authority() as ca:
        for host, server_name, trusted in (
            ("127.0.0.1", None, True),
            ("decode.svc", "decode.svc", True),
            ("decode.svc", None, False),
            ("127.0.0.1", "decode.svc", False),
        ):
            served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            served.load_cert_chain(*ca.issue("engine", host))

            async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

            server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=served)
            port = server.sockets[0].getsockname()[1]
            target = Target(f"https://127.0.0.1:{port}", Role.DECODE, server_name=server_name)
            engine = Engine.of(target, EngineRules(tls=trusting(ca)))
            asked = engine.fetch((b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",), 100, 20.0)
            if trusted:
                assert (await asked)[1] == b"ok"
            else:
                with pytest.raises(EngineFailureError, match="connect"):
                    await asked
            engine.close()
            server.close()


@in_loop
async def test_files_refused() -> None:
    """Files that are missing, no certificates, or do not belong together are one sentence with the flag."""
    with authority() as ca, authority() as other, tempfile.NamedTemporaryFile() as empty:
        certificate, key = ca.issue("router")
        _, wrong = other.issue("router")
        for tls, said in (
            ({"ssl_certfile": certificate, "ssl_keyfile": wrong}, "--ssl-certfile, --ssl-keyfile"),
            ({"ssl_certfile": "/nowhere"}, "--ssl-certfile"),
            ({"ssl_certfile": certificate, "ssl_keyfile": key, "ssl_ca_certs": empty.name}, "--ssl-ca-certs"),
            ({"engine_ca_file": empty.name}, "--engine-ca-file"),
            ({"ssl_keyfile": key}, "need --ssl-certfile"),
        ):
            with pytest.raises(UserError, match=said):
                async with serving(RouterConfig(("http://d",), port=0, admin_port=0, tls=Tls(**tls))):
                    pass
