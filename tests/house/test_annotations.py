"""Every function in src says what it returns."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCES = sorted((Path(__file__).parents[2] / "src").rglob("*.py"))


def test_every_function_has_a_return_annotation():
    bare = [f"{path.name}:{line} {name}" for path in SOURCES for line, name in without_return(path.read_text())]
    assert not bare


def test_the_search_finds_a_function_without_one():
    assert without_return("class A:\n    def f(self): ...\n    async def g(self) -> None: ...\n") == [(2, "f")]


def without_return(source: str) -> list[tuple[int, str]]:
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [(function.lineno, function.name) for function in functions if function.returns is None]
