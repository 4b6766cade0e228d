"""Loads a `RunSpec` from a TOML file or a preset, explains every mistake in it, and edits the text
of a spec."""

import difflib
import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_origin

from pydantic import BaseModel, ValidationError

from embark.errors import Mistake, SpecError, UserError, did_you_mean, near_names, nearest
from embark.values import JsonDict, JsonMap
from .paths import join_paths
from .run import RunSpec
from .toml import PRESETS, inline, line_of, section_in
from .user_code import with_code

Raw = JsonDict


def load_spec(source: str, sets: Sequence[str] = ()) -> RunSpec:
    """Read `source` (`run.toml`, `quickstart`), then apply `key=value` settings.

    Relative paths of data in a file go by the file's folder, all others by the current directory. So do files of code.
    """
    text, raw, where = _read(source)
    return resolve(raw, sets, where=where, text=text, folder=Path(source).parent if os.path.isfile(source) else Path())


def parse_spec(text: str | None) -> RunSpec | None:
    """Parse a run's `spec.toml`; None if there is none, or if this version cannot read it."""
    try:
        return None if text is None else resolve(tomllib.loads(text))
    except (UserError, ValueError, RecursionError):
        return None


def resolve(
    raw: JsonMap, sets: Sequence[str] = (), *, where: str = "", text: str = "", folder: Path | None = None
) -> RunSpec:
    """Turn nested dicts into a `RunSpec`, or raise one `SpecError` that names all mistakes. `folder` has the files of
    code that the spec names, which are read into it."""
    settings, mistakes = parse_settings(sets)
    merged = _deep_copy(raw, where or "the spec")
    for key, value in settings.items():
        mistakes += put(merged, key, value)
    from_set = {key: f"--set {key}" for key in settings}

    def placed(mistake: Mistake) -> Mistake:
        place = next((p for k, p in from_set.items() if (mistake.field + ".").startswith(k + ".")), "")
        if not place and text:
            place = f"{where}:{line_of(text, mistake.field)}"
        return Mistake(place or where, mistake.field, mistake.value, mistake.what, mistake.fix)

    spec: RunSpec | None = None
    try:
        spec = RunSpec.model_validate(merged)
    except ValidationError as error:
        mistakes += [placed(m) for m in _explain(error)]
    if spec is not None:
        mistakes += [placed(m) for m in spec.mistakes()]
        try:
            spec = spec if folder is None else with_code(spec, folder)
        except SpecError as error:
            mistakes += [placed(m) for m in error.mistakes]
    if mistakes or spec is None:
        raise SpecError(mistakes)
    return spec


def parse_settings(sets: Sequence[str]) -> tuple[Raw, list[Mistake]]:
    """Split `key=value` arguments into dotted names and values."""
    settings: Raw = {}
    mistakes: list[Mistake] = []
    for argument in sets:
        key, equals, value = argument.partition("=")
        if not equals or not key.strip():
            mistakes.append(
                Mistake(f"--set {argument}", argument, "", "is not key=value", "--set train.batch_size=4096")
            )
        else:
            settings[key.strip()] = _value(key.strip(), value.strip())
    return settings, mistakes


def put(raw: Raw, key: str, value: Any) -> list[Mistake]:
    """Set the dotted `key` in nested dicts; returns why it cannot be set."""
    *parents, last = key.split(".")
    at: Any = raw
    for name in parents:
        if isinstance(at, list) and name.isdigit() and int(name) < len(at):
            at = at[int(name)]
        elif isinstance(at, dict):
            at = at.setdefault(name, {})
        else:
            break
    if not isinstance(at, dict):
        return [Mistake(f"--set {key}", key, str(value), "is not a section of the spec")]
    at[last] = value
    return []


def _read(source: str) -> tuple[str, Raw, str]:
    """Return the text, for line numbers, the nested dicts, and a name for the source."""
    path = Path(source)
    if os.path.isfile(source):
        return _read_toml(path)
    if source in PRESETS:
        return "", PRESETS[source]().model_dump(exclude_unset=True), f"preset {source}"
    if os.path.isdir(source):
        raise UserError(f"{source}: is a directory", "name the TOML file; `embark init` writes a starter spec")
    near = did_you_mean(near_names(source, [*PRESETS, *map(str, path.parent.glob("*.toml"))], 1))
    if path.suffix == ".toml" or "/" in source:
        raise UserError(f"{source}: no such file", near or "`embark init` writes a starter spec")
    raise UserError(f"{source}: neither a file nor a preset", near or nearest(source, PRESETS))


def _read_toml(path: Path) -> tuple[str, Raw, str]:
    try:
        text = path.read_text(encoding="utf-8")
        raw = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as text: {error}",
                        "it must be a TOML file in UTF-8 that you may read") from error
    except ValueError as error:
        raise UserError(f"{path}: not TOML: {error}", "strings are in quotes, sections in [brackets]") from error
    except RecursionError as error:
        raise UserError(f"{path}: sections are nested too deeply", "a spec has two levels") from error
    raw.setdefault("name", path.stem)
    join_paths(raw, path.parent)
    return text, raw, str(path)


def _value(key: str, text: str) -> Any:
    """A TOML value; anything else is a plain string, so quotes are optional. A field of text takes a number as text:
    Azure's zones and AWS's accounts look like numbers."""
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, int | float) and _is_text(key) else value


def _is_text(key: str) -> bool:
    annotation: Any = RunSpec
    for name in key.split("."):
        field = getattr(annotation, "model_fields", {}).get(name)
        if field is None:
            return False
        annotation = field.annotation
    return annotation is str


MAX_DEPTH = 32


def _deep_copy(raw: Any, where: str, depth: int = 0) -> Any:
    if depth > MAX_DEPTH:
        raise UserError(f"{where} is nested too deeply", "a spec has two levels: sections and fields")
    if isinstance(raw, Mapping):
        return {k: _deep_copy(v, where, depth + 1) for k, v in raw.items()}
    return [_deep_copy(v, where, depth + 1) for v in raw] if isinstance(raw, list | tuple) else raw


def _explain(error: ValidationError) -> list[Mistake]:
    """Reword pydantic's errors, one for each field: a union gives several."""
    mistakes: dict[str, Mistake] = {}
    items = error.errors()
    for item in items:
        if isinstance(item["input"], Mapping) and any(_is_inside(other["loc"], item["loc"]) for other in items):
            continue  # a table where a number may stand too: what is wrong in the table says more
        is_unknown = item["type"] == "extra_forbidden"
        field, section = _field_of(item["loc"], is_unknown=is_unknown)
        if is_unknown:
            what, fix = "no such field", _nearest_field(str(item["loc"][-1]), section)
        elif item["type"] == "missing":
            what, fix = "is required", ""
        elif item["type"] == "tuple_type":
            what, fix = f"should be a list{_meaning(section, field)}", _as_list(item["input"], field)
        else:
            what, fix = f"{item['msg'][:1].lower()}{item['msg'][1:]}{_meaning(section, field)}", ""
        value = "" if item["type"] == "missing" else _shown(item["input"])
        mistakes.setdefault(field, Mistake("", field, value, what, fix))
    return list(mistakes.values())


def _as_list(value: object, field: str) -> str:
    if not isinstance(value, str):
        return f"[{value!r}]" if isinstance(value, int | float) else ""
    items = json.dumps([part.strip() for part in value.split(",")], ensure_ascii=False)
    return f"{items}; on a command line --set '{field}={items}'"


def _nearest_field(name: str, section: type[BaseModel]) -> str:
    """Suggest the field that is meant; outside of all sections, a section's: `batch_size` is `train.batch_size`."""
    if section is RunSpec:
        fields = {f"{key}.{field}": field for key, info in RunSpec.model_fields.items()
                  if (inner := section_in(info.annotation)) for field in inner.model_fields}
        close = difflib.get_close_matches(name, [*RunSpec.model_fields, *fields.values()], n=1, cutoff=0.6)
        if meant := [key for key, field in fields.items() if [field] == close]:
            return "did you mean " + " or ".join(map(repr, meant)) + "?"
    return nearest(name, section.model_fields)


def _is_inside(loc: tuple[int | str, ...], outer: tuple[int | str, ...]) -> bool:
    """Tell whether `loc` lies in another branch of the union whose last name in `outer` is the tag of one branch."""
    return len(loc) > len(outer) and loc[: len(outer) - 1] == outer[:-1] and loc != outer


def _field_of(loc: tuple[int | str, ...], *, is_unknown: bool) -> tuple[str, type[BaseModel]]:
    """Return the dotted field at pydantic's location, and the section that contains it."""
    names: list[str] = []
    section: type[BaseModel] = RunSpec
    holder = section
    is_key = False  # The next part is a key of the user's, such as a column.
    for position, part in enumerate(loc):
        if is_key or isinstance(part, int):
            names.append(str(part))
            is_key = False
        elif part in section.model_fields:
            names.append(part)
            annotation = section.model_fields[part].annotation
            is_key = get_origin(annotation) is dict
            holder, section = section, section_in(annotation) or section
        elif is_unknown and position == len(loc) - 1:
            names.append(part)
            holder = section
        # anything else is the tag of a union's branch
    return ".".join(names), holder


def _meaning(section: type[BaseModel], field: str) -> str:
    info = section.model_fields.get(field.rsplit(".", 1)[-1])
    return f"\n    {field}: {info.description}" if info and info.description else ""


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


def set_in_text(text: str, sets: Sequence[str], *, where: str) -> tuple[str, tuple[str, ...]]:
    """Write `key=value` settings into the text; returns it with a line of TOML for each that changed something. Raises
    what `load_spec` raises for them."""
    import tomlkit

    before = tomllib.loads(text)
    resolve(before, sets, where=where, text=text)
    settings, _ = parse_settings(sets)
    changed = {key: value for key, value in settings.items() if _at(before, key) != value}
    document = tomlkit.parse(text)
    for key, value in changed.items():
        with _before_trailing_comments(document, key):
            put(document, key, value)
    return tomlkit.dumps(document), tuple(f"{key} = {inline(value)}" for key, value in changed.items())


@contextmanager
def _before_trailing_comments(document: Any, key: str) -> Iterator[None]:
    """Add to the section of `key` right below its fields: comments after them belong to the next section."""
    from tomlkit.items import Table

    section = _at(document, key.split(".")[0])
    body = section.value.body if "." in key and isinstance(section, Table) else []
    num_fields = max((index + 1 for index, (name, _) in enumerate(body) if name is not None), default=len(body))
    tail = body[num_fields:]
    del body[num_fields:]
    yield
    body += tail


def _at(raw: Any, key: str) -> Any:
    """Return the value of the dotted `key`; None if there is none."""
    for name in key.split("."):
        raw = raw.get(name) if isinstance(raw, dict) else raw[int(name)] if isinstance(raw, list) else None
    return raw
