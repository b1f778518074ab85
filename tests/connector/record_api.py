"""Reads the part of vLLM's API that kvloop stands on out of a vLLM's sources, without importing them.

To record a version: `python -m tests.connector.record_api FOLDER`, where FOLDER holds the package `vllm` (an
environment's site-packages, or an unpacked wheel). It replaces that version's entry in
`tests/vectors/vllm_api.json`. What is different from the entry before is printed: each line is something to
handle in `kvloop.connector.compat` or to list there.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.connector.vllm_uses import CALLS, CONSTANTS, NIXL, OWNERS

VECTORS = Path(__file__).parent.parent / "vectors" / "vllm_api.json"

PARAMS_READ = "kv_transfer_params read for a receive"
PARAMS_WRITTEN = "kv_transfer_params answered by prefill"


class Sources:
    """A vLLM package's syntax trees, by module."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._trees: dict[str, ast.Module] = {}

    def version(self) -> str:
        """Major and minor, as the package itself says."""
        text = (self.folder / "vllm" / "_version.py").read_text()
        found = re.search(r"__version__ = .*?'(\d+\.\d+)", text)
        assert found, "the package does not say its version"
        return found.group(1)

    def module(self, name: str) -> ast.Module:
        """The tree of a module; an empty one where there is none."""
        if name not in self._trees:
            path = self.folder.joinpath(*name.split("."))
            path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            self._trees[name] = ast.parse(path.read_text() if path.is_file() else "")
        return self._trees[name]

    def class_body(self, where: str) -> list[ast.stmt]:
        """The statements of `module:Class`."""
        module, _, name = where.partition(":")
        for node in ast.walk(self.module(module)):
            if isinstance(node, ast.ClassDef) and node.name == name:
                return node.body
        return []


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    marks = [ast.unparse(decorator) for decorator in function.decorator_list]
    if "property" in marks:
        return "attribute"
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    if arguments.vararg:
        names.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        names.append("*")
    names += [argument.arg for argument in arguments.kwonlyargs]
    if arguments.kwarg:
        names.append(f"**{arguments.kwarg.arg}")
    prefix = "async " if isinstance(function, ast.AsyncFunctionDef) else ""
    return f"{prefix}({', '.join(names)})"


def _targets(statement: ast.AST) -> Iterator[ast.expr]:
    if isinstance(statement, ast.AnnAssign):
        yield statement.target
    elif isinstance(statement, ast.Assign):
        for target in statement.targets:
            yield from target.elts if isinstance(target, ast.Tuple) else [target]


def _members(body: list[ast.stmt]) -> dict[str, str]:
    """Everything that a class defines, in its body or on `self` in its methods."""
    found: dict[str, str] = {}
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            for inner in ast.walk(statement):
                for target in _targets(inner):
                    if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                        found.setdefault(target.attr, "attribute")
        for target in _targets(statement):
            if isinstance(target, ast.Name):
                found[target.id] = "attribute"
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            found[statement.name] = _parameters(statement)
    return found


def _constant(sources: Sources, where: str) -> str | None:
    module, _, name = where.partition(":")
    for statement in sources.module(module).body:
        for target in _targets(statement):
            if isinstance(target, ast.Name) and target.id == name:
                value = getattr(statement, "value", None)
                return ast.unparse(value) if isinstance(value, ast.expr) else None
    for node in ast.walk(sources.module(module)):  # under TYPE_CHECKING, as vLLM's variables are
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
            return ast.unparse(node.value) if node.value else None
    return None


def _keys_read(body: list[ast.stmt]) -> set[str]:
    keys = set()
    for statement in body:
        for node in ast.walk(statement):
            argument: ast.expr | None = None
            if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "kv_transfer_params":
                argument = node.slice
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "kv_transfer_params.get":
                argument = node.args[0]
            if isinstance(argument, ast.Constant):
                keys.add(str(argument.value))
    return keys


def _keys_written(body: list[ast.stmt]) -> set[str]:
    return {
        keyword.arg
        for statement in body
        if isinstance(statement, ast.FunctionDef) and statement.name == "request_finished"
        for node in ast.walk(statement)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "dict"
        for keyword in node.keywords
        if keyword.arg
    }


def called(method: str) -> str:
    """The name under which it is recorded what a method calls."""
    return f"{method} calls"


def _calls(sources: Sources, method: str, expected: set[str]) -> str:
    where, _, name = method.rpartition(".")
    found = {
        node.func.attr
        for statement in sources.class_body(where)
        if isinstance(statement, ast.FunctionDef) and statement.name == name
        for node in ast.walk(statement)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    return ", ".join(sorted(found & expected))


def describe(sources: Sources) -> dict[str, str]:
    """What there is: `module:Class.member` -> its parameters, "attribute", or a constant's value."""
    described: dict[str, str] = {}
    for owner in OWNERS:
        members: dict[str, str] = {}
        for where in reversed((owner.where, *owner.bases)):
            members |= _members(sources.class_body(where))
        wanted = set(owner.uses + owner.optional)
        if owner.all_public:
            wanted |= {name for name, kind in members.items() if not name.startswith("_") and "(" in kind}
        described |= {f"{owner.where}.{name}": members[name] for name in wanted & members.keys()}
    for where in CONSTANTS:
        value = _constant(sources, where)
        if value is not None:
            described[where] = value
    described |= {called(method): _calls(sources, method, expected) for method, expected in CALLS.items()}
    read = _keys_read(sources.class_body(f"{NIXL}.metadata:NixlConnectorMetadata"))
    written = _keys_written(sources.class_body(f"{NIXL}.pull_scheduler:NixlPullConnectorScheduler"))
    described[PARAMS_READ] = ", ".join(sorted(read))
    described[PARAMS_WRITTEN] = ", ".join(sorted(written))
    return dict(sorted(described.items()))


def changes(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """One line for each thing that is new, gone or changed."""
    lines = []
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if old is None:
            lines.append(f"new: {name} {new}")
        elif new is None:
            lines.append(f"gone: {name} {old}")
        elif old != new:
            lines.append(f"changed: {name} from {old} to {new}")
    return lines


def recordings() -> dict[str, dict[str, str]]:
    """The recorded versions."""
    recorded: dict[str, dict[str, str]] = json.loads(VECTORS.read_text()) if VECTORS.is_file() else {}
    return recorded


def record(arguments: Sequence[str]) -> None:
    """Record the version in the folder named."""
    sources = Sources(Path(arguments[0]))
    described, recorded = describe(sources), recordings()
    lines = changes(recorded.get(sources.version(), {}), described)
    recorded[sources.version()] = described
    VECTORS.write_text(json.dumps(dict(sorted(recorded.items())), indent=1) + "\n")
    sys.stdout.write("\n".join([f"vLLM {sources.version()}: {len(lines)} changes", *lines]) + "\n")


if __name__ == "__main__":
    record(sys.argv[1:])
