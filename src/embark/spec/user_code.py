"""Custom code that a spec names as `file:Class`: read from the file beside the spec, checked without
running it, and loaded only by commands that need what it computes. Errors in it name its file and line."""

import ast
import inspect
import linecache
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from embark.errors import EmbarkError, Mistake, Mistakes, SpecError, UserError, nearest
from embark.formatting import to_one_line
from embark.values import JsonDict

if TYPE_CHECKING:
    from .run import RunSpec

CUSTOM_KIND = r"^[A-Za-z_][A-Za-z0-9_]*:[A-Za-z_][A-Za-z0-9_]*$"
_CUSTOM_FIELDS = (("model", "kind", "docs/guides/custom-models.md"), ("data", "kind", "docs/start/custom-data.md"),
               ("stream", "source", "docs/guides/follow.md"))
_loaded: dict[str, str] = {}  # The text of each loaded file, by its name.


def is_custom(kind: str) -> bool:
    return ":" in kind


def file_of(kind: str) -> str:
    return f"{kind.partition(':')[0]}.py"


def with_code(spec: "RunSpec", folder: Path) -> "RunSpec":
    """Read the files that the kinds of the spec name into it; from then on it needs no file."""
    found: JsonDict = {}
    mistakes: list[Mistake] = []
    for name, field, guide in _CUSTOM_FIELDS:
        section = getattr(spec, name)
        kind = getattr(section, field)
        if is_custom(kind) and not section.code:
            path = folder / file_of(kind)
            try:
                code = path.read_text(encoding="utf-8-sig")
            except (OSError, UnicodeDecodeError) as error:
                what = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
                mistakes.append(Mistake("", f"{name}.{field}", kind, f"{path} {what}",
                                        f"the file lies beside the spec; {guide} shows one"))
                continue
            section = section.changed(code=code)
            found[name] = section
        mistakes += _code_mistakes(name, field, kind, section.code)
    if mistakes:
        raise SpecError(mistakes)
    return spec.model_copy(update=found) if found else spec


def _code_mistakes(section: str, field: str, kind: str, code: str) -> Mistakes:
    """Find what can be wrong with the code without running it."""
    if not is_custom(kind):
        if code:
            what = f'has no effect while {section}.{field} is "{kind}"'
            yield Mistake("", f"{section}.code", "…", what, "leave it out")
        return
    file, name = file_of(kind), kind.partition(":")[2]
    try:
        with warnings.catch_warnings(action="ignore"):  # shown when it runs
            tree = ast.parse(code)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        what = f"{file}:{line}: {getattr(error, 'msg', error)}"
        yield Mistake("", f"{section}.{field}", kind, what, "correct the file")
        return
    names = set(_names_in(tree))
    if name not in names and "*" not in names:
        classes = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        yield Mistake("", f"{section}.{field}", kind, f"{file} has no {name}", nearest(name, classes) if classes else
                      f"write class {name} in it")


def _names_in(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield node.asname or node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def load_user_class(kind: str, code: str) -> type[Any]:
    """Run the file and return the class that `kind` names. Errors in it are the caller's to explain."""
    file, name = file_of(kind), kind.partition(":")[2]
    module = ModuleType(f"embark_user_{file.removesuffix('.py')}")
    module.__file__ = file
    sys.modules[module.__name__] = module  # where dataclasses and pickle look for it
    _loaded[file] = code
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
    try:
        exec(compile(code, file, "exec"), module.__dict__)
    except SystemExit as error:
        raise user_error(error) or error from None
    found = getattr(module, name, None)
    if not isinstance(found, type):
        raise UserError(f"{file}: {name} is {'not defined' if found is None else 'not a class'}",
                        f"{file} defines class {name}")
    return found


def location_of(function: Callable[..., Any]) -> str:
    """Return the file and line where a function is written."""
    function = inspect.unwrap(function)
    if code := getattr(function, "__code__", None):
        return f"{code.co_filename}:{code.co_firstlineno}"
    name = getattr(function, "__module__", None) or type(function).__module__
    return str(getattr(sys.modules.get(name), "__file__", None) or name)


@contextmanager
def user_errors() -> Iterator[None]:
    """Raise what a user's file raises as one of Embark's errors."""
    try:
        yield
    except EmbarkError:
        raise
    except (Exception, SystemExit) as error:
        if located := user_error(error):
            raise located from error
        raise


@contextmanager
def user_call(where: str, signature: str) -> Iterator[None]:
    """Explain one call into a user's file: an exit in it, and arguments that it does not take, are errors of the
    file."""
    try:
        yield
    except (SystemExit, TypeError) as error:
        located = user_error(error)
        if located is None and isinstance(error, TypeError):
            located = UserError(f"{where}: {to_one_line(str(error).partition(chr(10))[0])}", f"def {signature}")
        if located:
            raise located from error
        raise


def user_error(error: BaseException) -> UserError | None:
    """Describe an error that was raised in a user's file, or in what it called, by its file and line; None for any
    other."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in _loaded]
    if isinstance(error, SyntaxError) and error.filename in _loaded:
        return UserError(f"{error.filename}:{error.lineno}: {error.msg}", f"correct {error.filename}")
    if not frames:
        return None
    frame = frames[-1]
    said = to_one_line(str(error).strip().partition("\n")[0])
    where = "" if frame.name == "<module>" else f" in {frame.name}"
    return UserError(f"{frame.filename}:{frame.lineno}: {type(error).__name__}{where}{': ' if said else ''}{said}",
                     f"correct this line of {frame.filename}: {frame.line}")
