"""The tables of an artifact in a GPU's memory, in the bits they have, and lookups in all of them at once."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from embark.errors import UserError
from embark.export.artifact import WEIGHTS, Artifact
from embark.export.delta import ROWS, VALUES
from embark.export.quantize import TABLE_DTYPES, TableDtype, row_format
from embark.features.arrays import Array
from embark.formatting import format_bytes
from embark.spec.model import ModelSpec
from embark.store.checkpoint_arrays import table_weight
from .cpu_model import other_weights

RESERVED_BYTES = 2 << 30  # Kept free for the dense network, its activations and CUDA itself.
_UPLOAD_BYTES = 64 << 20


def table_bytes(model: ModelSpec, dtype: TableDtype) -> int:
    """Return the bytes of all tables."""
    total = 0
    for table in model.stored_tables():
        element, num = row_format(dtype, table.dim)
        total += table.rows * num * element.itemsize
    return total


def check_memory(artifact: Artifact, free_bytes: int, device_name: str) -> None:
    """Raise where the tables do not fit into what is free; the message names the first type that would."""
    model, dtype = artifact.info.model, artifact.info.tables
    size, room = table_bytes(model, dtype), max(0, free_bytes - RESERVED_BYTES)
    if size <= room:
        return
    smaller = [other for other in TABLE_DTYPES[TABLE_DTYPES.index(dtype) + 1 :] if table_bytes(model, other) <= room]
    fix = f"`embark export --tables {smaller[0]}`: {format_bytes(table_bytes(model, smaller[0]))}; or --device cpu" \
        if smaller else "--device cpu"
    raise UserError(f"{artifact.uri}, version {artifact.version}: its {dtype} tables take {format_bytes(size)}, and "
                    f"{device_name} has {format_bytes(room)} for them beside {format_bytes(RESERVED_BYTES)} for the "
                    "network and what else is on it", fix)


class GpuTables:
    """Rows as the artifact holds them, one tensor for each stored table, whose address stays."""

    def __init__(self, artifact: Artifact, device: torch.device) -> None:
        model, self.dtype = artifact.info.model, artifact.info.tables
        self._stored: dict[str, Tensor] = {}
        for stored in model.stored_tables():
            self._stored[stored.name] = _upload(artifact, stored.name, stored.rows, stored.dim, device)
        self._tables = model.table_list()
        widths = {feature.name: feature.multi_hot for feature in artifact.info.rows.layout.features}
        self.num_ids = [widths[table.name] for table in self._tables]
        """The most ids that a sample has of each table."""
        self.width = sum(table.dim or 0 for table in self._tables)
        self._max_dim = max(table.dim or 0 for table in self._tables)
        about, column, first = [], 0, 0
        for table, num_ids in zip(self._tables, self.num_ids, strict=True):
            element, num = row_format(self.dtype, table.dim or 0)
            about.append([self._stored[table.weights].data_ptr(), table.stored_rows, num * element.itemsize,
                          table.dim or 0, column, first, num_ids, int(table.pooling == "mean")])
            column, first = column + (table.dim or 0), first + num_ids
        self._about = torch.tensor(about, dtype=torch.int64, device=device)

    def apply(self, delta: Mapping[str, Array]) -> None:
        """Write the rows of a delta, which fitted the artifact's tables, over those they replace."""
        for name, table in self._stored.items():
            key = f"{WEIGHTS}/{table_weight(name).removeprefix('model.')}"
            if key in delta:
                table.copy_(_tensor(delta[key]))
            elif key + VALUES in delta:
                rows = torch.from_numpy(delta[key + ROWS].astype("int64")).to(table.device)
                table.index_copy_(0, rows, _tensor(delta[key + VALUES]).to(table.device))

    def look_up(self, ids: Tensor, out: Tensor) -> None:
        """Pool rows into `out` [n, width]. `ids` is int32, of each table [n, num_ids] one after the other; -1: none."""
        from . import lookup_kernels

        lookup_kernels.look_up(ids, self._about, out, dtype=self.dtype, max_dim=self._max_dim)


def _upload(artifact: Artifact, name: str, rows: int, dim: int, device: torch.device) -> Tensor:
    stored = artifact.weights.get(table_weight(name).removeprefix("model."))
    element, num = row_format(artifact.info.tables, dim)
    if stored is None or stored.shape != (rows, num) or stored.dtype != element:
        raise other_weights(artifact, f"table {name}")
    found = torch.empty((rows, num), dtype=torch.from_numpy(stored[:0]).dtype, device=device)
    at_once = max(1, _UPLOAD_BYTES // (num * element.itemsize))
    for start in range(0, rows, at_once):  # of a mapped file: what is copied need not stay in memory
        found[start : start + at_once].copy_(torch.from_numpy(stored[start : start + at_once]))
    return found


def _tensor(values: Array) -> Tensor:
    return torch.from_numpy(np.require(values, requirements=("C", "W")))  # torch warns of what it cannot write
