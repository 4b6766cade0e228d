"""An error that a user can mend says how."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "embark"
SOURCES = sorted([*SOURCE.rglob("*.py"), *(ROOT / "cloudsim" / "src").rglob("*.py")])
SAID_ELSEWHERE = {
    "features/arrow/cells.py",  # row_parser.py adds the file, the column and the fix
    "report/context.py",  # shown as a warning, which has no fix: its sentence ends with the command
}


def test_every_error_of_the_input_names_a_fix():
    elsewhere = {SOURCE / name for name in SAID_ELSEWHERE}
    found = [f"{path.relative_to(ROOT)}:{call.lineno}" for path in SOURCES
             if path not in elsewhere for call in without_fix(path.read_text())]
    assert not found


def test_the_search_tells_an_error_with_a_fix_from_one_without():
    raised = ("UserError('a')", "DataError('b', 'c')", "UserError('d', fix='e')", "Fault('f')")
    assert [len(without_fix(f"raise {error}")) for error in raised] == [1, 0, 0, 0]


def without_fix(text: str) -> list[ast.Call]:
    if "UserError(" not in text and "DataError(" not in text:
        return []
    return [node for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            and node.func.id in ("UserError", "DataError")
            and len(node.args) < 2 and "fix" not in [keyword.arg for keyword in node.keywords]]
