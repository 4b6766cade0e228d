"""Which line of a TOML text a field stands on. tomllib keeps no positions, and a line is worth a scan."""

import re

_HEADER = re.compile(r"^\s*(\[{1,2})\s*([^\[\]]+?)\s*\]{1,2}\s*(#.*)?$")
_KEY = re.compile(r"^\s*([A-Za-z0-9_.\"'-]+?)\s*=")


def line_of(text: str, field: str) -> int:
    """The line of `field` (`model.tables.2.rows`), of the nearest section around it, or 1."""
    places = _places(text)
    parts = field.split(".")
    for length in range(len(parts), 0, -1):
        line = places.get(".".join(parts[:length]))
        if line:
            return line
    return 1


def _places(text: str) -> dict[str, int]:
    places: dict[str, int] = {}
    counts: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            section = _bare(header[2])
            if header[1] == "[[":
                counts[section] = counts.get(section, -1) + 1
                places.setdefault(section, number)
                section = f"{section}.{counts[section]}"
            places.setdefault(section, number)
        elif key := _KEY.match(line):
            name = _bare(key[1])
            places.setdefault(f"{section}.{name}" if section else name, number)
    return places


def _bare(name: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in name.split("."))
