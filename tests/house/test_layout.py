"""The layout: short files named for their subject, packages that say what they are for, one place that prints."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "embark"
SOURCES = sorted(PACKAGE.rglob("*.py"))
AT_ROOT = {".ci", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "bench",
           "cloudsim", "conftest.py", "docs", "examples", "pyproject.toml", "src", "tests", "tools"}
MAX_LINES = 800
TOP_LEVEL = {"__init__.py", "__main__.py", "errors.py", "formatting.py", "values.py"}
VAGUE = {"utils", "util", "common", "helpers", "helper", "misc"}
MAY_PRINT = {"cli/console.py", "events/sinks/terminal.py", "stack/versions.py"}
"""stack/versions.py is also a script that runs before rich is installed."""



def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def test_every_file_is_short_and_named_for_its_subject():
    too_long = {name_of(path): num for path in SOURCES if (num := len(path.read_text().splitlines())) > MAX_LINES}
    assert not too_long, "split by subject"
    assert not [name_of(path) for path in SOURCES if VAGUE & set(path.relative_to(PACKAGE).with_suffix("").parts)]


def test_modules_stand_in_packages_that_say_what_they_are_for():
    assert {path.name for path in PACKAGE.glob("*.py")} == TOP_LEVEL
    packages = sorted({path.parent for path in SOURCES})
    assert not [name_of(package) for package in packages if not (package / "__init__.py").exists()]
    assert not [name_of(package) for package in packages
                if not ast.get_docstring(ast.parse((package / "__init__.py").read_text()))]


def test_no_stray_file_is_committed_at_the_root():
    command = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True).stdout
    assert {name.partition("/")[0] for name in listed.split("\0") if name} == AT_ROOT


def test_only_the_console_prints():
    found = [f"{name_of(path)}:{line}" for path in SOURCES if name_of(path) not in MAY_PRINT
             for line in prints(path.read_text())]
    assert not found, "use the console, or emit an event"
    source = 'import sys\nprint(1)\nsys.stdout.write("x")\nsys.stderr.write("x")\nself.print(2)\nout = sys.stdout\n'
    assert prints(source) == [2, 3, 4]


def prints(source: str) -> list[int]:
    """The lines that write to the terminal."""
    writers = {"print", "sys.stdout.write", "sys.stderr.write", "sys.stdout.writelines", "sys.stderr.writelines"}
    if not re.search(r"\bprint\b|\bwrite(lines)?\b", source):
        return []
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return sorted(call.lineno for call in calls if ast.unparse(call.func) in writers)


def test_files_that_contributing_names_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`((?:[\w.]+/)+[\w.]+\.(?:py|toml|csv|md))`", text))
    assert len(named) > 30
    assert not [name for name in named if not (ROOT / name).exists() and not (PACKAGE / name).exists()]
