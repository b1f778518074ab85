"""What a stack is made of, and how its parts of the machine are dealt out."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvloop.errors import UserError
from kvloop.local.flags import VllmFlags
from kvloop.local.models import TINY, Model
from kvloop.local.transfer_config import Connector, Role

# Two engines on two cores were ready after 30 to 60 s; a cold disk or a big model takes minutes.
READY_TIMEOUT_S = 900.0
MAX_ENGINES = 64


@dataclass(frozen=True, slots=True)
class StackConfig:
    """One deployment. `*_flags` are vLLM flags; `*_extra` go into `kv_connector_extra_config`; `env` to
    engines.

    `port` and `admin_port` are the router's (None: a free one), `returns` is `--return on|off`,
    `kv_cache_gib` is per CPU engine, `folder` holds logs and the secret (None: a temporary one), `pin` gives
    each engine its own cores, as many as if there were `shares` engines. A stack without a connector
    is one of decode engines that serve alone.
    """

    model: str = TINY
    prefill: int = 1
    decode: int = 1
    connector: Connector = Connector.KVLOOP
    returns: bool = True
    router: bool = True
    port: int | None = None
    admin_port: int | None = None
    router_flags: tuple[str, ...] = ()
    engine_flags: tuple[str, ...] = ()
    prefill_flags: tuple[str, ...] = ()
    decode_flags: tuple[str, ...] = ()
    engine_extra: Mapping[str, Any] = field(default_factory=dict)
    prefill_extra: Mapping[str, Any] = field(default_factory=dict)
    decode_extra: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    kv_cache_gib: int = 1
    pin: bool = True
    shares: int = 0
    folder: Path | None = None
    ready_timeout_s: float = READY_TIMEOUT_S

    def __post_init__(self) -> None:
        """Raises `UserError` where there is nothing to start."""
        for name, count in (("--prefill", self.prefill), ("--decode", self.decode)):
            if name == "--prefill" and self.connector is Connector.NONE and count == 0:
                continue
            if not 1 <= count <= MAX_ENGINES:
                raise UserError(f"{name} must be from 1 to {MAX_ENGINES}, not {count}")

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """An engine's environment: a local model needs no hub, and a demo reports to nobody."""
        defaults = {
            "VLLM_CPU_KVCACHE_SPACE": str(self.kv_cache_gib),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        # Addresses of another deployment in the caller's environment are not this one's.
        inherited = {
            key: value for key, value in base.items() if not key.startswith("VLLM_NIXL_SIDE_CHANNEL_")
        }
        return defaults | inherited | dict(self.env)


def engine_flags(config: StackConfig, role: Role, model: Model) -> VllmFlags:
    """The vLLM flags of one engine of the stack, later ones winning."""
    words: list[str] = []
    if model.dtype is not None:
        words += ["--dtype", model.dtype]
    if model.name is not None:
        words += ["--served-model-name", model.name]
    words += config.engine_flags
    words += config.prefill_flags if role is Role.PREFILL else config.decode_flags
    extra = dict(config.engine_extra) | dict(
        config.prefill_extra if role is Role.PREFILL else config.decode_extra
    )
    if extra:
        words += ["--kv-transfer-config", json.dumps({"kv_connector_extra_config": extra})]
    return VllmFlags(tuple(words))


def engine_cores(engines: int, pin: bool, prefill: int = 0) -> list[str | None]:
    """A vLLM core list per engine, the `prefill` ones first: equal shares of this process's cores, or one
    shared core each where there are fewer. None for each without `pin`.

    Where cores are shared, prefill has others than decode: the two ends of a transfer, spinning for each
    other on one core, took half a minute and more for their first.
    """
    if not pin:
        return [None] * engines
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // engines
    if share == 0 and len(cores) > 1 and 0 < prefill < engines:
        mine = min(len(cores) - 1, max(1, len(cores) * prefill // engines))
        dealt = [cores[i % mine] for i in range(prefill)]
        dealt += [cores[mine + i % (len(cores) - mine)] for i in range(engines - prefill)]
        return [str(core) for core in dealt]
    if share == 0:
        return [str(cores[i % len(cores)]) for i in range(engines)]
    return [",".join(map(str, cores[i * share : (i + 1) * share])) for i in range(engines)]


def worker_cores(cores: str | None, workers: int) -> str | None:
    """An engine's core list dealt out to its workers as vLLM takes it (`"0,1|2,3"`): equal shares, or all
    cores to each where there are fewer."""
    if cores is None:
        return None
    names = cores.split(",")
    share = len(names) // workers
    if share == 0:
        return "|".join([cores] * workers)
    return "|".join(",".join(names[i * share : (i + 1) * share]) for i in range(workers))
