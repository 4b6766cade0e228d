"""Which rank holds which rectangle of which table; lookups in this rank's own rows, and their update, by FBGEMM as it
is or by kernels that a graph can hold."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor
from torchrec.distributed.types import ShardingPlan

from embark.model.work import MAX_SORTED_AT_ONCE
from embark.spec import Table
from embark.trainers.torch.cpu_lookup import RowRounding, round_stochastically
from .ops import Fork

OPTIMIZERS = {
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: "rowwise_adagrad",
    EmbOptimType.EXACT_ADAGRAD: "adagrad",
    EmbOptimType.EXACT_SGD: "sgd",
    EmbOptimType.ADAM: "adam",
    EmbOptimType.PARTIAL_ROWWISE_ADAM: "rowwise_adam",
}
ROWWISE = {"rowwise_adagrad": "momentum1", "rowwise_adam": "momentum2"}
"""Name, in FBGEMM, of the optimizer's state that has one number for each row."""


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """A rectangle of a table, on one rank, as one of its features sees it."""

    rank: int
    feature: int  # Position of the feature among the model's.
    first_row: int
    first_column: int
    num_rows: int
    num_columns: int


@dataclass(frozen=True, slots=True)
class LocalShard:
    """A shard of this rank, inside one of FBGEMM's batches of tables."""

    shard: Shard
    batch: SplitTableBatchedEmbeddingBagsCodegen
    position: int  # Position of the feature among those of the batch.


def planned(plan: ShardingPlan, features: tuple[Table, ...]) -> list[Shard]:
    """List every shard of every table, once for each of its features, in the order in which all ranks count them."""
    found = []
    for parameters in plan.plan.values():
        for name, parameter in parameters.items():
            for part in parameter.sharding_spec.shards if parameter.sharding_spec else ():
                rows, columns = part.shard_sizes
                if rows and columns:
                    first_row, first_column = part.shard_offsets
                    rank = part.placement.rank()
                    found += [Shard(rank, at, first_row, first_column, rows, columns)
                              for at, feature in enumerate(features) if feature.weights == name]
    return sorted(found)


def local_shards(collections: Sequence[Any], features: tuple[Table, ...], rank: int) -> list[LocalShard]:
    """List this rank's shards in the order of `planned`."""
    names = [feature.name for feature in features]
    found = []
    for lookup in (one for tables in collections for one in tables._lookups):
        for kernel in getattr(lookup, "module", lookup)._emb_modules:
            position = 0
            for table in kernel._config.embedding_tables:
                part = table.local_metadata
                if part is None:  # data-parallel, and no part of a captured step
                    continue
                (rows, columns), (first_row, first_column) = part.shard_sizes, part.shard_offsets
                for name in table.feature_names:
                    if rows and columns:
                        shard = Shard(rank, names.index(name), first_row, first_column, rows, columns)
                        found.append(LocalShard(shard, kernel.emb_module, position))
                    position += 1
    return sorted(found, key=lambda one: one.shard)


@dataclass(frozen=True, slots=True)
class LookupPlan:
    """The ids that one shard serves, and the columns that its vectors go to."""

    local: LocalShard
    id_start: int  # Index of the first id of its feature, [num_samples, num_ids].
    num_ids: int
    table_rows: int
    column: int  # First column of its vector in the output.
    number: int  # Index among the plans of this rank.
    rate: int  # Index of its table's learning rate.
    first_number: int  # Index of its table's first row among the rows of all tables.


class FbgemmLookup:
    """FBGEMM's own forward and fused backward for the ids of all samples: any device, any optimizer, no graph."""

    def __init__(self, plans: Sequence[LookupPlan], num_samples: int, seed: int, step: Tensor) -> None:
        """`seed` is that of the stochastic rounding of rows in bf16."""
        self._num_samples = num_samples
        batches = {id(p.local.batch): p.local.batch for p in plans}
        self._batches = [
            (batch, sorted((p for p in plans if p.local.batch is batch), key=lambda p: p.local.position))
            for batch in batches.values()
        ]
        self._outputs: list[Tensor] = []
        for batch, of_batch in self._batches:
            if batch.weights_precision == SparseType.BF16:
                starts = batch.weights_offsets.tolist()
                origins = {starts[p.local.position]: (p.first_number + p.local.shard.first_row,
                                                      p.local.shard.first_column) for p in of_batch}
                round_stochastically(batch, RowRounding(seed, step, origins))

    def set_rates(self, rates: Sequence[float]) -> None:
        for batch, plans in self._batches:
            batch.set_learning_rate(rates[plans[0].rate])

    def forward(self, ids: Tensor, out: Tensor, factors: Tensor | None = None) -> None:
        """Look the rows up, each multiplied by its id's factor, if there are any."""
        self._outputs = []
        for batch, plans in self._batches:
            with torch.enable_grad():
                rows = batch(*self._bags(ids, batch, plans, factors))
            self._outputs.append(rows)
            start = 0
            for one in plans:
                width = one.local.shard.num_columns
                out[:, one.column : one.column + width] = rows[:, start : start + width].detach()
                start += width

    def sort(self, grads: Tensor) -> None:
        """Prepare an update by the ids alone and by where gradients will be; it may run beside the dense layers.

        Nothing to do here: FBGEMM sorts.
        """

    def backward(self, grads: Tensor, fork: Fork = nullcontext) -> None:
        incoming = [
            torch.cat([grads[:, p.column : p.column + p.local.shard.num_columns] for p in plans], dim=1).to(rows.dtype)
            for (_, plans), rows in zip(self._batches, self._outputs, strict=True)
        ]
        if incoming:
            torch.autograd.backward(self._outputs, incoming)
        self._outputs = []

    def _bags(
        self, ids: Tensor, batch: Any, plans: Sequence[LookupPlan], factors: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return indices and offsets of the ids that fall into each shard's rows, and their factors."""
        indices, counts, of_indices = [], [], []
        by_position = {p.local.position: p for p in plans}
        for position in range(len(batch.weights_offsets)):  # of each feature, whichever table it has
            one = by_position.get(position)
            if one is None:
                counts.append(torch.zeros(self._num_samples, dtype=torch.int64, device=ids.device))
                continue
            size = self._num_samples * one.num_ids
            rows = ids[one.id_start : one.id_start + size] - one.local.shard.first_row
            # A bad id goes through to FBGEMM's own check where the shard is a complete table.
            is_complete = one.local.shard.num_rows == one.table_rows
            is_mine = rows != -1 if is_complete else (rows >= 0) & (rows < one.local.shard.num_rows)
            indices.append(rows[is_mine])
            if factors is not None:
                of_indices.append(factors[one.id_start : one.id_start + size][is_mine])
            counts.append(is_mine.view(self._num_samples, one.num_ids).sum(1))
        offsets = torch.nn.functional.pad(torch.cat(counts).cumsum(0), (1, 0)).to(ids.dtype)
        return torch.cat(indices), offsets, *([torch.cat(of_indices)] if of_indices else [])


class FbgemmRows:
    """FBGEMM's own lookup and update of tables whose rows are not pooled: any device, no graph."""

    def __init__(self, plans: Sequence[Sequence[LookupPlan]]) -> None:
        """`plans` has the shards of each table, as its first feature sees them."""
        batches = {id(one.local.batch): one.local.batch for shards in plans for one in shards}
        self._batches = [(batch, {one.local.position: (table, one) for table, shards in enumerate(plans)
                                  for one in shards if one.local.batch is batch}) for batch in batches.values()]
        self._outputs: list[tuple[Tensor, list[tuple[int, Tensor, slice]]]] = []

    def set_rates(self, rates: Sequence[float]) -> None:
        for batch, by_position in self._batches:
            batch.set_learning_rate(rates[next(iter(by_position.values()))[1].rate])

    def forward(self, ids: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """Look up the ids of each table, −1 for none, into its rows."""
        self._outputs = []
        for batch, by_position in self._batches:
            indices, counts, places = [], [0], []
            for position in range(len(batch.weights_offsets)):  # of each feature, of which one of a table has all ids
                counts.append(0)
                if position not in by_position:
                    continue
                table, one = by_position[position]
                first, num_columns = one.local.shard.first_column, one.local.shard.num_columns
                is_there = (ids[table] != -1).nonzero()[:, 0]
                counts[-1] = len(is_there)
                indices.append(ids[table][is_there])
                places.append((table, is_there, slice(first, first + num_columns)))
            offsets = torch.tensor(counts, device=ids[0].device).cumsum(0).to(ids[0].dtype)
            with torch.enable_grad():
                rows = batch(torch.cat(indices), offsets)
            self._outputs.append((rows, places))
            start = 0
            for table, where, columns in places:
                outs[table][:, columns] = 0
                outs[table][where, columns] = rows[start : start + len(where)].detach().float()
                start += len(where)

    def backward(self, grads: Sequence[Tensor]) -> None:
        for rows, places in self._outputs:
            rows.backward(torch.cat([grads[table][where, columns] for table, where, columns in places]).to(rows.dtype))
        self._outputs = []


@dataclass(frozen=True, slots=True)
class Device:
    """Tensors that the kernels read on the device, at every step."""

    rates: Tensor
    step: Tensor
    trouble: Tensor
    seed: Tensor  # Seed of stochastic rounding.


class Lookup(Protocol):
    """Looks rows up, and updates them by their gradients."""

    def set_rates(self, rates: Sequence[float]) -> None: ...

    def forward(self, ids: Tensor, out: Tensor, factors: Tensor | None = None) -> None: ...

    def sort(self, grads: Tensor) -> None: ...

    def backward(self, grads: Tensor, fork: Fork = nullcontext) -> None: ...


class KernelLookup:
    """Triton's kernels over FBGEMM's storage: buffers of fixed size, nothing decided on the host."""

    def __init__(
        self, plans: Sequence[LookupPlan], num_samples: int, device: Device, eps: float, l2: float,
        *, has_factors: bool = False,
    ) -> None:
        """`l2` is the penalty on looked-up rows, divided by the batch size; `has_factors` says whether `forward` gets
        some."""
        self._groups = [
            _Group(batch, of_batch, num_samples, device, eps, l2, has_factors=has_factors)
            for batch, of_batch in _by_width(plans)
        ]

    def set_rates(self, rates: Sequence[float]) -> None:
        """Do nothing: the kernels read the rates on the device."""

    def forward(self, ids: Tensor, out: Tensor, factors: Tensor | None = None) -> None:
        for group in self._groups:
            group.forward(ids, out, factors)

    def sort(self, grads: Tensor) -> None:
        for group in self._groups:
            group.sort(grads)

    def backward(self, grads: Tensor, fork: Fork = nullcontext) -> None:
        with fork():
            for group in self._groups:
                group.backward(grads, has_long_runs=True)
        for group in self._groups:
            group.backward(grads, has_long_runs=False)


class _Group:
    """Shards of one width in one of FBGEMM's batches: where their rows are one matrix, a row of it is a key.

    Tables of other widths among them shift rows by less than a row.
    """

    def __init__(
        self, batch: Any, plans: Sequence[LookupPlan], num_samples: int, on_device: Device, eps: float, l2: float,
        *, has_factors: bool,
    ) -> None:
        from . import table_kernels as kernels

        device = on_device.rates.device
        self._kernels, self._num_samples, self._on_device = kernels, num_samples, on_device
        self._weights, self._dim = batch.weights_dev, plans[0].local.shard.num_columns
        self._rates = on_device.rates[plans[0].rate :]
        optimizer = OPTIMIZERS[batch.optimizer]
        starts = batch.weights_offsets.tolist()
        states = starts
        if optimizer in ROWWISE:
            states = getattr(batch, f"{ROWWISE[optimizer]}_offsets").tolist()
        about, shifts, offsets, origins, slots = [], [], [], [], []
        key_start = 0
        for at, one in enumerate(plans):
            shard, position = one.local.shard, one.local.position
            row = -(-starts[position] // self._dim)  # upwards: no other shard's last row has this key
            offsets.append(starts[position] - row * self._dim)
            about.append([one.id_start, one.num_ids, shard.first_row, shard.num_rows, one.table_rows, one.column, row,
                          key_start, one.number, offsets[-1]])
            shifts.append(states[position] - row)
            origins.append([one.first_number + shard.first_row - row, shard.first_column])
            slots += [[at, key_start, one.num_ids, one.column]] * one.num_ids
            key_start += num_samples * one.num_ids
        self._about = torch.tensor(about, device=device)
        self._keys = torch.zeros(key_start, dtype=torch.int32, device=device)
        self._sorted_ids = kernels.SortedIds(
            torch.zeros_like(self._keys), torch.zeros(key_start, dtype=torch.int64, device=device),
            _keys_sorted_together([a[6] for a in about], num_samples, key_start),
            torch.tensor(slots, dtype=torch.int32, device=device), num_samples,
            math.gcd(16, self._dim, *(one.column for one in plans)),
            *(torch.zeros(key_start, device=device) for _ in range(2 * has_factors)),
        )
        self._partial = torch.zeros(kernels.partial_shape(key_start, self._dim), device=device)
        self._offset_multiple = math.gcd(16, *offsets) if any(offsets) else 0
        self._rows = kernels.Rows(
            self._weights, None if optimizer == "sgd" else batch.momentum1_dev,
            batch.momentum2_dev if "adam" in optimizer else None,
            torch.tensor(shifts if len(set(shifts)) > 1 else shifts[:1], device=device),
            torch.tensor(offsets, device=device) if any(offsets) else None, self._offset_multiple,
            self._dim, optimizer, eps, l2,
        )
        self._rounding = None
        if self._weights.dtype != torch.float32:
            self._rounding = kernels.Rounding(on_device.seed, torch.tensor(origins, device=device))

    def forward(self, ids: Tensor, out: Tensor, factors: Tensor | None) -> None:
        self._kernels.look_up(
            ids, self._weights, self._about, out, self._keys, self._on_device.trouble, self._on_device.step,
            factors, self._sorted_ids.key_factors, num_samples=self._num_samples, dim=self._dim,
            column_multiple=self._sorted_ids.column_multiple,
            offset_multiple=self._offset_multiple,
        )

    def sort(self, grads: Tensor) -> None:
        keys, ordered, order = (t.view(-1, self._sorted_ids.segment)
                                for t in (self._keys, self._sorted_ids.keys, self._sorted_ids.places))
        torch.sort(keys, dim=1, stable=True, out=(ordered, order))
        self._kernels.locate(self._sorted_ids, grads.stride(0))

    def backward(self, grads: Tensor, *, has_long_runs: bool) -> None:
        self._kernels.update(self._sorted_ids, grads, self._partial, self._rates, self._on_device.step, self._rows,
                             self._rounding, has_long_runs=has_long_runs)


def _keys_sorted_together(first_keys: Sequence[int], num_samples: int, num_keys: int) -> int:
    """Return the ids of one table, if each sample has one and they are few enough for torch to sort in one launch; else
    all.

    The keys of a table must be below those of the next.
    """
    is_ascending = all(one < other for one, other in pairwise(first_keys))
    is_one_hot = num_keys == len(first_keys) * num_samples
    return num_samples if is_ascending and is_one_hot and num_samples <= MAX_SORTED_AT_ONCE else num_keys


def why_not_by_kernels(shards: Sequence[LocalShard]) -> str:
    """Return why FBGEMM must look these shards up itself; empty if the kernels can."""
    for one in shards:
        batch = one.batch
        if batch.optimizer not in OPTIMIZERS:
            return "its optimizer is not one of those whose update the graph has"
        if batch.weights_dev.numel() // one.shard.num_columns >= 2**31 - 1:
            return "this rank has more rows than 32 bits count"
    return ""


def divides_itself(one: LocalShard) -> bool:
    """Return whether FBGEMM takes the mean of this shard; else the caller has to."""
    return bool(one.batch.pooling_mode == PoolingMode.MEAN)


def _by_width(plans: Sequence[LookupPlan]) -> list[tuple[Any, list[LookupPlan]]]:
    groups: dict[tuple[int, int], tuple[Any, list[LookupPlan]]] = {}
    for one in plans:
        key = id(one.local.batch), one.local.shard.num_columns
        groups.setdefault(key, (one.local.batch, []))[1].append(one)
    return list(groups.values())
