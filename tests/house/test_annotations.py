"""Every function in src says what it returns."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for folder in ("src", "cloudsim/src") for path in (ROOT / folder).rglob("*.py"))


def test_every_function_has_a_return_annotation():
    bare = [f"{path.name}:{line} {name}" for path in SOURCES for line, name in without_return(path.read_text())]
    assert not bare


def test_the_search_finds_a_function_without_one():
    assert without_return("class A:\n    def f(self): ...\n    async def g(self) -> None: ...\n") == [(2, "f")]


def without_return(source: str) -> list[tuple[int, str]]:
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [(f.lineno, f.name) for f in functions if f.returns is None and not is_kernel(f)]


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Triton's kernels return nothing, or what Triton alone can name."""
    return any(ast.unparse(decorator).startswith("triton.jit") for decorator in function.decorator_list)
