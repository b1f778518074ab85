"""`kvloop up --sim`: the same stack, with simulated engines in the place of vLLM's.

They are given the same addresses, names, secret and roles as real ones; of vLLM's flags only the ones that a
simulated engine has a counterpart for.
"""

import sys
from collections.abc import Mapping

from kvloop.local.engine import EngineCommand, EngineOptions
from kvloop.local.models import Model
from kvloop.local.stack import BuildEngine
from kvloop.sim.profile import load_profile

DEFAULT_PROFILE = "smollm2-cpu"


def simulated_model(profile: str) -> Model:
    """The model that a profile is of. UserError where there is no such profile."""
    return Model(f"simulated {profile}", name=load_profile(profile).model)


def build_simulated(profile: str) -> BuildEngine:
    """Makes commands for engines of this profile."""

    def build(options: EngineOptions, environment: Mapping[str, str]) -> EngineCommand:
        flags = options.flags
        cached = "off" if flags.has("--no-enable-prefix-caching") else "on"
        words = {
            "--role": options.role.value,
            "--profile": profile,
            "--host": flags.value("--host"),
            "--port": flags.value("--port"),
            "--model": flags.value("--served-model-name"),
            "--control-host": options.control_host,
            "--control-port": str(options.control_port),
            "--side-channel-port": str(options.side_channel_port),
            "--secret-file": options.secret_file,
            "--engine-id": options.engine_id,
            "--prefix-cache": cached,
        }
        argv = [sys.executable, "-m", "kvloop.cli", "sim", "engine"]
        for name, value in words.items():
            if value is not None:
                argv += [name, value]
        return EngineCommand(tuple(argv), environment, {})

    return build
