"""Damages of files: bytes that were lost or changed, and values that a program or a person wrote wrong.

All are drawn from the name of the format and a seed, so that a failure names a file that can be made again. With
EMBARK_FUZZ=200 in the environment a test tries so many files; EMBARK_FUZZ_SEED draws others.
"""

from __future__ import annotations

import copy
import io
import json
import os
import random
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

NUM = int(os.environ.get("EMBARK_FUZZ", "0"))
SEED = os.environ.get("EMBARK_FUZZ_SEED", "0")
HUGE_BYTES = 64 << 20
DEEP = 100_000
NUMBERS = (0, -1, 1, 2, 255, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 10**30, -(10**30), 10**400,
           0.5, -0.5, 1e-308, 1e308, float("nan"), float("inf"), float("-inf"))
PATHS = ("../outside/x", "../../outside/x", "/", "/etc/passwd", "..", "a/../../outside/x", "", ".", "a\0b", "x" * 300,
         "outside/link", "file:///etc/passwd", "~", "a\nb")
TEXTS = (*PATHS, "\ud800", "word", "1", "-1", "nan", "9" * 5_000, "\u202eabc", "[red]x[/red]", "[/]", "\x1b[31m")
OTHERS = (None, True, False, [], {}, [[]], [None], {"a": {}}, [1, 2], ["a"], {"": 0})
ODD_BYTES = (b"", b"\xff" * 300, b"\0" * 300, b"[" * DEEP, b'{"a":' * 9_000, b"9" * 5_000, b"\n" * 10,
             "\ufeff".encode(), b"\xed\xa0\x80", b"\r\n", b"null", b"{}", b"[]", b"0")


@dataclass(frozen=True)
class Damage:
    """A change of one file."""

    label: str
    apply: Callable[[Path], None]


class _Verbatim:
    """Text that stands in JSON as it is."""

    def __init__(self, text: str) -> None:
        self.text = text


def damages(name: str, data: bytes, form: str, outside: Path, num: int) -> Iterator[Damage]:
    """Yield damages of a file that has these bytes: of the complete file, of its bytes, and of its structure."""
    draw = random.Random(f"{SEED}:{name}")
    whole = list(_whole(outside))
    draw.shuffle(whole)
    structure = STRUCTURES.get(form)
    for number in range(num):
        if number % 8 == 0:
            yield whole[number // 8 % len(whole)]
        elif structure is None or number % 8 in (1, 2):
            yield _of_bytes(draw, data)
        else:
            label, changed = structure(draw, data)
            yield Damage(label, _writing(changed))


def _whole(outside: Path) -> Iterator[Damage]:
    def remove(path: Path) -> None:
        path.unlink(missing_ok=True)

    def to_folder(path: Path) -> None:
        remove(path)
        path.mkdir()

    def linking(target: Path | str) -> Callable[[Path], None]:
        def link(path: Path) -> None:
            remove(path)
            path.symlink_to(target)
        return link

    def enlarge(path: Path) -> None:
        with path.open("ab") as file:
            file.truncate(path.stat().st_size + HUGE_BYTES)

    def replace_by_zeros(path: Path) -> None:
        path.write_bytes(b"")
        enlarge(path)

    yield Damage("empty", _writing(b""))
    yield Damage("removed", remove)
    yield Damage("a folder", to_folder)
    yield Damage("a link out of the folder", linking(outside / "x"))
    yield Damage("a link to itself", lambda path: linking(path.name)(path))
    yield Damage("a link to nothing", linking("nothing"))
    yield Damage("no permission", lambda path: path.chmod(0))
    yield Damage("huge", enlarge)
    yield Damage("huge, of zeros", replace_by_zeros)


def _writing(data: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(data)
    return write


def _of_bytes(draw: random.Random, data: bytes) -> Damage:
    at = draw.randrange(len(data) + 1)
    kind = draw.choice(("cut", "flip", "flip", "zero", "garbage", "insert", "tail", "all"))
    changed = bytearray(data)
    if kind == "cut":
        del changed[at:]
    elif kind == "flip" and data:
        for _ in range(draw.choice((1, 1, 8))):
            changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif kind == "zero":
        end = min(len(data), at + draw.choice((1, 16, 512)))
        changed[at:end] = bytes(end - at)
    elif kind == "garbage":
        end = min(len(data), at + draw.choice((1, 16, 512)))
        changed[at:end] = draw.randbytes(end - at)
    elif kind == "tail":
        changed += draw.choice(ODD_BYTES)
    elif kind == "all":
        changed[:] = draw.choice(ODD_BYTES)
    else:
        changed[at:at] = draw.choice(ODD_BYTES)
    return Damage(f"{kind} at byte {at}", _writing(bytes(changed)))


def hostile(draw: random.Random, before: Any = None) -> Any:
    """Return a value of another type, out of range, or next to what it was."""
    if type(before) in (int, float) and draw.randrange(3) == 0:
        return draw.choice((-before, before + 1, before * 2, before - 1, str(before), [before], before * 10**9))
    deep = _Verbatim("[" * DEEP + "]" * DEEP) if draw.randrange(12) == 0 else _Verbatim("[" * 300 + "]" * 300)
    return draw.choice((draw.choice(NUMBERS), draw.choice(TEXTS), copy.deepcopy(draw.choice(OTHERS)), deep))


def _json_text(value: Any) -> str:
    if isinstance(value, _Verbatim):
        return value.text
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {_json_text(one)}" for key, one in _pairs(value)) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_json_text, value)) + "]"
    return str(value) if type(value) is int else json.dumps(value)


class _Twice(dict[str, Any]):
    """An object in which a key stands twice."""

    extra: tuple[tuple[str, Any], ...] = ()


def _pairs(value: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from value.items()
    yield from getattr(value, "extra", ())


def change_json(draw: random.Random, data: bytes) -> tuple[str, bytes]:
    """Remove, replace, rename, repeat or add one to three values, anywhere in the file."""
    value: Any = {"": json.loads(data)}
    labels = []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        at, path = value, [""]
        while isinstance(at[path[-1]], dict | list) and at[path[-1]] and draw.randrange(5):
            at = at[path[-1]]
            path.append(draw.choice(sorted(at)) if isinstance(at, dict) else draw.randrange(len(at)))
        key, shown = path[-1], ".".join(map(str, path[1:]))
        kind = draw.choice(("replace", "replace", "replace", "remove", "rename", "repeat", "add"))
        if at is value or not isinstance(at, dict):
            kind = "replace" if at is value else draw.choice(("replace", "remove"))
        if kind == "remove":
            del at[key]
        elif kind == "rename":
            at[f"{key}x"] = at.pop(key)
        elif kind == "add":
            at["unknown"] = hostile(draw)
        elif kind == "repeat":
            twice = _Twice(at)
            twice.extra = ((key, hostile(draw, at[key])),)
            parent: Any = value
            for step in path[:-2]:
                parent = parent[step]
            parent[path[-2]] = twice
        else:
            at[key] = hostile(draw, at[key])
        by = f" by {_json_text(at[key])[:60]}" if kind == "replace" else ""
        labels.append(f"{kind} {shown or 'all'}{by}")
    return "; ".join(labels), _json_text(value.get("")).encode("utf-8", "surrogatepass")


def change_line(draw: random.Random, data: bytes) -> tuple[str, bytes]:
    """Change one line of JSON Lines."""
    lines = data.splitlines(keepends=True)
    number = draw.randrange(len(lines))
    label, changed = change_json(draw, lines[number])
    lines[number] = changed + b"\n"
    return f"line {number + 1}: {label}", b"".join(lines)


def toml_value(value: Any) -> str:
    if isinstance(value, _Verbatim):
        return value.text
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "none"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml_value(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return repr(value)


def change_toml(draw: random.Random, data: bytes) -> tuple[str, bytes]:
    """Replace, remove, rename or repeat the value of a line."""
    lines = data.decode().splitlines()
    numbers = [number for number, line in enumerate(lines) if re.match(r"\s*[\w.\"-]+\s*=|\[", line)]
    number = draw.choice(numbers)
    key, _, before = lines[number].partition("=")
    kind = draw.choice(("replace", "replace", "replace", "remove", "rename", "repeat"))
    value = toml_value(hostile(draw))
    if kind == "remove":
        del lines[number]
    elif kind == "rename":
        lines[number] = f"x{key}={before}" if before else key.replace("[", "[x")
    elif kind == "repeat":
        lines.insert(number, lines[number])
    else:
        lines[number] = f"{key}= {value}"
    return f"{kind} {key.strip()} {value[:60]!r}", "\n".join([*lines, ""]).encode("utf-8", "surrogatepass")


def change_csv(draw: random.Random, data: bytes) -> tuple[str, bytes]:
    """Replace a cell, or remove or repeat a line."""
    lines = data.decode().splitlines()
    number = draw.randrange(len(lines))
    cells = lines[number].split(",")
    column = draw.randrange(len(cells))
    kind = draw.choice(("replace", "replace", "replace", "remove", "repeat", "add"))
    if kind == "replace":
        cells[column] = str(draw.choice((draw.choice(NUMBERS), draw.choice(TEXTS), '"', "1|2", "0x1")))
        lines[number] = ",".join(cells)
    elif kind == "add":
        lines[number] += ",1"
    elif kind == "remove":
        del lines[number]
    else:
        lines.insert(number, lines[number])
    return f"{kind} line {number + 1}, cell {column}", "\n".join([*lines, ""]).encode("utf-8", "surrogatepass")


def change_tensors(draw: random.Random, data: bytes) -> tuple[str, bytes]:
    """Change the header of a safetensors file, or the numbers of one of its tensors, which then still fit."""
    length = int.from_bytes(data[:8], "little")
    header, values = json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])
    names = [name for name in header if name != "__metadata__"]
    if draw.randrange(2) or not names:
        label, text = change_json(draw, data[8 : 8 + length])
    else:
        name = draw.choice(names)
        start, end = header[name]["data_offsets"]
        if draw.randrange(3):
            fill = draw.choice((b"\xff", b"\x7f", b"\x00", b"\x80", b"\x40\x00\x00\x00", b"\x00\x00\xc0\x7f"))
            values[start:end] = (fill * (end - start))[: end - start]
            label, text = f"fill {name} with {fill!r}", json.dumps(header).encode()
        else:  # other rows, with all the bytes there
            shape = header[name]["shape"]
            header[name]["shape"] = draw.choice(([end - start], [1, *shape], shape[::-1], [*shape, 1], []))
            label, text = f"reshape {name}", json.dumps(header).encode()
    return label, struct.pack("<Q", len(text)) + text + bytes(values)


def change_array(draw: random.Random, data: bytes) -> tuple[str, bytes]:
    """Change the numbers, the length or the type of an array of NumPy; one that holds objects is never unpickled."""
    array = np.load(io.BytesIO(data), allow_pickle=False)
    made: dict[str, Callable[[], Any]] = {
        "shorter": lambda: array[:-1], "longer": lambda: np.concatenate([array, array]),
        "none": lambda: array[:0], "reversed": lambda: array[::-1], "float": lambda: array.astype("f8") + 0.5,
        "a table": lambda: array[:, None], "text": lambda: array.astype("U30"), "zero": lambda: array * 0,
        "ones": lambda: ~array, "half": lambda: array.astype("u1"), "scalar": lambda: array[0],
        "objects": lambda: array.astype(object), "shifted": lambda: array + array.dtype.type(1)}
    kind = draw.choice(sorted(made))
    out = io.BytesIO()
    np.save(out, made[kind](), allow_pickle=True)
    return f"array {kind}", out.getvalue()


STRUCTURES: dict[str, Callable[[random.Random, bytes], tuple[str, bytes]]] = {
    "json": change_json, "lines": change_line, "toml": change_toml, "csv": change_csv, "tensors": change_tensors,
    "array": change_array}


def restore(here: Path, made: Path) -> None:
    """Make a folder equal to another one; only what differs is written."""
    here.mkdir(exist_ok=True)
    wanted = {entry.name: entry for entry in os.scandir(made)}
    for entry in list(os.scandir(here)):
        is_folder = entry.is_dir(follow_symlinks=False)
        if entry.name not in wanted or entry.is_symlink() or is_folder != wanted[entry.name].is_dir():
            shutil.rmtree(entry.path) if is_folder else os.unlink(entry.path)
    for name, entry in wanted.items():
        if entry.is_dir():
            restore(here / name, made / name)
        elif not (here / name).exists() or _mark(here / name) != _mark(made / name):
            (here / name).unlink(missing_ok=True)  # one without permission cannot be written into
            shutil.copy2(entry.path, here / name)


def _mark(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_mode


def marks_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the size and the time of every file below a folder."""
    found = {}
    for root, _, names in os.walk(folder):
        for name in names:
            status = os.lstat(os.path.join(root, name))
            found[os.path.join(root, name)] = (status.st_size, status.st_mtime_ns)
    return found
