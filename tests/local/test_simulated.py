"""`kvloop up --sim`: the whole loop without an engine, as a user would run it."""

import os
import re
import subprocess
import sys
from pathlib import Path

from kvloop.local.engine import EngineOptions
from kvloop.local.flags import VllmFlags
from kvloop.local.ports import free_ports
from kvloop.local.simulated import build_simulated
from kvloop.local.transfer_config import Role

TIMEOUT_S = 120


def up(tmp_path: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    """`kvloop up` with these flags, to its end."""
    env = dict(os.environ) | {"XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    argv = [sys.executable, "-m", "kvloop.cli", "up", "--port", str(free_ports(1)[0]), *flags]
    return subprocess.run(argv, env=env, text=True, capture_output=True, timeout=TIMEOUT_S)


def test_the_demo_holds_on_simulated_engines(tmp_path: Path) -> None:
    """Two of each, no model: every later turn comes back from decode, and reuse changes no answer."""
    ended = up(
        tmp_path, "--sim", "instant", "--demo-only", "--policy", "sticky", "--prefill", "2", "--decode", "2"
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert len(re.findall(r"^ +[2-5] +return ", ended.stdout, re.MULTILINE)) == 4
    assert "The answers with and without reuse were the same in 5 of 5 turns." in ended.stdout


def test_what_cannot_be_simulated_is_said(tmp_path: Path) -> None:
    """An unknown profile, and vLLM's own connector: one line and status 2, and nothing was started."""
    unknown = up(tmp_path, "--sim", "no-such")
    assert unknown.returncode == 2
    assert unknown.stderr.startswith("kvloop up: there is no profile 'no-such'")
    upstream = up(tmp_path, "--sim", "--connector", "upstream")
    assert upstream.returncode == 2
    assert upstream.stderr == "kvloop up: --sim has no engines with vLLM's own connector\n"


def test_an_engine_s_options_reach_its_simulation() -> None:
    """Address, name, role, secret and cache are the ones that vLLM would have got."""
    flags = VllmFlags(
        ("--host", "h", "--port", "9", "--served-model-name", "m", "--no-enable-prefix-caching")
    )
    options = EngineOptions(Role.PREFILL, "x", "10.0.0.1", 5, 6, secret_file="f", engine_id="e", flags=flags)
    command = build_simulated("instant")(options, {"A": "b"})
    words = " ".join(command.argv[4:])
    assert words == (
        "engine --role prefill --profile instant --host h --port 9 --model m --control-host 10.0.0.1 "
        "--control-port 5 --side-channel-port 6 --secret-file f --engine-id e --prefix-cache off"
    )
    assert command.env == {"A": "b"}
