"""An error that a user can mend says how."""

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "embark"
SAID_ELSEWHERE = {
    "features/arrow/cells.py",  # row_parser.py adds the file, the column and the fix
    "report/context.py",  # shown as a warning, which has no fix: its sentence ends with the command
}


def test_every_error_of_the_input_names_a_fix():
    found = [f"{path.relative_to(SOURCE)}:{call.lineno}" for path in sorted(SOURCE.rglob("*.py"))
             if path.relative_to(SOURCE).as_posix() not in SAID_ELSEWHERE for call in without_fix(path.read_text())]
    assert not found


def test_the_search_tells_an_error_with_a_fix_from_one_without():
    assert len(without_fix("raise UserError('a')\nraise DataError('b', fix='c')\nraise Fault('d')")) == 1


def without_fix(text: str) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            and node.func.id in ("UserError", "DataError") and "fix" not in [keyword.arg for keyword in node.keywords]]
