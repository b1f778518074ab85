"""What a LoRA adapter is: the content of its files.

vLLM knows an adapter by the name that clients ask for and the path that it was loaded from. Neither says what
was computed: the files at a path change, and an adapter is loaded again under its old name. (vLLM's own
prefix cache goes by name and path, and vLLM warns that it does not notice.) So an adapter's identity is a
digest over the files that vLLM reads, taken when its number, which vLLM draws anew at each loading, is first
seen. Whoever changes the files must load them again before the next request: vLLM does not say what it read.
"""

import hashlib
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

logger = init_logger("vllm.kvloop.adapters")

_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
MAX_ADAPTERS = 10_000
"""Digests kept, the oldest given up first. An adapter is loaded by a person or a resolver, not by a turn."""


class Adapters:
    """The digests of the adapters that requests name. For the scheduler's thread."""

    def __init__(self) -> None:
        self._digests: dict[tuple[int, str, str], str | None] = {}

    def digest(self, lora: Any) -> str | None:
        """The digest of the adapter that `lora` (a `LoRARequest`) names; None where nothing can be proven
        of it: its files cannot be read here, or vLLM loads them anew at any time (`load_inplace`)."""
        if lora.load_inplace:
            return None
        key = (lora.lora_int_id, lora.lora_name, lora.lora_path)
        if key not in self._digests:
            if len(self._digests) >= MAX_ADAPTERS:
                del self._digests[next(iter(self._digests))]
            self._digests[key] = _digest(lora.lora_path)
            if self._digests[key] is None:
                logger.warning(
                    "the files of LoRA adapter %r cannot be read at %s: turns under it are recomputed",
                    *key[1:],
                )
        return self._digests[key]


def _digest(path: str) -> str | None:
    folder = _folder(path)
    if folder is None:
        return None
    whole = hashlib.blake2b(digest_size=16)
    found = 0
    for name in _FILES:
        try:
            with (folder / name).open("rb") as file:
                part = hashlib.file_digest(file, "sha256").digest()
        except FileNotFoundError:
            continue
        except OSError:
            return None
        found += 1
        whole.update(name.encode() + b"\0" + part)
    return whole.hexdigest() if found > 1 else None


def _folder(path: str) -> Path | None:
    """Where vLLM reads the adapter: a folder, or what the hub's cache has under its name."""
    folder = Path(path)
    if path.startswith("~"):
        folder = folder.expanduser()
    if folder.is_absolute() or folder.exists():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, local_files_only=True))
    except (OSError, ValueError):
        return None
