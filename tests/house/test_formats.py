"""No module reads a file of a format that nobody has listed, and damaged."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from file_formats import FORMATS, NO_FILES

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "embark"
PARSERS = re.compile(
    r"json\.loads?|tomllib\.loads?|np\.(load|memmap|fromfile)|mmap\.mmap|torch\.load|pickle\.loads?|gzip\.open|"
    r"yaml\.(safe_load|safe_load_all|load|load_all|compose|compose_all|parse)|csv\.(reader|DictReader)|"
    r"optuna\.create_study|(\w+\.)*(model_validate_json|read_table|ParquetFile|read_csv)|(.+\.)?validate_json")
OF_THE_PACKAGE = re.compile(r"__file__|files\(['\"]embark")


def parsing_lines(source: str) -> list[int]:
    """The lines that parse text or bytes which are not part of the package."""
    if not PARSERS.search(source):
        return []
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return sorted(call.lineno for call in calls if PARSERS.fullmatch(ast.unparse(call.func))
                  and not OF_THE_PACKAGE.search(ast.unparse(call)))


def test_every_module_that_parses_a_file_is_in_the_table_of_formats():
    listed = {module for one in FORMATS for module in one.modules} | set(NO_FILES)
    found = {path.relative_to(PACKAGE).as_posix() for path in sorted(PACKAGE.rglob("*.py"))
             if parsing_lines(path.read_text())}
    assert found == listed, "add its format to tests/support/file_formats.py, with a case that damages it"


def test_a_parser_is_found_whatever_it_reads():
    source = ("import json\njson.loads(x)\nTypeAdapter(Index).validate_json(text)\nnp.load(path, mmap_mode='r')\n"
              "tomllib.loads(Path(__file__).read_text())\nadapter.validate_python(1)\npq.read_table(file)\n")
    assert parsing_lines(source) == [2, 3, 4, 7]


def test_the_documented_table_of_formats_is_the_tested_one():
    text = (ROOT / "docs/internals/formats.md").read_text()
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in text.splitlines()
            if line.startswith("| ") and not line.startswith("| format")]
    assert rows == [(one.name, one.files, one.writers, one.readers, one.damage,
                     ", ".join(f"`{module}`" for module in one.modules)) for one in FORMATS]


def test_every_format_has_a_test_that_damages_its_files():
    folder = ROOT / "tests/unit/hostile"
    assert not [one.name for one in FORMATS if f'"{one.name}"' not in (folder / one.fuzzed_by).read_text()]
