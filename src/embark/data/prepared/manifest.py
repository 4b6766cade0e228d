"""What a prepared data set is: written last, so that a directory without it is not one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from embark.data.prepared.layout import Layout
from embark.errors import DataError

MANIFEST = "manifest.json"
STATISTICS = "statistics.json"
VERSION = 1
BLOCK_ROWS = 32_768
Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


@dataclass(frozen=True, slots=True)
class Part:
    """One file: blocks of `block_rows` rows one after the other, the last with what is left."""

    file: str
    """Relative to the manifest."""
    rows: int
    size_bytes: int
    sha256: str
    block_starts: tuple[int, ...] = ()
    """Byte each block begins at, where a feature is ragged; else all have the size that the layout gives."""


@dataclass(frozen=True)
class Manifest:
    """The schema, the files and where they came from."""

    layout: Layout
    parts: Mapping[Split, tuple[Part, ...]]
    label: str = "label"
    block_rows: int = BLOCK_ROWS
    statistics_sha256: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    """What it was prepared with."""
    sources: tuple[dict[str, Any], ...] = ()
    """The files it was made of, with their sizes."""
    bad_rows: dict[str, Any] = field(default_factory=dict)
    """How many rows were left out, and why."""

    def num_rows(self, split: Split) -> int:
        return sum(part.rows for part in self.parts.get(split, ()))

    @property
    def rows_by_split(self) -> dict[Split, int]:
        return {split: self.num_rows(split) for split in SPLITS}

    def all_parts(self) -> Iterator[Part]:
        """Of every split."""
        for split in SPLITS:
            yield from self.parts.get(split, ())

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.all_parts())

    def to_text(self) -> str:
        """As the file holds it."""
        parts = {
            split: [
                {"file": p.file, "rows": p.rows, "bytes": p.size_bytes, "sha256": p.sha256}
                | ({"block_starts": list(p.block_starts)} if p.block_starts else {})
                for p in self.parts.get(split, ())
            ]
            for split in SPLITS
        }
        value = {
            "format": "embark-prepared", "version": VERSION, "label": self.label, "block_rows": self.block_rows,
            "rows": self.rows_by_split, "layout": self.layout.to_json(),
            "settings": self.settings, "sources": list(self.sources), "bad_rows": self.bad_rows,
            "statistics_sha256": self.statistics_sha256, "parts": parts,
        }
        return json.dumps(value, indent=1) + "\n"

    @staticmethod
    def from_text(text: str, where: str) -> Manifest:
        """Read it, or say what it is instead."""
        try:
            value = json.loads(text)
            if value["format"] != "embark-prepared":
                raise KeyError("format")
            if value["version"] != VERSION:
                raise DataError(f"{where}: its format is version {value['version']}, this Embark reads {VERSION}",
                                fix="prepare the data again, or use the Embark that wrote it")
            return Manifest(
                layout=Layout.from_json(value["layout"]),
                parts={
                    split: tuple(
                        Part(p["file"], p["rows"], p["bytes"], p["sha256"], tuple(p.get("block_starts", ())))
                        for p in value["parts"][split]
                    )
                    for split in SPLITS
                },
                label=value["label"], block_rows=value["block_rows"], settings=value["settings"],
                statistics_sha256=value["statistics_sha256"], sources=tuple(value["sources"]),
                bad_rows=value["bad_rows"],
            )
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{where}: not the manifest of prepared data ({type(error).__name__}: {error})",
                            fix="`embark data prepare` writes one") from None
