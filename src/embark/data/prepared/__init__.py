"""The prepared format: columnar blocks that are memory-mapped, copied and decoded without conversion. May import store,
spec and errors."""

from embark.features.layout import Block, Feature, Layout, Rows, fill
from .manifest import BLOCK_ROWS, MANIFEST, SPLITS, Manifest, Part, Split
from .parts import PartWriter

__all__ = ["BLOCK_ROWS", "MANIFEST", "SPLITS", "Block", "Feature", "Layout", "Manifest", "Part",
           "PartWriter", "Rows", "Split", "fill"]
