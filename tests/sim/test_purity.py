"""The simulated engine reads no clock, draws no number and waits for nothing: one file of it at a time."""

import ast

import pytest

from tests.test_layers import CORE_MAY_IMPORT, IMPURE_CALLS, files, imports_of

DRIVERS = {"api", "asgi", "command", "driver", "metrics", "profile", "recorded", "sidechannel"}
"""What touches the world: it reads files, or serves."""
MAY_IMPORT = CORE_MAY_IMPORT | {"__future__", "contextlib", "functools", "kvloop", "msgspec", "zlib"}
OWN = ("kvloop.core", "kvloop.errors", "kvloop.sim", "kvloop.wire")
PURE = [path for path in files("sim") if path.stem not in DRIVERS]


@pytest.mark.parametrize("path", PURE, ids=lambda path: path.name)
def test_the_engine_is_pure(path: object) -> None:
    """What it imports has no clock, chance or file; what it calls has none either."""
    imported = imports_of(path)  # type: ignore[arg-type]
    may_import = MAY_IMPORT | ({"random"} if path.stem == "chance" else set())  # type: ignore[attr-defined]
    assert {name.split(".")[0] for name in imported} <= may_import
    own = {name for name in imported if name.startswith("kvloop.")}
    assert all(name.startswith(OWN) for name in own)
    assert not {f"kvloop.sim.{driver}" for driver in DRIVERS - {"profile"}} & own
    tree = ast.parse(path.read_text())  # type: ignore[attr-defined]
    called = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not called & IMPURE_CALLS
    assert not any(isinstance(node, ast.AsyncFunctionDef | ast.Await) for node in ast.walk(tree))
