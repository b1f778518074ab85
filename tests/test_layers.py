"""What each layer may not do, read off its syntax tree."""

import ast
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "kvloop"
CORE_MAY_IMPORT = {
    "array",
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "hashlib",
    "heapq",
    "itertools",
    "math",
    "struct",
    "sys",
    "typing",
}
"""No clock, no chance, no log, no I/O; `sys` for the byte order alone."""
IMPURE_CALLS = {"open", "print", "input", "hash", "id"}


def imports_of(path: Path) -> set[str]:
    """The modules that a file imports, dotted, type-checking imports too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found.add(node.module or "")
    return found


def files(package: str) -> list[Path]:
    """The package's files."""
    return sorted((SOURCE / package).rglob("*.py"))


@pytest.mark.parametrize("path", files("core"), ids=lambda path: path.name)
def test_core_is_pure(path: Path) -> None:
    """`core` imports nothing that has a clock, chance or a file, and awaits nothing."""
    own = {name for name in imports_of(path) if name.startswith("kvloop.")}
    assert all(name.startswith(("kvloop.core", "kvloop.errors")) for name in own)
    assert {name.split(".")[0] for name in imports_of(path) - own} <= CORE_MAY_IMPORT
    tree = ast.parse(path.read_text())
    called = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not called & IMPURE_CALLS
    assert not any(isinstance(node, ast.AsyncFunctionDef | ast.Await) for node in ast.walk(tree))
    if "sys" in imports_of(path):
        used = {
            n.attr
            for n in ast.walk(tree)
            if isinstance(n, ast.Attribute) and getattr(n.value, "id", "") == "sys"
        }
        assert used == {"byteorder"}


@pytest.mark.parametrize("package", ["core", "wire", "control", "router"])
def test_the_router_needs_no_engine(package: str) -> None:
    """The router and what it rests on import neither vLLM nor torch."""
    for path in files(package):
        assert not {name.split(".")[0] for name in imports_of(path)} & {
            "vllm",
            "torch",
            "nixl",
            "transformers",
        }


def test_vllm_is_imported_in_one_place() -> None:
    """Only the connector imports vLLM; only `local` converts models with transformers."""
    for path in files(""):
        packages = {name.split(".")[0] for name in imports_of(path)}
        if "connector" not in path.parts:
            assert "vllm" not in packages, path
        if "local" not in path.parts:
            assert "transformers" not in packages, path


def test_the_list_is_of_the_standard_library() -> None:
    """The allow-list above has not let a third party in."""
    assert sys.stdlib_module_names >= CORE_MAY_IMPORT
