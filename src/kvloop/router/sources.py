"""Everything that says which engines there are: flags and a file."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial

from kvloop.router.config import RouterConfig
from kvloop.router.engines_file import read_engines
from kvloop.router.membership import Membership
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
    task = None
    if config.config_file is not None:
        file = WatchedFile(
            "--config",
            config.config_file,
            read_engines,
            partial(membership.set, "file"),
            reloads,
        )
        task = loop.create_task(file.follow(config.timeouts.reload_interval_s))
    membership.started()
    async with running(task):
        yield
