"""Wall clocks of single processes that a test may set, as an operator or a time server sets a machine's."""

import os
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from kvloop.local.engine import EngineCommand, EngineOptions, build_engine_command
from kvloop.local.installation import find_vllm

STEPPED = Path(__file__).with_name("stepped")


class Clock:
    """How far the wall clock of the processes with `environment` is off."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.write_bytes(bytes(8))

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The environment of a process that has this clock."""
        folders = [str(STEPPED), *filter(None, [base.get("PYTHONPATH")])]
        return dict(base) | {"PYTHONPATH": os.pathsep.join(folders), "STEPPED_CLOCK": str(self._path)}

    def step_to(self, seconds: int) -> None:
        """Set the clock so many seconds off the machine's."""
        with self._path.open("r+b") as file:  # in place: it is mapped
            file.write(struct.pack("q", seconds * 1_000_000_000))


class Clocks:
    """A clock for each role, and one for routers."""

    def __init__(self, folder: Path) -> None:
        self.prefill, self.decode, self.router = (
            Clock(folder / name) for name in ("prefill", "decode", "router")
        )

    def build(self, options: EngineOptions, environment: Mapping[str, str]) -> EngineCommand:
        """An engine's command, with its role's clock."""
        command = build_engine_command(options, find_vllm(), environment)
        clock: Clock = getattr(self, options.role.value)
        return replace(command, env=clock.environment(command.env))

    def set_right(self) -> None:
        """All clocks are the machine's."""
        for clock in (self.prefill, self.decode, self.router):
            clock.step_to(0)
