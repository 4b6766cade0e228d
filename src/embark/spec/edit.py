"""Settings written into the text of a spec, which keeps its comments and its order."""

import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from embark.spec.load import parse_settings, put, resolve
from embark.spec.toml import inline


def set_in_text(text: str, sets: Sequence[str], *, where: str) -> tuple[str, tuple[str, ...]]:
    """The text with `key=value` settings in it, and a line of TOML for each that changed something.

    Raises what `load_spec` raises for them.
    """
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
    """What is added to the section of `key` goes right below its fields: comments after them are the next section's."""
    from tomlkit.items import Table

    section = _at(document, key.split(".")[0])
    body = section.value.body if "." in key and isinstance(section, Table) else []
    num_fields = max((index + 1 for index, (name, _) in enumerate(body) if name is not None), default=len(body))
    tail = body[num_fields:]
    del body[num_fields:]
    yield
    body += tail


def _at(raw: Any, key: str) -> Any:
    """The value of the dotted `key`, None where there is none."""
    for name in key.split("."):
        raw = raw.get(name) if isinstance(raw, dict) else raw[int(name)] if isinstance(raw, list) else None
    return raw
