"""Small prepared data sets whose rows are known, for the tests that read them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from embark.data import resolve_from_data
from embark.data.prepared import MANIFEST, SPLITS, Feature, Layout, Manifest, Part, PartWriter, Rows, Split
from embark.data.prepared.cache import open_prepared
from embark.data.prepared.source import PreparedSource
from embark.spec import RunSpec, resolve

FIXED = (
    Feature("tiny", 3), Feature("wide", 40_000_000), Feature("middle", 60_000), Feature("many", 200, multi_hot=3),
    Feature("huge", 2_000_000_000, multi_hot=2), Feature("small", 256), Feature("edge", 65_537),
    Feature("pair", 1_000, multi_hot=2),
)
RAGGED = (Feature("a", 100), Feature("tags", 300, multi_hot=4, is_ragged=True), Feature("b", 70_000),
          Feature("words", 9, multi_hot=300, is_ragged=True))


@dataclass
class Made:
    """A data set on disk, and its rows in the order of the files."""

    path: Path
    layout: Layout
    manifest: Manifest
    rows: dict[Split, Rows]

    def spec(self, **data: Any) -> RunSpec:
        return resolve({"data": {"kind": "prepared", "path": str(self.path), **data}})

    def open(self, *, model: dict[str, Any] | None = None, **data: Any) -> PreparedSource:
        raw = {"data": {"kind": "prepared", "path": str(self.path), **data}, "model": model or {}}
        return open_prepared(resolve_from_data(resolve(raw)))


def draw(layout: Layout, num_rows: int, rng: np.random.Generator) -> Rows:
    """Rows with the largest and the smallest ids among them."""
    ids: list[np.ndarray] = []
    lengths: list[np.ndarray | None] = []
    for feature in layout.features:
        count = rng.integers(0, min(feature.multi_hot, 5) + 1, num_rows) if feature.is_ragged else None
        size = (num_rows, feature.multi_hot) if count is None else (int(count.sum()),)
        drawn = rng.integers(0, feature.rows, size)
        drawn.flat[::7] = feature.rows - 1
        drawn.flat[::11] = 0
        ids.append(drawn)
        lengths.append(count)
    dense = rng.normal(size=(num_rows, len(layout.dense))).astype(np.float32)
    if layout.dense_bits == 16:
        dense = dense.astype(np.float16).astype(np.float32)
    return Rows(rng.integers(0, 2, num_rows), dense, tuple(ids), tuple(lengths))


def make_prepared(
    path: Path, features: tuple[Feature, ...] = FIXED, *, train: int = 1_000, validation: int = 150, test: int = 70,
    num_dense: int = 3, dense_bits: int = 32, block_rows: int = 64, part_bytes: int = 6_000,
) -> Made:
    """A data set of random rows. Its first dense column is the row's number."""
    layout = Layout(tuple(f"d{i}" for i in range(num_dense)), features, dense_bits)
    rng = np.random.default_rng(5)
    rows: dict[Split, Rows] = {}
    parts: dict[Split, tuple[Part, ...]] = {}
    for split, num_rows in zip(SPLITS, (train, validation, test), strict=True):
        rows[split] = draw(layout, num_rows, rng)
        if num_dense:
            rows[split].dense[:, 0] = np.arange(num_rows)
        writer = PartWriter(path, f"{split}/part", layout, block_rows=block_rows, part_bytes=part_bytes)
        for start in range(0, num_rows, 37):
            writer.add(rows[split].cut(start, min(start + 37, num_rows)))
        parts[split] = tuple(writer.close())
    manifest = Manifest(layout, parts, block_rows=block_rows)
    (path / MANIFEST).write_text(manifest.to_text())
    return Made(path, layout, manifest, rows)
