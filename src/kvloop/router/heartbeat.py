"""Everything that keeps a router's leases alive, put together: keeper, task, control channel, metrics.

Without the deployment's secret none of it is there: no handle can be read and no message sealed. Each lease
then lives one term.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from kvloop.control.channel import ControlChannel
from kvloop.control.secret import read_secret
from kvloop.core.keeper import Keeper, KeeperTimes
from kvloop.core.returns import ReturnModel
from kvloop.router.config import LeasePolicy, RouterConfig
from kvloop.router.lease_metrics import LeaseState
from kvloop.router.leases import TurnLeases
from kvloop.router.metrics import Metrics
from kvloop.router.renewal import Renewal
from kvloop.wire.seal import Seal

logger = logging.getLogger("kvloop.router")

DROPS_PER_INTERVAL = 20
"""Messages that tell decode what to drop, at most, for each that renews."""
_NS_PER_S = 1_000_000_000


def keeper_of(config: RouterConfig) -> Keeper:
    """The keeper that the config describes."""
    leases = config.leases
    ttl_ns = int(config.retention_s * _NS_PER_S)
    interval_ns = int(leases.renew_interval_s * _NS_PER_S)
    times = KeeperTimes(
        interval_ns=interval_ns,
        term_ns=int(leases.lease_term_s * _NS_PER_S),
        ttl_ns=ttl_ns,
        drop_every_ns=max(1, interval_ns // DROPS_PER_INTERVAL),
    )
    model = ReturnModel(ttl_ns, int(leases.break_even_s * _NS_PER_S))
    fixed = leases.lease_policy is LeasePolicy.FIXED
    return Keeper(model, times, fixed=fixed, max_leases=leases.max_leases)


@asynccontextmanager
async def renewing(config: RouterConfig, metrics: Metrics) -> AsyncIterator[TurnLeases | None]:
    """The leases of a router's turns, renewed as long as the block lasts; None where it cannot renew any.

    UserError for a secret that cannot be read.
    """
    if not config.return_enabled:
        yield None
        return
    if config.leases.secret_file is None:
        logger.warning("without --secret-file no lease is renewed: what decode keeps lives one term")
        yield None
        return
    key = read_secret(config.leases.secret_file, "--secret-file")
    renewal = Renewal(keeper_of(config), time.monotonic_ns)
    channel = ControlChannel(None, Seal(key, f"router/{os.urandom(8).hex()}"), on_reply=renewal.on_reply)
    leases = TurnLeases(renewal, key)
    metrics.registry.register(LeaseState(leases, channel.frames_dropped))
    channel.start()
    task = asyncio.get_running_loop().create_task(renewal.run(channel.send))
    try:
        yield leases
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        channel.stop()
