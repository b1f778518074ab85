"""Style as a test: sizes, names, prose and paths."""

import argparse
import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
PROSE = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
MAX_FILE_LINES = 300
MAX_TEST_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_TEST_FUNCTION_LINES = 100
CALLBACK = re.compile(r"on_\w+|connection_(made|lost)|(data|eof)_received|(pause|resume)_writing")
"""Methods whose meaning is their base class's: asyncio's protocols, llhttp's parser."""
BAD_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "misc"}
MUST_STAY_OUT = {"torchvision", "torchaudio", "torchcodec"}


def tracked() -> list[Path]:
    """The repository's text files."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    return [ROOT / name for name in listed.decode().split("\0") if name and (ROOT / name).is_file()]


@pytest.mark.parametrize("path", SOURCES + TESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_sizes_and_docstrings(path: Path) -> None:
    """A file is short and says what it is about; so does every public definition of the product."""
    text = path.read_text()
    is_test = path in TESTS
    bound = MAX_TEST_FILE_LINES if is_test else MAX_FILE_LINES
    function_bound = MAX_TEST_FUNCTION_LINES if is_test else MAX_FUNCTION_LINES
    assert len(text.splitlines()) <= bound
    tree = ast.parse(text)
    assert not text.strip() or ast.get_docstring(tree), "no docstring at the top"
    assert path.stem not in BAD_NAMES
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < function_bound, node.name
        if not is_test and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            is_ours = not node.name.startswith("_") and not CALLBACK.fullmatch(node.name)
            assert not is_ours or ast.get_docstring(node) or _is_inner(tree, node), node.name


def _is_inner(tree: ast.Module, node: ast.AST) -> bool:
    """Whether a definition stands inside a function or a private class."""
    for outer in ast.walk(tree):
        private = isinstance(outer, ast.ClassDef) and outer.name.startswith("_")
        holds = private or isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef)
        if outer is not node and holds and any(inner is node for inner in ast.walk(outer)):
            return True
    return False


def test_no_leftovers() -> None:
    """No mark of unfinished work, no machine's path, no registry's host in any tracked file."""
    unfinished = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
    machine = re.compile(r"(?<![\w.])/(?:work|ro" + r"ot|ho" + r"me)/\w|/tmp/(?:bash|kv/)")
    host = re.compile(r"py" + r"pi\.org|files\.python" + r"hosted|download\.pytorch")
    for path in tracked():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for pattern in (unfinished, machine, host):
            found = pattern.search(text)
            assert found is None, f"{path.relative_to(ROOT)}: {found and found.group()}"


def test_locks() -> None:
    """The engine's packages are pinned exactly, without the three that break it."""
    for lock in ("engine.lock", "dev.lock"):
        lines = (ROOT / "requirements" / lock).read_text().splitlines()
        pins = [line for line in lines if line and not line.startswith("#")]
        assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[\w.]+", pin) for pin in pins)
        names = {pin.split("==")[0].lower().replace("_", "-") for pin in pins}
        assert len(names) == len(pins)
        assert not names & MUST_STAY_OUT


@pytest.mark.parametrize("path", PROSE, ids=lambda path: path.name)
def test_links_resolve(path: Path) -> None:
    """Every relative link in the docs leads to a file."""
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", PROSE, ids=lambda path: path.name)
def test_documented_commands_exist(path: Path) -> None:
    """Every `kvloop ...` and `make ...` in the docs names a command, and flags that the command has."""
    from kvloop.cli import COMMANDS

    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    code = re.findall(r"```.*?```|`[^`]+`", path.read_text(), re.S)
    for snippet in code:
        joined = snippet.replace("\\\n", " ")
        for name in re.findall(r"\bmake ([a-z-]+)", joined):
            assert name in targets, name
        for name, rest in re.findall(r"\bkvloop (up|route|engine|keygen|[a-z]+)\b([^\n`|]*)", joined):
            assert name in COMMANDS, name
            parser = argparse.ArgumentParser(prog=f"kvloop {name}")
            COMMANDS[name].prepare(parser)
            parts = [
                part
                for action in parser._actions
                if isinstance(action, argparse._SubParsersAction)
                for part in action.choices.values()
            ]
            known = {
                flag for one in (parser, *parts) for action in one._actions for flag in action.option_strings
            }
            if name != "engine":  # every other flag of an engine is vLLM's
                assert set(re.findall(r"(?<!\S)(--[a-z-]+)", rest)) <= known
