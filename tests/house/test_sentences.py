"""Docstrings are complete sentences, and tests have names that fit a line."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FRAGMENT = re.compile(r"(Of|As|By|With|Without|That|And|Its|In|On|For|From|To|At|But|Or|Than|Besides?|Behind|Under|"
                      r"Likewise|The same)\b")
"""How a docstring begins that continues the name of its function instead of saying something by itself."""
MAX_TEST_NAME = 70
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def fragments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring that begins in the middle of a sentence."""
    for node in ast.walk(ast.parse(source)):
        text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
        if text and FRAGMENT.match(text):
            yield getattr(node, "lineno", 1), text.splitlines()[0]


@pytest.mark.parametrize("folder", ["src/embark", "cloudsim/src"])
def test_no_docstring_begins_in_the_middle_of_a_sentence(folder: str):
    sources = sorted((ROOT / folder).rglob("*.py"))
    assert sources
    found = [(path, line, text) for path in sources for line, text in fragments(path.read_text())]
    assert not [f"{path.relative_to(ROOT)}:{line} {text}" for path, line, text in found]


@pytest.mark.parametrize(("text", "is_fragment"), [
    ("Of a host.", True), ("By name.", True), ("In every process, or in none.", True),
    ("The same from attempts.", True),
    ("Return the size of an object in bytes.", False), ("Office hours of a store.", False), ("", False),
])
def test_the_search_tells_fragments_from_sentences(text: str, is_fragment: bool):
    assert bool(list(fragments(f'def f():\n    """{text}"""\n'))) == is_fragment


def test_names_of_tests_fit_a_line():
    files = [*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "cloudsim").rglob("test_*.py")]
    names = {name for path in files for name in re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(), re.M)}
    assert len(names) > 1000
    assert not [name for name in names if len(name) > MAX_TEST_NAME]
