"""The page's own files, read once: a request names one of a few known words and never a path."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

_TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8",
          ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}


@cache
def static_files() -> dict[str, tuple[str, bytes]]:
    """By the path of the request: the type, and the bytes."""
    found: dict[str, tuple[str, bytes]] = {}
    for file in sorted(files("embark.dashboard").joinpath("static").iterdir(), key=lambda file: file.name):
        kind = _TYPES.get("." + file.name.rpartition(".")[2])
        if kind and file.is_file():
            found[f"/static/{file.name}"] = (kind, file.read_bytes())
    found["/"] = found["/static/index.html"]
    return found
