"""The captured step of models that read sequences: a graph for each number of rows that batches are rounded up to."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .batch_layout import HostBuffer, SequenceLayout
from .engine import CudaGraphEngine
from .exchange import Sizes
from .lookup import FbgemmLookup, FbgemmRows, Lookup, LookupPlan
from .network import SequenceNetwork
from .ops import Fork

Shape = tuple[int, ...]
GRAPH_SLOT = 2
"""The slot that graphs read: a batch is copied there from its own, so that each shape has one graph."""


class SequenceEngine(CudaGraphEngine):
    """Captures a shape when the first batch that has it comes. The graphs share their memory: no two run at once."""

    layout: SequenceLayout

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._slots.append(torch.zeros_like(self._slots[0]))
        self._of_shape: dict[Shape, torch.cuda.CUDAGraph] = {}

    def _make_lookup(self, sizes: Sizes) -> Lookup:
        unpooled = {table.name: index for index, table in enumerate(self.layout.tables)}
        pooled: list[LookupPlan] = []
        rows: list[list[LookupPlan]] = [[] for _ in unpooled]
        self._plans = self._make_plans(sizes)
        for plan in self._plans:
            shard = plan.local.shard
            feature = self._tables[shard.feature]
            if feature.weights not in unpooled:
                pooled.append(plan)
            elif feature.name == self.layout.tables[unpooled[feature.weights]].features[0].name:  # once for each table
                rows[unpooled[feature.weights]].append(replace(plan, num_ids=1, column=shard.first_column))
        assert isinstance(self._network, SequenceNetwork)
        return SequenceLookup(self._lookup_of(pooled, sizes.num_samples), rows, self.layout, self._network,
                              self._lookup_of)

    def _capture(self) -> None:
        """Do nothing yet: shapes are known when batches come."""

    def _run(self) -> int:
        filled = self._filled
        assert isinstance(filled, HostBuffer)
        assert filled.shape is not None
        shape = self.layout.capacities = filled.shape.capacities
        if self._streams is None:
            self._body(self._slot, 0)
        else:
            size = filled.shape.size_bytes
            self._slots[GRAPH_SLOT][:size].copy_(self._slots[self._slot][:size])
            if shape not in self._of_shape:
                self._capture_shape(shape)
            self._of_shape[shape].replay()
        return filled.shape.num_predictions

    def _capture_shape(self, shape: Shape) -> None:
        """Capture a shape, and before it a larger one if none is as large: what memory that takes, smaller ones
        share, while one that grows little by little would take its own each time."""
        if not any(all(own >= room for own, room in zip(known, shape, strict=True)) for known in self._of_shape):
            larger = self.layout.larger(shape)
            if larger != shape:
                self._record(larger)
        self._record(shape)

    def _record(self, shape: Shape) -> None:
        self.layout.capacities = shape
        self._warm_up(GRAPH_SLOT)
        pool = next(iter(self._of_shape.values())).pool() if self._of_shape else None
        self._of_shape[shape] = self._recorded(GRAPH_SLOT, 0, pool)
        assert isinstance(self._network, SequenceNetwork)
        self._network.release_rows()

    def _body(self, slot: int, number: int, *, has_ids: bool = True) -> None:
        assert isinstance(self._network, SequenceNetwork)
        self._network.offsets = self.layout.offsets(self._slots[slot])
        self._network.make_rows()
        super()._body(slot, number, has_ids=has_ids)


class SequenceLookup:
    """Pools rows as the others do; of tables that some feature reads as a sequence it looks up one row for each id, and
    updates those of all features together."""

    def __init__(
        self, pooled: Lookup, plans: Sequence[Sequence[LookupPlan]], layout: SequenceLayout, network: SequenceNetwork,
        make: Callable[[Sequence[LookupPlan], int], Lookup],
    ) -> None:
        """`plans` has the shards of each such table; `make` makes the lookup of a number of ids by kernels."""
        self._pooled, self._plans, self._layout, self._network, self._make = pooled, plans, layout, network, make
        self._kernels: dict[Shape, list[Lookup]] = {}
        self._fbgemm = FbgemmRows(plans) if isinstance(pooled, FbgemmLookup) else None

    def set_rates(self, rates: Sequence[float]) -> None:
        self._pooled.set_rates(rates)
        if self._fbgemm is not None:
            self._fbgemm.set_rates(rates)

    def forward(self, ids: Tensor, out: Tensor, factors: Tensor | None = None) -> None:
        self._pooled.forward(ids, out, factors)
        if self._fbgemm is not None:
            self._fbgemm.forward([ids[span] for span in self._layout.table_spans()], self._network.rows)
        for lookup, rows in zip(self._of_shape(), self._network.rows, strict=False):
            lookup.forward(ids, rows)

    def sort(self, grads: Tensor) -> None:
        self._pooled.sort(grads)
        for lookup, rows in zip(self._of_shape(), self._network.rows, strict=False):
            lookup.sort(rows)

    def backward(self, grads: Tensor, fork: Fork = nullcontext) -> None:
        self._pooled.backward(grads, fork)
        if self._fbgemm is not None:
            self._fbgemm.backward(self._network.rows)
        for lookup, rows in zip(self._of_shape(), self._network.rows, strict=False):
            lookup.backward(rows, fork)

    def _of_shape(self) -> list[Lookup]:
        """Return the kernels of each table for the batch's shape; none where FBGEMM looks up."""
        shape = self._layout.capacities
        if self._fbgemm is not None:
            return []
        if shape not in self._kernels:
            self._kernels[shape] = [
                self._make([replace(plan, id_start=span.start) for plan in plans], span.stop - span.start)
                for plans, span in zip(self._plans, self._layout.table_spans(), strict=True)]
        return self._kernels[shape]
