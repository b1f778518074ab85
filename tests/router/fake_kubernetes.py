"""An API server that knows pods and nothing else: lists in pages, watches, forgets, and fails on demand."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

PAGE = 2


def pod(name: str, address: str | None = "10.0.0.1", ready: bool = True, **labels: str) -> dict[str, Any]:
    """A pod as the API server describes it, with things that nobody asked for."""
    conditions = [{"type": "Initialized", "status": "True"}, {"type": "Ready", "status": str(ready)}]
    return {
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "ns", "uid": f"u-{name}", "labels": labels},
        "spec": {"containers": [{"name": "vllm"}]},
        "status": {"phase": "Running", "podIP": address, "conditions": conditions},
    }


class FakeKubernetes:
    """Pods by name. `asked` are the queries that came; `broken` breaks every answer off."""

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.version = 10
        self.asked: list[dict[str, str]] = []
        self.tokens: set[str] = set()
        self.broken = False
        self.oldest = 0  # watches from before this are answered with 410
        self.port = 0
        self._history: list[tuple[int, str, dict[str, Any]]] = []
        self._watches: set[asyncio.StreamWriter] = set()
        self._moved = asyncio.Event()

    def put(self, one: dict[str, Any]) -> None:
        """A pod is new or changed."""
        kind = "MODIFIED" if one["metadata"]["name"] in self.pods else "ADDED"
        self.pods[one["metadata"]["name"]] = one
        self._happened(kind, one)

    def drop(self, name: str) -> None:
        """A pod is gone."""
        self._happened("DELETED", self.pods.pop(name))

    def say(self, line: bytes) -> None:
        """Write this into every open watch."""
        for writer in self._watches:
            writer.write(b"%x\r\n%b\r\n" % (len(line), line))

    def cut(self) -> None:
        """Break every open watch off."""
        for writer in list(self._watches):
            writer.transport.abort()

    async def watched(self, count: int = 1) -> None:
        """Wait until so many watches are open."""
        async with asyncio.timeout(20):
            while len(self._watches) != count:
                await asyncio.sleep(0.002)

    def _happened(self, kind: str, one: dict[str, Any]) -> None:
        self.version += 1
        one["metadata"]["resourceVersion"] = str(self.version)
        self._history.append((self.version, kind, json.loads(json.dumps(one))))
        self._moved.set()
        self._moved = asyncio.Event()

    def _matching(self, selector: str) -> list[dict[str, Any]]:
        return [one for one in self.pods.values() if _matches(one, selector)]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one request."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = urlsplit(head.split(" ")[1])
            query = {name: values[0] for name, values in parse_qs(path.query).items()}
            self.asked.append({**query, "path": path.path})
            if "authorization: " in head.lower():
                self.tokens.add(head.lower().split("authorization: ")[1].split("\r\n")[0])
            if not self.broken:
                if query.get("watch"):
                    await self._watch(reader, writer, query)
                else:
                    await self._list(writer, query)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._watches.discard(writer)
            writer.transport.abort() if self.broken else writer.close()

    async def _list(self, writer: asyncio.StreamWriter, query: dict[str, str]) -> None:
        start = int(query.get("continue", 0))
        found = self._matching(query["labelSelector"])
        page = found[start : start + PAGE]
        more = str(start + PAGE) if start + PAGE < len(found) else ""
        meta = {"resourceVersion": str(self.version), "continue": more}
        await self._answer(writer, 200, {"kind": "PodList", "metadata": meta, "items": page})

    async def _watch(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, query: dict[str, str]
    ) -> None:
        since = int(query["resourceVersion"])
        if since < self.oldest:
            status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
            await self._answer(writer, 410, status)
            return
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        self._watches.add(writer)
        left = asyncio.ensure_future(reader.read(1))
        while not left.done():
            moved = self._moved
            for version, kind, one in self._history:
                if version > since and _matches(one, query["labelSelector"]):
                    line = json.dumps({"type": kind, "object": one}).encode() + b"\n"
                    writer.write(b"%x\r\n%b\r\n" % (len(line), line))
                since = max(since, version)
            await writer.drain()
            told = asyncio.ensure_future(moved.wait())
            await asyncio.wait((told, left), return_when=asyncio.FIRST_COMPLETED)
            told.cancel()

    async def _answer(self, writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        writer.write(
            b"HTTP/1.1 %d X\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (status, len(data), data)
        )
        await writer.drain()


def _matches(one: dict[str, Any], selector: str) -> bool:
    pairs = [pair.split("=") for pair in selector.split(",")]
    return all(one["metadata"]["labels"].get(name) == value for name, value in pairs)


@asynccontextmanager
async def fake_kubernetes() -> AsyncIterator[FakeKubernetes]:
    """One that listens."""
    fake = FakeKubernetes()
    server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    fake.port = server.sockets[0].getsockname()[1]
    try:
        yield fake
    finally:
        fake.broken = True
        fake.cut()
        server.close()


def kubeconfig(port: int) -> str:
    """A file that leads to it."""
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "clusters": [{"name": "k", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
            "users": [{"name": "u", "user": {"token": "token-of-the-router"}}],
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        }
    )
