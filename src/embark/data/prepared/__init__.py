"""Embark's prepared format: columnar blocks that are memory-mapped, copied and decoded as they lie."""

from __future__ import annotations

from embark.data.prepared.layout import Feature, Layout, Rows, fill
from embark.data.prepared.manifest import BLOCK_ROWS, MANIFEST, SPLITS, STATISTICS, Manifest, Part, Split
from embark.data.prepared.part_writer import PartWriter

__all__ = ["BLOCK_ROWS", "MANIFEST", "SPLITS", "STATISTICS", "Feature", "Layout", "Manifest", "Part", "PartWriter",
           "Rows", "Split", "fill"]
