"""Engines that are pods: a list, then a watch from where the list ended, and so on.

The API server is asked as its own clients ask: pages, bookmarks, a watch that ends by itself now and then, a
new list when the watch's place is too old (410). Whatever else goes wrong says nothing about engines: they
are kept as they are, and the API server is asked again after a growing, jittered pause. The client library
knows how to log in; it is an extra (`kvloop[k8s]`), loaded only where it is wanted.
"""

import asyncio
import contextlib
import importlib
import logging
import random
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from kvloop.errors import PeerError, UserError
from kvloop.router.membership import Membership
from kvloop.router.pods import Event, Pod, PodList, Pods, Problem

PAGE_PODS = 500
WATCH_S = 300
CONNECT_TIMEOUT_S = 10.0
SILENCE_S = 60.0  # beyond the watch's own time, or for a page of a list
PAUSE_FIRST_S = 1.0
PAUSE_MAX_S = 30.0
LOG_EVERY_S = 60.0
GONE = 410

logger = logging.getLogger("kvloop.router")


class ApiError(PeerError):
    """What the API server said that is no answer."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message[:200]}")
        self.code = code


class PodSource:
    """Follows the pods of one selector. `lists`, `failures`: how often it began anew, and had to."""

    def __init__(
        self, api: Any, namespace: str, selector: str, pods: Pods, membership: Membership, name: str
    ) -> None:
        self.lists = 0
        self.failures = 0
        self.name = name
        self._api = api
        self._asked = {"namespace": namespace, "label_selector": selector, "_preload_content": False}
        self._pods = pods
        self._membership = membership
        self._silent_until_s = 0.0

    async def follow(self, pause_first_s: float = PAUSE_FIRST_S) -> None:
        """Follow for ever."""
        pause_s = pause_first_s
        while True:
            try:
                version = await self._list()
                while True:
                    version = await self._watch(version)
                    pause_s = pause_first_s
            except Exception as error:  # whatever it is, engines go on
                self.failures += 1
                self._membership.failures[self.name] += 1
                if not (isinstance(error, ApiError) and error.code == GONE):
                    self._complain(error)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    async def _list(self) -> str:
        pods: list[Pod] = []
        more = ""
        while True:
            asked = {**self._asked, "limit": PAGE_PODS} | ({"_continue": more} if more else {})
            answer = await self._api.list_namespaced_pod(
                **asked, _request_timeout=(CONNECT_TIMEOUT_S, SILENCE_S)
            )
            async with contextlib.aclosing(_Closing(answer)):
                page = msgspec.json.decode(await _body(answer), type=PodList)
            pods += page.items
            more = page.metadata.continue_
            if not more:
                break
        self.lists += 1
        self._pods.listed(pods)
        self._tell()
        return page.metadata.resource_version

    async def _watch(self, version: str) -> str:
        """One watch from `version` to its end; from where the next is to begin."""
        answer = await self._api.list_namespaced_pod(
            **self._asked,
            watch=True,
            resource_version=version,
            allow_watch_bookmarks=True,
            timeout_seconds=WATCH_S,
            _request_timeout=(CONNECT_TIMEOUT_S, WATCH_S + SILENCE_S),
        )
        async with contextlib.aclosing(_Closing(answer)):
            if answer.status != 200:
                await _body(answer)
            while line := await answer.content.readline():
                version = self._heard(msgspec.json.decode(line, type=Event)) or version
        return version

    def _heard(self, event: Event) -> str:
        """Take in one event; from where a watch after it is to begin."""
        if event.type == "ERROR":
            problem = msgspec.json.decode(event.object, type=Problem)
            raise ApiError(problem.code, problem.message)
        pod = msgspec.json.decode(event.object, type=Pod)
        is_there = event.type in ("ADDED", "MODIFIED")
        if (is_there and self._pods.changed(pod)) or (event.type == "DELETED" and self._pods.gone(pod)):
            self._tell()
        return pod.metadata.resource_version

    def _tell(self) -> None:
        self._membership.set(self.name, self._pods.targets())

    def _complain(self, error: Exception) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._silent_until_s:
            self._silent_until_s = now_s + LOG_EVERY_S
            why = str(error) or type(error).__name__
            logger.warning("pods cannot be followed (%s); engines are kept as they are", why)


class _Closing:
    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def aclose(self) -> None:
        self._answer.close()


async def _body(answer: Any) -> bytes:
    data: bytes = await answer.read()
    if answer.status != 200:
        try:
            problem = msgspec.json.decode(data, type=Problem)
        except msgspec.DecodeError:
            problem = Problem()
        raise ApiError(problem.code or answer.status, problem.message)
    return data


@contextlib.asynccontextmanager
async def pod_api(kubeconfig: str | None) -> AsyncIterator[Any]:
    """The part of the client library that lists pods, logged in by a file or as a pod of the cluster.

    UserError if the library is missing, or there is no way in.
    """
    try:
        client: Any = importlib.import_module("kubernetes_asyncio.client")
        config: Any = importlib.import_module("kubernetes_asyncio.config")
    except ImportError:
        raise UserError("pods are followed with kubernetes_asyncio: install kvloop[k8s]") from None
    settings = client.Configuration()
    try:
        if kubeconfig is None:
            config.load_incluster_config(client_configuration=settings)
        else:
            await config.load_kube_config(kubeconfig, client_configuration=settings, persist_config=False)
    except Exception as error:  # the library's own, OSError, yaml's: all of them the operator's to mend
        where = "this is no pod of a cluster" if kubeconfig is None else f"--kubeconfig {kubeconfig!r}"
        raise UserError(f"there is no way to the Kubernetes API server: {where}: {error}") from None
    async with client.ApiClient(settings) as api_client:
        yield client.CoreV1Api(api_client)
