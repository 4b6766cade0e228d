"""Generated Criteo rows, and what plain Python makes of them."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from embark.data.prepare.inputs import Inputs
from embark.data.prepared import SPLITS, Manifest
from embark.features.schema import Schema, SparseColumn
from embark.spec.run import RunSpec

DENSE = tuple(f"int_{i}" for i in range(13))
SPARSE = tuple(f"cat_{i}" for i in range(26))


class Criteo:
    """What the tests know of the format, written without a glance at the reader."""

    @staticmethod
    def schema(rows: int | None = 1000) -> Schema:
        columns = tuple(SparseColumn(name, "hex", rows=rows) for name in SPARSE)
        return Schema("criteo", "label", DENSE, columns, ("label", *DENSE, *SPARSE))

    @staticmethod
    def lines(num: int, seed: int = 1, distinct: int = 50) -> list[bytes]:
        draw = random.Random(seed)

        def integer() -> str:
            kind = draw.random()
            if kind < 0.3:
                return ""
            if kind < 0.4:
                return str(-draw.randrange(1, 10 ** draw.randrange(1, 9)))
            if kind < 0.41:
                return str(draw.randrange(10**8, 10**11))
            return str(draw.randrange(10 ** draw.randrange(1, 9)))

        def word() -> str:
            kind = draw.random()
            if kind < 0.2:
                return ""
            value = min(draw.randrange(distinct), draw.randrange(distinct)) * 2654435761 % 2**32
            return f"{value:X}" if kind < 0.25 else f"{value:x}" if kind < 0.3 else f"{value:08x}"

        return ["\t".join([draw.choice("01"), *(integer() for _ in DENSE), *(word() for _ in SPARSE)]).encode()
                for _ in range(num)]

    @staticmethod
    def parsed(line: bytes) -> tuple[int, list[int | None], list[int | None]] | None:
        """Label, integers, ids; None of a row that is to be left out."""
        fields = line.removesuffix(b"\r").split(b"\t")
        if len(fields) != 40 or fields[0] not in (b"0", b"1"):
            return None
        if not all(re.fullmatch(rb"(-?[0-9]{1,18})?", f) for f in fields[1:14]):
            return None
        if not all(re.fullmatch(rb"[0-9a-fA-F]{0,8}", f) for f in fields[14:]):
            return None
        return (int(fields[0]), [int(f) if f else None for f in fields[1:14]],
                [int(f, 16) if f else None for f in fields[14:]])

    @staticmethod
    def mlperf(value: int | None) -> float:
        return math.log(max(float(np.float32(value or 0)), -2.0) + 3)


@pytest.fixture
def criteo() -> type[Criteo]:
    return Criteo


@pytest.fixture
def make_spec() -> Callable[..., RunSpec]:
    """A spec from fields of [data] and [data.prepare]."""

    def made(prepare: dict | None = None, **data) -> RunSpec:
        return RunSpec.model_validate({"data": {**data, "prepare": {"num_workers": 1, **(prepare or {})}}})

    return made


@pytest.fixture
def inputs(tmp_path: Path) -> Inputs:
    return Inputs(str(tmp_path))


@pytest.fixture
def read_rows() -> Callable[..., list[tuple]]:
    """The rows of a split as (label, dense, ids of each feature), straight from the files."""

    def read(out: Path, manifest: Manifest, split: str) -> list[tuple]:
        layout, found = manifest.layout, []
        assert split in SPLITS
        for part in manifest.parts[split]:
            complete = np.fromfile(out / part.file, np.uint8)
            assert len(complete) == part.size_bytes
            at, left = 0, part.rows
            while left:
                num = min(left, manifest.block_rows)
                where = layout.map(num, complete[at : at + 8 * len(layout.ragged)].view("<i8").tolist())
                block = complete[at : at + where.size_bytes]
                ids = [None] * len(layout.features)
                for group, field in zip(layout.groups, where.groups, strict=True):
                    for member, array in zip(group.members, field.of(block), strict=True):
                        ids[member] = [row.tolist() for row in array]
                for member, (lengths, values) in zip(layout.ragged, where.ragged, strict=True):
                    cuts = np.cumsum(lengths.of(block).astype(np.int64))[:-1]
                    ids[member] = [row.tolist() for row in np.split(values.of(block), cuts)]
                label, dense = where.label.of(block), where.dense.of(block)
                found += [(int(label[i]), dense[i].tolist(), [of[i] for of in ids]) for i in range(num)]
                at, left = at + where.size_bytes, left - num
            assert at == len(complete)
        return found

    return read
