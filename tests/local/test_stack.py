"""A deployment of fake engines and a real router: it starts whole or not at all, and ends without a rest."""

import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from kvloop.errors import UserError
from kvloop.local import stack as stack_module
from kvloop.local.engine import EngineCommand, EngineOptions
from kvloop.local.models import Model
from kvloop.local.stack import Stack
from kvloop.local.stack_config import StackConfig, engine_cores, engine_flags, worker_cores
from kvloop.local.transfer_config import Connector, Role
from tests.local.processes import FAKE_SERVER, carrying

Build = Callable[[EngineOptions, Mapping[str, str]], EngineCommand]


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A word in the environment of everything that the test starts; models and caches are not the user's."""
    word = tmp_path.name
    monkeypatch.setenv("KVLOOP_TEST_MARK", word)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(stack_module, "resolve_model", lambda *_, **__: Model("/model", name="fake"))
    return word


def started(mark: str) -> list[int]:
    """What the test started and is still there; it carries the mark itself only in its own settings."""
    return [pid for pid in carrying(mark) if pid != os.getpid()]


def fakes(*flags: str, only: str = "") -> Build:
    """Fake engines; `flags` are for those whose id starts with `only`."""

    def build(options: EngineOptions, environment: Mapping[str, str]) -> EngineCommand:
        extra = flags if (options.engine_id or "").startswith(only) else ()
        argv = (sys.executable, str(FAKE_SERVER), options.flags.value("--port") or "", *extra)
        return EngineCommand(argv, environment, {})

    return build


def test_a_stack_starts_whole_and_ends_without_a_rest(mark: str, tmp_path: Path) -> None:
    """Engines, router and a second router answer; afterwards no process and no folder of theirs is left."""
    said: list[str] = []
    with Stack(StackConfig(prefill=2), build=fakes(), say=said.append) as stack:
        second = stack.add_router("second", ("--return", "off"))
        assert [server.name for server in stack.servers] == [
            *("prefill-0", "prefill-1", "decode-0"),
            *("router", "second"),
        ]
        assert all(server.is_healthy() for server in stack.servers)
        assert second.admin_url != stack.router.admin_url
        assert stack.url == stack.router.url
        secret = str(stack.folder / "secret")
        assert all(secret in router.spec.argv for router in (stack.router, second)), "leases are not renewed"
    assert started(mark) == []
    assert not any(tmp_path.glob("kvloop-*"))
    assert said[0].startswith("starting 2 prefill and 1 decode engines")
    assert said[-1] == "stopping prefill-0, prefill-1, decode-0, router, second"


def test_an_engine_that_dies_while_starting_ends_the_start(mark: str) -> None:
    """Its name, status and the log's tail in the error; the healthy engines are stopped; the log is kept, and
    the secret is not."""
    stack = Stack(StackConfig(), build=fakes("--fail", "3", only="decode"))
    with pytest.raises(UserError, match="decode-0 ended with status 3 while starting") as caught:
        stack.__enter__()
    assert str(caught.value).splitlines()[-1] == "fake server: cannot allocate memory"
    assert started(mark) == []
    assert (stack.folder / "decode-0.log").exists()
    assert not (stack.folder / "secret").exists()


def test_a_folder_that_cannot_be_made_is_the_user_s_mistake(tmp_path: Path) -> None:
    """It is named."""
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "run"
    with pytest.raises(UserError, match=f"the folder {folder} cannot be made"):
        Stack(StackConfig(folder=folder), build=fakes()).__enter__()


def test_an_engine_that_does_not_get_ready_ends_the_start(mark: str) -> None:
    """After its time, with the log's tail."""
    config = StackConfig(ready_timeout_s=3.0)
    with pytest.raises(UserError, match=r"prefill-0 was not ready after 3 s.*\nfake server: loading"):
        Stack(config, build=fakes("--delay", "60", only="prefill")).__enter__()
    assert started(mark) == []


def test_an_engine_restarts_at_its_address(mark: str) -> None:
    """The same port, id and log; another process."""
    with Stack(StackConfig(router=False), build=fakes()) as stack:
        engine = stack.decode[0]
        before, url, engine_id = engine.pid, engine.url, engine.engine_id
        engine.restart()
        assert (engine.url, engine.engine_id) == (url, engine_id)
        assert engine.pid != before
        assert engine.is_healthy()
        engine.kill()
        assert not engine.running
        assert engine.process is not None
        assert engine.process.status == -signal.SIGKILL
    assert started(mark) == []


def test_the_given_folder_is_kept(mark: str, tmp_path: Path) -> None:
    """With logs and the secret, which only its owner can read."""
    folder = tmp_path / "run"
    with Stack(StackConfig(router=False, folder=folder), build=fakes()):
        pass
    assert started(mark) == []
    assert {path.name for path in folder.iterdir()} == {"secret", "prefill-0.log", "decode-0.log"}
    assert folder.joinpath("secret").stat().st_mode & 0o777 == 0o600


def test_engines_get_ports_and_ids_of_their_own(mark: str) -> None:
    """However many there are. Upstream's connector gets no secret, and one-way engines keep nothing."""
    seen: list[EngineOptions] = []

    def build(options: EngineOptions, environment: Mapping[str, str]) -> EngineCommand:
        seen.append(options)
        return fakes()(options, environment)

    config = StackConfig(prefill=2, decode=2, router=False, connector=Connector.UPSTREAM, returns=False)
    with Stack(config, build=build):
        pass
    ports = [
        port
        for options in seen
        for port in (options.control_port, options.side_channel_port, int(options.flags.value("--port") or 0))
    ]
    assert len(set(ports)) == 12
    assert len({options.engine_id for options in seen}) == 4
    assert all(options.secret_file is None and not options.keep_for_return for options in seen)
    assert started(mark) == []


@pytest.mark.parametrize("counts", [{"prefill": 0}, {"decode": 0}, {"decode": 65}])
def test_a_stack_of_nothing_is_refused(counts: dict[str, int]) -> None:
    """Zero engines, or more than a machine can have."""
    with pytest.raises(UserError, match="must be from 1 to 64"):
        StackConfig(**counts)


def test_an_inherited_address_is_not_this_deployments() -> None:
    """A side channel in the caller's environment would be shared by all engines."""
    base = {"VLLM_NIXL_SIDE_CHANNEL_PORT": "5600", "HF_HUB_OFFLINE": "0", "PATH": "/bin"}
    environment = StackConfig(env={"EXTRA": "1"}).environment(base)
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT" not in environment
    assert (environment["HF_HUB_OFFLINE"], environment["PATH"], environment["EXTRA"]) == ("0", "/bin", "1")


def test_flags_and_extra_config_go_to_their_role() -> None:
    """Common ones to all, the others to one side."""
    config = StackConfig(
        engine_flags=("--seed", "1"),
        prefill_flags=("--a",),
        decode_flags=("--b",),
        engine_extra={"x": 1},
        decode_extra={"y": 2},
    )
    model = Model("/model", name="m", dtype="float32")
    named = ("--dtype", "float32", "--served-model-name", "m", "--seed", "1")
    assert engine_flags(config, Role.PREFILL, model).words == (
        *(*named, "--a", "--kv-transfer-config"),
        '{"kv_connector_extra_config": {"x": 1}}',
    )
    assert engine_flags(config, Role.DECODE, model).words[-1] == (
        '{"kv_connector_extra_config": {"x": 1, "y": 2}}'
    )


def test_cores_are_dealt_out_equally(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of what this process may use; one shared core each where there are too few."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5, 6, 7, 9})
    assert engine_cores(2, pin=True) == ["4,5", "6,7"]
    assert engine_cores(6, pin=True) == ["4", "5", "6", "7", "9", "4"]
    assert engine_cores(2, pin=False) == [None, None]


@pytest.mark.parametrize(
    ("usable", "prefill", "dealt"),
    [
        ({4, 5}, 1, ["4", "5", "5"]),
        ({4, 5}, 2, ["4", "4", "5"]),
        ({4}, 1, ["4", "4", "4"]),
        ({4, 5, 6}, 1, ["4", "5", "6"]),
    ],
)
def test_the_ends_of_a_transfer_do_not_share_a_core(
    monkeypatch: pytest.MonkeyPatch, usable: set[int], prefill: int, dealt: list[str]
) -> None:
    """Where there are fewer cores than engines; both would spin there, each for the other."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: usable)
    assert engine_cores(3, pin=True, prefill=prefill) == dealt


def test_an_engine_deals_its_cores_out_to_its_workers() -> None:
    """Equal shares, or all to each where they are too few; vLLM refuses a list that is missing."""
    assert worker_cores("4,5", 1) == "4,5"
    assert worker_cores("4,5,6,7,8", 2) == "4,5|6,7"
    assert worker_cores("4", 2) == "4|4"
    assert worker_cores(None, 2) is None
