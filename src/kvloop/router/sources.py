"""Everything that says which engines there are: flags, a file, DNS, Kubernetes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from kvloop.router.config import Discovery, RouterConfig
from kvloop.router.dns import DnsSource
from kvloop.router.engines_file import read_engines
from kvloop.router.kubernetes import PodSource, pod_api
from kvloop.router.membership import Membership
from kvloop.router.pods import Pods
from kvloop.router.target import Role, targets_of
from kvloop.router.watch import Reloads, WatchedFile, running


@contextlib.asynccontextmanager
async def sourced(config: RouterConfig, membership: Membership, reloads: Reloads) -> AsyncIterator[None]:
    """Let the config's sources fill the fleet now, and change it as long as the block lasts.

    UserError for a file that cannot be used.
    """
    loop = asyncio.get_running_loop()
    named = [*targets_of(config.prefill, Role.PREFILL), *targets_of(config.decode, Role.DECODE)]
    membership.set("flags", named)
    tasks = []
    if config.config_file is not None:
        file = WatchedFile(
            "--config",
            config.config_file,
            read_engines,
            partial(membership.set, "file"),
            reloads,
        )
        tasks.append(loop.create_task(file.follow(config.timeouts.reload_interval_s)))
    async with contextlib.AsyncExitStack() as stack:
        for source in _names(config.discovery, membership):
            await stack.enter_async_context(contextlib.aclosing(source))
            await source.ask()
            tasks.append(loop.create_task(source.follow(config.timeouts.dns_interval_s)))
        if config.discovery.wants_pods:
            api = await stack.enter_async_context(pod_api(config.discovery.kubeconfig))
            tasks += [loop.create_task(one.follow()) for one in _selectors(config.discovery, api, membership)]
        await stack.enter_async_context(running(*tasks))
        yield


def _names(discovery: Discovery, membership: Membership) -> list[DnsSource]:
    return [
        DnsSource(url, role, membership)
        for urls, role in ((discovery.prefill_dns, Role.PREFILL), (discovery.decode_dns, Role.DECODE))
        for url in urls
    ]


def _selectors(discovery: Discovery, api: Any, membership: Membership) -> list[PodSource]:
    wanted = (
        (discovery.prefill_selector, Role.PREFILL),
        (discovery.decode_selector, Role.DECODE),
        (discovery.pod_selector, None),
    )
    return [
        PodSource(
            api,
            discovery.pod_namespace,
            selector,
            Pods(discovery.pod_port, role, discovery.pod_role_label),
            membership,
            f"pods {role} {selector}",
        )
        for selector, role in wanted
        if selector
    ]
