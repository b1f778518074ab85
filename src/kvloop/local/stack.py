"""A whole deployment on one machine: prefill engines, decode engines and a router, as one context manager.

    with Stack(StackConfig(model="tiny", decode=2)) as stack:
        post(stack.url + "/v1/chat/completions", ...)
        stack.decode[0].kill()
        stack.decode[0].restart()

Entering returns when everything is ready, or raises `UserError` with the log's tail and nothing left running;
leaving stops everything. Each engine gets cores of its own where there are enough. Logs and the deployment's
secret live in the run folder, which goes when the stack is left, unless it was left by an error or given by
the caller.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from kvloop.errors import UserError
from kvloop.local.engine import (
    EngineCommand,
    EngineOptions,
    build_engine_command,
    data_parallel_ranks,
    worker_count,
)
from kvloop.local.flags import VllmFlags
from kvloop.local.installation import find_vllm
from kvloop.local.models import Model, cache_folder, resolve_model
from kvloop.local.ports import free_port_run, free_ports, require_free
from kvloop.local.readiness import Say, StartTimes, wait_ready
from kvloop.local.secret import write_secret
from kvloop.local.server import Server, ServerSpec
from kvloop.local.stack_config import StackConfig, engine_cores, engine_flags, worker_cores
from kvloop.local.supervise import stop_all
from kvloop.local.transfer_config import Connector, Role

HOST = "127.0.0.1"

BuildEngine = Callable[[EngineOptions, Mapping[str, str]], EngineCommand]


def _build_vllm(options: EngineOptions, environment: Mapping[str, str]) -> EngineCommand:
    return build_engine_command(options, find_vllm(), environment)


class Engine(Server):
    """A prefill or decode engine of the stack."""

    def __init__(self, spec: ServerSpec, options: EngineOptions, stack: "Stack") -> None:
        super().__init__(spec)
        self.options = options
        self._stack = stack

    @property
    def engine_id(self) -> str:
        """Its id in handles and transfers, the same over restarts."""
        return self.options.engine_id or self.name

    @property
    def control_port(self) -> int:
        """Where its connector answers claims."""
        return self.options.control_port

    def restart(self, timeout_s: float | None = None) -> None:
        """Kill it if it runs, start it at the same address with the same id, and wait until it is ready."""
        if self.running:
            self.kill()
        self.start()
        self._stack.wait([self], timeout_s)


class Router(Server):
    """A router of the stack."""

    def __init__(self, spec: ServerSpec, admin_port: int) -> None:
        super().__init__(spec)
        self.admin_url = f"http://{spec.host}:{admin_port}"


class Stack:
    """The deployment. `build` makes an engine's command (simulated engines have one, and tests a fake),
    `model` is what it serves if not the config's, `say` gets progress lines."""

    def __init__(
        self,
        config: StackConfig,
        *,
        build: BuildEngine = _build_vllm,
        model: Model | None = None,
        say: Say = lambda _: None,
    ) -> None:
        self.config = config
        self.prefill: list[Engine] = []
        self.decode: list[Engine] = []
        self.routers: dict[str, Router] = {}
        self.folder = config.folder or Path(tempfile.mkdtemp(prefix="kvloop-"))
        self._secret = self.folder / "secret"
        self._build = build
        self._model = model
        self._say = say
        self._times = StartTimes(cache_folder() / "start-seconds.json")

    @property
    def url(self) -> str:
        """The router's address; without a router, the first decode engine's."""
        return self.routers["router"].url if self.routers else self.decode[0].url

    @property
    def router(self) -> Router:
        """The router. Raises `KeyError` in a stack without one."""
        return self.routers["router"]

    @property
    def servers(self) -> list[Server]:
        """Every server, engines first."""
        return [*self.prefill, *self.decode, *self.routers.values()]

    def __enter__(self) -> Self:
        """Start everything and wait until it is ready."""
        try:
            self._start()
        except BaseException as error:
            self._end(keep_logs=_is_failure(type(error)))
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop everything."""
        self._end(keep_logs=kind is not None and _is_failure(kind))

    def wait(self, servers: Sequence[Server], timeout_s: float | None = None) -> None:
        """Wait until the servers are ready. Raises `UserError` with the tail of the log of one that is
        not."""
        wait_ready(servers, timeout_s or self.config.ready_timeout_s, self._say)

    def add_router(
        self,
        name: str,
        flags: tuple[str, ...] = (),
        port: int | None = None,
        admin_port: int | None = None,
    ) -> Router:
        """Start one more router in front of the same engines and wait until it is ready."""
        free = iter(free_ports(2, HOST))
        chosen, admin = port or next(free), admin_port or next(free)
        argv = [sys.executable, "-m", "kvloop.cli", "route", "--host", HOST, "--port", str(chosen)]
        argv += ["--admin-host", HOST, "--admin-port", str(admin)]
        for role, engines in (("--prefill", self.prefill), ("--decode", self.decode)):
            for engine in engines:
                argv += [role, engine.url]
        if self.config.connector is Connector.KVLOOP:
            argv += ["--secret-file", str(self._secret)]
        log_path = self.folder / f"{name}.log"
        router = Router(ServerSpec(name, (*argv, *flags), dict(os.environ), HOST, chosen, log_path), admin)
        self.routers[name] = router
        router.start()
        self.wait([router])
        return router

    def _start(self) -> None:
        config = self.config
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"the folder {self.folder} cannot be made: {error.strerror}") from None
        taken = (("the router's --port", config.port), ("the router's --admin-port", config.admin_port))
        require_free(HOST, [(name, port) for name, port in taken if port is not None])
        model = self._model or resolve_model(config.model, allow_hub=False, progress=self._say)
        if not self._secret.exists():
            write_secret(self._secret)
        self._place_engines(model)
        kind = f"{model.location if self._model else config.model} {len(self.servers)} {config.connector}"
        engines = "engines" if self._model is None else "engines, simulated"
        self._say(
            f"starting {config.prefill} prefill and {config.decode} decode {engines}; logs in {self.folder}"
        )
        for engine in self.servers:
            engine.start()
        expected_s = self._times.expected_s(kind)
        self._times.record(kind, wait_ready(self.servers, config.ready_timeout_s, self._say, expected_s))
        if config.router:
            self._say("starting the router")
            returns = "on" if config.returns else "off"
            self.add_router(
                "router", ("--return", returns, *config.router_flags), config.port, config.admin_port
            )

    def _place_engines(self, model: Model) -> None:
        names = [(Role.PREFILL, i) for i in range(self.config.prefill)]
        names += [(Role.DECODE, i) for i in range(self.config.decode)]
        ports = iter(free_ports(3 * len(names), HOST))
        cores = engine_cores(max(len(names), self.config.shares), self.config.pin, self.config.prefill)
        for (role, index), core in zip(names, cores, strict=False):
            flags = engine_flags(self.config, role, model)
            http, control, side_channel = next(ports), next(ports), next(ports)
            ranks = data_parallel_ranks(flags)
            if ranks > 1:
                control, side_channel = free_port_run(ranks, HOST), free_port_run(ranks, HOST)
            options = EngineOptions(
                role=role,
                model=model.location,
                control_host=HOST,
                control_port=control,
                side_channel_port=side_channel,
                connector=self.config.connector,
                secret_file=None if self.config.connector is Connector.UPSTREAM else str(self._secret),
                engine_id=f"{role}-{index}-{os.getpid()}-{http}",
                cores=worker_cores(core, worker_count(flags)),
                keep_for_return=self.config.returns,
                flags=VllmFlags(("--host", HOST, "--port", str(http), *flags.words)),
            )
            self._add_engine(options, f"{role}-{index}", http)

    def _add_engine(self, options: EngineOptions, name: str, port: int) -> None:
        command = self._build(options, self.config.environment(os.environ))
        spec = ServerSpec(name, command.argv, command.env, HOST, port, self.folder / f"{name}.log")
        engines = self.prefill if options.role is Role.PREFILL else self.decode
        engines.append(Engine(spec, options, self))

    def _end(self, *, keep_logs: bool) -> None:
        running = [server.name for server in self.servers if server.running]
        if running:
            self._say(f"stopping {', '.join(running)}")
        # Routers first: they would only report the engines' end as failures.
        for group in (list(self.routers.values()), [*self.prefill, *self.decode]):
            stop_all(server.process for server in group if server.process is not None)
        if self.config.folder is not None:
            return
        self._secret.unlink(missing_ok=True)  # of no use to anybody any more
        if not (keep_logs and any(self.folder.glob("*.log"))):
            shutil.rmtree(self.folder, ignore_errors=True)


def _is_failure(kind: type[BaseException]) -> bool:
    """Whether an error is a reason to look at logs: not where somebody has ended it."""
    return not issubclass(kind, KeyboardInterrupt | SystemExit)
