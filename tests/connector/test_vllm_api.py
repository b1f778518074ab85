"""The guard: what kvloop stands on in vLLM is there, as it was when kvloop was written for it.

Where this fails after an update of vLLM, each line says what is new, gone or changed. Nothing gone or
changed under `uses`: record the version (`record_api`), list the difference in `kvloop.connector.compat`
and handle it there.
"""

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvloop.connector import compat, cores
from tests.connector.record_api import (
    PARAMS_READ,
    PARAMS_WRITTEN,
    Sources,
    _members,
    called,
    changes,
    describe,
    recordings,
)
from tests.connector.vllm_uses import CALLS, CONSTANTS, NIXL, OWNERS, Owner

CONNECTOR = Path(compat.__file__).parent
RECORDED = recordings()
SUBCLASSES = {
    ("worker.py", "KvloopWorker"): f"{NIXL}.pull_worker:NixlPullConnectorWorker",
    ("scheduler.py", "KvloopScheduler"): f"{NIXL}.pull_scheduler:NixlPullConnectorScheduler",
    ("connector.py", "KvloopConnector"): f"{NIXL}.connector:NixlPullConnector",
    ("metadata.py", "KvloopMetadata"): f"{NIXL}.metadata:NixlConnectorMetadata",
    (
        "metadata.py",
        "WorkerNews",
    ): "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorWorkerMetadata",
}
"""kvloop's subclasses of vLLM's classes."""
VARIABLES = {
    "pool": "vllm.v1.core.block_pool:BlockPool",
    "self._pool": "vllm.v1.core.block_pool:BlockPool",
    "block": "vllm.v1.core.kv_cache_utils:KVCacheBlock",
    "manager": "vllm.v1.core.kv_cache_manager:KVCacheManager",
    "manager.coordinator": "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator",
    "coordinator": "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator",
    "one_type": "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager",
    "core": "vllm.v1.engine.core:EngineCoreProc",
    "vllm_scheduler": "vllm.v1.core.sched.scheduler:Scheduler",
    "EngineCoreRequestType": "vllm.v1.engine:EngineCoreRequestType",
    "group": "vllm.v1.kv_cache_interface:KVCacheGroupSpec",
    "parallel": "vllm.config.parallel:ParallelConfig",
    "transfer": "vllm.config.kv_transfer:KVTransferConfig",
    "request": "vllm.v1.request:Request",
    "RequestStatus": "vllm.v1.request:RequestStatus",
    "feature": "vllm.multimodal.inputs:MultiModalFeatureSpec",
    "position": "vllm.multimodal.inputs:PlaceholderRange",
    "lora": "vllm.lora.request:LoRARequest",
    "lora_config": "vllm.config.lora:LoRAConfig",
    "vllm_config": "vllm.config.vllm:VllmConfig",
    "vllm_config.model_config": "vllm.config.model:ModelConfig",
    "vllm_config.cache_config": "vllm.config.cache:CacheConfig",
    "vllm_config.parallel_config": "vllm.config.parallel:ParallelConfig",
    "vllm_config.kv_transfer_config": "vllm.config.kv_transfer:KVTransferConfig",
    "self._parallel": "vllm.config.parallel:ParallelConfig",
    "model": "vllm.config.model:ModelConfig",
    "cache": "vllm.config.cache:CacheConfig",
    "media": "vllm.config.multimodal:MultiModalConfig",
    "kv_cache_config": "vllm.v1.kv_cache_interface:KVCacheConfig",
    "kv_cache_manager": "vllm.v1.core.kv_cache_manager:KVCacheManager",
    "blocks": "vllm.v1.core.kv_cache_manager:KVCacheBlocks",
    "connector_output": "vllm.v1.outputs:KVConnectorOutput",
    "results": "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorTransferResults",
    "KVConnectorRole": "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorRole",
    "meta.remote": f"{NIXL}.metadata:RemoteMeta",
    "engine_client": "vllm.engine.protocol:EngineClient",
}
"""What the connector's variables hold, by the name that they have in its files."""
OWN_NAMES = {"meta.remote": set(), "blocks": {"append"}}


def installed() -> Sources:
    """The sources of the vLLM that is installed, whatever its distribution is called."""
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    return Sources(Path(found.origin).parent.parent)


def owner(where: str) -> Owner:
    """The entry of a class of vLLM's."""
    return next(entry for entry in OWNERS if entry.where == where)


def test_the_installed_vllm_is_the_one_that_was_recorded() -> None:
    """A version that is recorded is compared with its recording, any other with the newest one."""
    sources = installed()
    recorded = RECORDED.get(sources.version(), RECORDED[max(RECORDED)])
    differences = changes(recorded, describe(sources))
    assert not differences, "\n".join([f"vLLM {sources.version()} is another than recorded:", *differences])


@pytest.mark.parametrize("version", RECORDED)
def test_every_recorded_version_has_what_kvloop_uses(version: str) -> None:
    """All of it but what is marked as optional; nothing is recorded that is not asked for."""
    recorded = RECORDED[version]
    used = {f"{entry.where}.{name}" for entry in OWNERS for name in entry.uses} | {*CONSTANTS}
    assert not used - recorded.keys()
    optional = {f"{entry.where}.{name}" for entry in OWNERS for name in entry.optional}
    hooks = {entry.where for entry in OWNERS if entry.all_public}
    calls = {called(method) for method in CALLS}
    assert calls <= recorded.keys()
    left = recorded.keys() - used - optional - calls - {PARAMS_READ, PARAMS_WRITTEN}
    assert {name.rpartition(".")[0] for name in left} <= hooks


@pytest.mark.parametrize("version", RECORDED)
def test_vllm_s_own_methods_call_what_kvloop_hooks_into(version: str) -> None:
    """An allocation counts what it needs and takes it from the pool; a core that is woken asks for work."""
    for method, expected in CALLS.items():
        assert RECORDED[version][called(method)] == ", ".join(sorted(expected)), method


def test_the_versions_that_kvloop_was_written_for_are_recorded() -> None:
    """And no others are said to be."""
    assert {f"{major}.{minor}" for major, minor in compat.WRITTEN_FOR} == RECORDED.keys()


def test_every_difference_is_listed_in_compat() -> None:
    """By its name: whoever reads the list knows what there is to handle."""
    for line in changes(RECORDED["0.32"], RECORDED["0.33"]):
        name = re.split(r"[.:]", line.split()[1])[-1]
        if name == "kv_transfer_params" and ":" not in line.split()[1]:
            name = "remote_registration_generation"
        assert f"`{name}`" in (compat.__doc__ or ""), line


def test_groups_and_parameters() -> None:
    """The names under which vLLM looks for plugins, and what a hand-over consists of."""
    pyproject = (CONNECTOR.parent.parent.parent / "pyproject.toml").read_text()
    written = {
        "dcp_size", "do_remote_decode", "do_remote_prefill", "pp_size", "remote_block_ids",
        "remote_engine_id", "remote_host", "remote_num_tokens", "remote_port", "remote_request_id", "tp_size",
    }  # fmt: skip
    for recorded in RECORDED.values():
        for group in ("DEFAULT_PLUGINS_GROUP", "ENDPOINT_PLUGINS_GROUP"):
            name = ast.literal_eval(recorded[f"vllm.plugins:{group}"])
            assert f'[project.entry-points."{name}"]\n' in pyproject
        assert written <= set(recorded[PARAMS_WRITTEN].split(", "))
        assert written - {"do_remote_decode", "do_remote_prefill"} <= set(recorded[PARAMS_READ].split(", "))


def attributes(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Every `variable.attribute` of a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node.value), node.attr


@pytest.mark.parametrize("path", sorted(CONNECTOR.glob("*.py")), ids=lambda path: path.name)
def test_the_connector_uses_nothing_that_is_not_recorded(path: Path) -> None:
    """What its variables of vLLM's types are asked for stands in the list."""
    for variable, name in attributes(ast.parse(path.read_text())):
        where = VARIABLES.get(variable)
        if where is not None and name not in OWN_NAMES.get(variable, set()):
            assert name in owner(where).uses, f"{variable}.{name}"


@pytest.mark.parametrize("subclass", SUBCLASSES, ids=lambda subclass: subclass[1])
def test_subclasses_use_and_override_nothing_that_is_not_recorded(subclass: tuple[str, str]) -> None:
    """Whatever they reach for and do not define themselves, and whatever they define that vLLM has too."""
    path, name = subclass
    entry = owner(SUBCLASSES[subclass])
    tree = ast.parse((CONNECTOR / path).read_text())
    node = next(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name)
    own = _members(node.body)
    reached = {
        attribute
        for variable, attribute in attributes(node)
        if (variable == "self" and attribute not in own) or variable.startswith("super(")
    }
    sources = installed()
    upstream = {
        member for where in (entry.where, *entry.bases) for member in _members(sources.class_body(where))
    }
    known = {*entry.uses, *entry.optional}
    if entry.all_public:
        known |= {line.rpartition(".")[2] for line in RECORDED[max(RECORDED)] if line.startswith(entry.where)}
        upstream |= set(_members(sources.class_body(OWNERS[0].where)))
        known |= {*OWNERS[0].uses}
    assert not reached - known - {"_get_connector_metadata"}
    assert not (own.keys() & upstream) - known


def test_changes_are_said_one_by_one() -> None:
    """New, gone and changed."""
    before, after = {"a": "(self)", "b": "attribute"}, {"a": "(self, x)", "c": "attribute"}
    assert changes(before, after) == [
        "changed: a from (self) to (self, x)",
        "gone: b attribute",
        "new: c attribute",
    ]
    assert changes(before, before) == []


def test_nixl_has_the_delay_that_is_paced() -> None:
    """`pthrDelay`, in microseconds, on the configuration that NIXL's Python API builds."""
    bindings = cores._bindings()
    assert bindings
    for binding in bindings:
        config = getattr(binding.nixlAgentConfig, "kvloop_base", binding.nixlAgentConfig)
        assert config().pthrDelay == 0
