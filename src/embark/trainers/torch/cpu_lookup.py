"""Table lookups and fused updates on a CPU, several times faster than FBGEMM's own; and of rows in bf16, which FBGEMM
stores and has no training kernels for.

FBGEMM's CPU backward takes more of a small model's step than all the dense layers. The same arithmetic over the same
storage, written as a sort, a segment sum and one write per touched row, leaves weights, optimizer state, learning rates
and checkpoints where TorchRec expects them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torch.nn.functional import embedding_bag, pad

from embark.errors import DataError


def use_fast_cpu_lookup(dmp: nn.Module) -> int:
    """Give every batch of CPU tables inside a sharded model the fast lookup; returns how many changed. Weighted
    features, and unpooled rows of several widths, keep FBGEMM's, which fails without rows: of a table with fewer rows
    than ranks, some ranks have none."""
    chosen = [tbe for tbe in _tbes(dmp) if tbe.weights_host.numel() == 0 or _has_fast_lookup(tbe)]
    for tbe in chosen:
        tbe.forward = _FastLookup(tbe)
    return len(chosen)


def use_lookup_of_bf16(dmp: nn.Module) -> None:
    """Let a sharded model on a GPU look up rows in bf16 for evaluation; the captured step's kernels train them."""
    for tbe in _tbes(dmp):
        if tbe.weights_precision == SparseType.BF16:
            tbe.forward = _FastLookup(tbe)


def round_stochastically(tbe: SplitTableBatchedEmbeddingBagsCodegen, rounding: RowRounding) -> None:
    """Let the fast lookup of a batch of CPU tables round updated rows by a hash instead of to the nearest."""
    lookup = vars(tbe)["forward"]
    assert isinstance(lookup, _FastLookup)
    lookup.rounding = rounding


def _tbes(root: nn.Module) -> Iterator[SplitTableBatchedEmbeddingBagsCodegen]:
    """Yield the batches of tables that get the fast lookup; of weighted features only those on a CPU without rows.

    TorchRec keeps its lookups in plain lists, which `modules()` does not enter.
    """
    seen: set[int] = set()
    weighted: set[int] = set()
    pending: list[nn.Module] = [root]
    while pending:
        module = pending.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if isinstance(module, SplitTableBatchedEmbeddingBagsCodegen):
            if id(module) not in weighted or (module.use_cpu and module.weights_host.numel() == 0):
                yield module
            continue
        if hasattr(module, "_emb_module") and getattr(getattr(module, "_config", None), "is_weighted", False):
            weighted.add(id(module._emb_module))
        pending.extend(child for child in module._modules.values() if child is not None)
        for value in vars(module).values():
            if isinstance(value, (list, tuple)):
                pending.extend(item for item in value if isinstance(item, nn.Module))


def _has_fast_lookup(tbe: SplitTableBatchedEmbeddingBagsCodegen) -> bool:
    return tbe.pooling_mode != PoolingMode.NONE or len(_group_features(tbe)) == 1


class _FastLookup:
    """Stands in for the `forward` of one FBGEMM batch of tables. It holds the module, not its tensors, so that a
    copied, moved or reloaded module is never looked up in storage it has left."""

    def __init__(self, tbe: SplitTableBatchedEmbeddingBagsCodegen) -> None:
        self.tbe = tbe
        self.groups = _group_features(tbe)
        self.num_features = len(tbe.feature_table_map)
        self.column_starts: list[int] = tbe.D_offsets.tolist()
        self.is_mean: bool = tbe.pooling_mode == PoolingMode.MEAN
        self.is_pooled: bool = tbe.pooling_mode != PoolingMode.NONE
        self.output_dtype: torch.dtype = SparseType.from_int(tbe.output_dtype).as_dtype()
        self.one_id_offsets = torch.empty(0, dtype=torch.int64)
        self.rounding: RowRounding | None = None

    def __call__(self, indices: Tensor, offsets: Tensor, *_unused: Any, **_none: Any) -> Tensor:
        """Look rows up; ids of features that have rows here have no weights."""
        if _weights(self.tbe).numel() == 0:
            shape = ((offsets.numel() - 1) // self.num_features, self.column_starts[-1]) if self.is_pooled else \
                (indices.numel(), self.tbe.dims[0])
            return torch.zeros(shape, dtype=self.output_dtype, device=offsets.device, requires_grad=True)
        self.tbe.step += 1
        return _LookupAndUpdate.apply(_weights(self.tbe), self, indices, offsets)

    def has_one_id_per_bag(self, indices: Tensor, offsets: Tensor) -> bool:
        if indices.numel() != offsets.numel() - 1:
            return False
        if self.one_id_offsets.shape != offsets.shape or self.one_id_offsets.dtype != offsets.dtype:
            self.one_id_offsets = torch.arange(offsets.numel(), dtype=offsets.dtype, device=offsets.device)
        return torch.equal(offsets, self.one_id_offsets)

    def check_bounds(self, indices: Tensor, offsets: Tensor, one_id: bool) -> None:
        """Refuse ids outside of their table, which would reach another table's rows."""
        tbe, bad_feature = self.tbe, self._bad_feature(indices, offsets, one_id)
        if bad_feature is not None:
            name = tbe.table_names[tbe.feature_table_map[bad_feature]]
            num_rows = int(tbe.rows_per_table[bad_feature])
            raise DataError(f"an id looked up in table {name} is not in 0..{num_rows - 1}",
                            "hash or clip ids to the table's rows when the data is prepared")

    def _bad_feature(self, indices: Tensor, offsets: Tensor, one_id: bool) -> int | None:
        num_rows = self.tbe.rows_per_table
        if indices.numel() == 0:
            return None
        if one_id:
            lowest, highest = torch.aminmax(indices.view(self.num_features, -1), dim=1)
            bad = (lowest < 0) | (highest >= num_rows)
            return int(bad.nonzero()[0]) if bool(bad.any()) else None
        num_ids = offsets[:: (offsets.numel() - 1) // self.num_features].diff()
        bad = (indices < 0) | (indices >= num_rows.repeat_interleave(num_ids))
        if not bool(bad.any()):
            return None
        return int(torch.bucketize(bad.nonzero()[0], num_ids.cumsum(0), right=True))


@dataclass(frozen=True, slots=True)
class _Group:
    """Features whose tables can be seen as rows of one matrix over the flat storage."""

    features: tuple[int, ...]
    dim: int
    first_element: int  # Start of the matrix in the flat storage: tables need not start at a multiple of dim.
    first_rows: Tensor  # Row of the matrix at which each feature's table begins.
    table_first_rows: Tensor  # First rows by table, ascending.
    state_shifts: Tensor  # Offsets from a row of the matrix to its row-wise state, by table; one if all agree.
    row_dtype: torch.dtype

    def matrix(self, flat: Tensor) -> Tensor:
        num_rows = (flat.numel() - self.first_element) // self.dim
        return flat.detach().narrow(0, self.first_element, num_rows * self.dim).view(-1, self.dim)

    def state_rows(self, rows: Tensor) -> Tensor:
        if self.state_shifts.numel() == 1:
            return rows + self.state_shifts
        table = torch.bucketize(rows, self.table_first_rows, right=True) - 1
        return rows + self.state_shifts[table]


def _weights(tbe: SplitTableBatchedEmbeddingBagsCodegen) -> Tensor:
    return tbe.weights_host if tbe.use_cpu else tbe.weights_dev


def _group_features(tbe: SplitTableBatchedEmbeddingBagsCodegen) -> tuple[_Group, ...]:
    dims = [tbe.dims[table] for table in tbe.feature_table_map]
    first_elements: list[int] = tbe.weights_offsets.tolist()
    is_rowwise = tbe.optimizer == EmbOptimType.EXACT_ROWWISE_ADAGRAD
    state_starts: list[int] = tbe.momentum1_offsets.tolist() if is_rowwise else []
    weights = _weights(tbe)
    features_of: dict[tuple[int, int], list[int]] = {}
    for feature, (dim, first_element) in enumerate(zip(dims, first_elements, strict=True)):
        features_of.setdefault((dim, first_element % dim), []).append(feature)
    groups = []
    for (dim, remainder), features in features_of.items():
        first_rows = [first_elements[feature] // dim for feature in features]
        shift_of_row = {row: state_starts[feature] - row if is_rowwise else 0
                        for row, feature in zip(first_rows, features, strict=True)}
        table_first_rows = sorted(shift_of_row)
        shifts = [shift_of_row[row] for row in table_first_rows]
        num_rows = weights.numel() // dim
        groups.append(_Group(
            features=tuple(features), dim=dim, first_element=remainder,
            first_rows=torch.tensor(first_rows, device=weights.device),
            table_first_rows=torch.tensor(table_first_rows),
            state_shifts=torch.tensor(shifts if len(set(shifts)) > 1 else shifts[:1]),
            # Half the bytes to sort and read: a quarter off the lookup, half off the sort.
            row_dtype=torch.int32 if num_rows < 2**31 else torch.int64,
        ))
    return tuple(groups)


@dataclass(frozen=True, slots=True)
class _Ids:
    """One group's ids in a batch, as rows of the group's matrix."""

    rows: Tensor
    batch_size: int
    lengths: Tensor | None  # Ids in each bag, [features, batch]; None where each has one and rows are sample-major.


class _LookupAndUpdate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, lookup: _FastLookup, indices: Tensor, offsets: Tensor) -> Tensor:
        one_id = lookup.has_one_id_per_bag(indices, offsets)
        lookup.check_bounds(indices, offsets, one_id)
        batch_size = (offsets.numel() - 1) // lookup.num_features
        ids = [_one_id_rows(group, lookup.num_features, indices, batch_size) if one_id and lookup.is_pooled
               else _ragged_rows(group, lookup.num_features, indices, offsets, batch_size) for group in lookup.groups]
        if not lookup.is_pooled:  # each id is a bag of its own, and all tables are of one width
            (group,), (some,) = lookup.groups, ids
            ids = [_Ids(some.rows, len(some.rows), lengths=None)]
            values = group.matrix(weights).index_select(0, some.rows).float()
        pooled = [] if not lookup.is_pooled else [_pool(group, group.matrix(weights), batch, lookup.is_mean)
                  for group, batch in zip(lookup.groups, ids, strict=True)]
        ctx.lookup, ctx.ids = lookup, ids
        # FBGEMM's update takes the rate of the forward pass, not the backward's.
        ctx.learning_rate, ctx.eps = float(lookup.tbe.learning_rate_tensor), lookup.tbe.optimizer_args.eps
        return (_in_feature_order(lookup, pooled) if lookup.is_pooled else values).to(lookup.output_dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:
        lookup: _FastLookup = ctx.lookup
        for group, batch in zip(lookup.groups, ctx.ids, strict=True):
            if batch.rows.numel() == 0:
                continue
            bag_grads = _columns_of(group, lookup, grad).float().reshape(-1, group.dim)
            rows, row_grads = _sum_by_row(group, batch, bag_grads, lookup.is_mean)
            _update(group, lookup, rows, row_grads, ctx.learning_rate, ctx.eps)
        return None, None, None, None


def _one_id_rows(group: _Group, num_features: int, indices: Tensor, batch_size: int) -> _Ids:
    by_feature = indices.view(num_features, batch_size)
    if len(group.features) != num_features:
        by_feature = by_feature[list(group.features)]
    rows = (by_feature + group.first_rows[:, None]).to(group.row_dtype)
    return _Ids(rows=rows.t().reshape(-1), batch_size=batch_size, lengths=None)


def _ragged_rows(group: _Group, num_features: int, indices: Tensor, offsets: Tensor, batch_size: int) -> _Ids:
    lengths = offsets.diff().view(num_features, batch_size)
    if len(group.features) != num_features:
        starts: list[int] = offsets[::batch_size].tolist()
        indices = torch.cat([indices[starts[f] : starts[f + 1]] for f in group.features])
        lengths = lengths[list(group.features)]
    first_rows = group.first_rows.repeat_interleave(lengths.sum(1))
    rows = (indices + first_rows).to(group.row_dtype)
    return _Ids(rows=rows, batch_size=batch_size, lengths=lengths)


def _pool(group: _Group, matrix: Tensor, ids: _Ids, is_mean: bool) -> Tensor:
    """Pooled vectors of one group, [batch, features * dim]."""
    width = len(group.features) * group.dim
    if ids.lengths is None:
        return matrix.index_select(0, ids.rows).view(ids.batch_size, width).float()
    rows = ids.rows
    if matrix.dtype != torch.float32:
        # embedding_bag would round the pooled sum to the table's precision.
        matrix = matrix.index_select(0, rows).float()
        rows = torch.arange(rows.numel(), dtype=rows.dtype, device=rows.device)
    bag_offsets = pad(ids.lengths.reshape(-1).cumsum(0), (1, 0)).to(rows.dtype)
    pooled = embedding_bag(rows, matrix, bag_offsets, mode="mean" if is_mean else "sum", include_last_offset=True)
    by_sample = pooled.view(len(group.features), ids.batch_size, group.dim).transpose(0, 1)
    return by_sample.reshape(ids.batch_size, width)


def _in_feature_order(lookup: _FastLookup, pooled: list[Tensor]) -> Tensor:
    if len(lookup.groups) == 1:
        return pooled[0]
    out = pooled[0].new_empty(pooled[0].shape[0], lookup.column_starts[-1])
    for group, vectors in zip(lookup.groups, pooled, strict=True):
        for feature, columns in zip(group.features, vectors.split(group.dim, dim=1), strict=True):
            out.narrow(1, lookup.column_starts[feature], group.dim).copy_(columns)
    return out


def _columns_of(group: _Group, lookup: _FastLookup, grad: Tensor) -> Tensor:
    if len(lookup.groups) == 1:
        return grad
    starts = lookup.column_starts
    return torch.cat([grad[:, starts[f] : starts[f + 1]] for f in group.features], dim=1)


def _sum_by_row(group: _Group, ids: _Ids, bag_grads: Tensor, is_mean: bool) -> tuple[Tensor, Tensor]:
    """Return each touched row once, with the sum of its gradients.

    The sum is an embedding_bag over the gradients: each row's is added up by one thread in the order of the batch, so a
    run repeats to the bit.
    """
    sorted_rows, order = torch.sort(ids.rows, stable=True)
    is_first = torch.ones_like(sorted_rows, dtype=torch.bool)
    torch.ne(sorted_rows[1:], sorted_rows[:-1], out=is_first[1:])
    starts = is_first.nonzero().view(-1)
    if ids.lengths is not None:
        num_features = len(group.features)
        lengths = ids.lengths.reshape(-1)
        if is_mean:
            scale = lengths.clamp(min=1).reciprocal().view(num_features, -1).t()
            bag_grads = bag_grads * scale.reshape(-1, 1)
        bags = torch.arange(bag_grads.shape[0]).view(-1, num_features).t().reshape(-1)
        order = bags.repeat_interleave(lengths)[order]
    row_grads = embedding_bag(order, bag_grads, starts, mode="sum")
    return sorted_rows[starts].long(), row_grads


def _update(
    group: _Group, lookup: _FastLookup, rows: Tensor, grads: Tensor, learning_rate: float, eps: float
) -> None:
    tbe = lookup.tbe
    if tbe.optimizer == EmbOptimType.EXACT_ROWWISE_ADAGRAD:
        state = tbe.momentum1_host.detach()
        state_rows = group.state_rows(rows)
        mean_square = torch.linalg.vector_norm(grads, dim=1).square_().div_(group.dim)
        total = mean_square.add_(state.index_select(0, state_rows))
        state.index_copy_(0, state_rows, total)
        step = grads.mul_((-learning_rate / total.sqrt().add_(eps))[:, None])
    elif tbe.optimizer == EmbOptimType.EXACT_ADAGRAD:
        state = group.matrix(tbe.momentum1_host)
        total = state.index_select(0, rows).addcmul_(grads, grads)
        state.index_copy_(0, rows, total)
        step = grads.div_(total.sqrt_().add_(eps)).mul_(-learning_rate)
    else:
        step = grads.mul_(-learning_rate)
    if learning_rate == 0.0:
        # Adding a zero would still turn -0.0 into 0.0 and an infinite gradient into NaN.
        return
    weights = group.matrix(tbe.weights_host)
    if weights.dtype == torch.float32:
        weights.scatter_add_(0, rows[:, None].expand(-1, group.dim), step)
    else:
        new_rows = weights.index_select(0, rows).float().add_(step)
        if lookup.rounding:
            starts = group.table_first_rows * group.dim + group.first_element
            new_rows = lookup.rounding(new_rows, rows, group.table_first_rows, starts.tolist())
        weights.index_copy_(0, rows, new_rows.to(weights.dtype))


_LOW = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class RowRounding:
    """Stochastic rounding of rows to bf16 by a hash of seed, step, row and column, as `table_kernels` do on a GPU.

    A value becomes one of its two neighbours: the nearer, the likelier.
    """

    seed: int
    step: Tensor  # The run's step.
    origins: Mapping[int, tuple[int, int]]
    """Maps a table's start in FBGEMM's storage to its first row's number among all tables', and its first column."""

    def __call__(self, values: Tensor, rows: Tensor, first_rows: Tensor, starts: Sequence[int]) -> Tensor:
        """Round `values`, the new values of `rows` of a matrix of tables.

        Each table has its first row, ascending, in `first_rows`, and in `starts` where it begins in the storage.
        """
        table = torch.bucketize(rows, first_rows, right=True) - 1
        numbers, columns = torch.tensor([self.origins[start] for start in starts]).unbind(1)
        number = rows - first_rows[table] + numbers[table]
        column = columns[table][:, None] + torch.arange(values.shape[1])
        of_step = _mixed((self.seed & _LOW) ^ _mixed(self.step & _LOW))
        by_row = _mixed(of_step ^ _mixed((number & _LOW) ^ _mixed(((number >> 32) + 1) & _LOW)))
        random = _mixed((by_row[:, None] + column * 0x9E3779B9) & _LOW)
        bits = (values.view(torch.int32).long() + (random & 0xFFFF)) & ~0xFFFF
        rounded = bits.to(torch.int32).view(torch.float32)
        return torch.where(values.isnan(), values, rounded).bfloat16()


def _mixed(bits: Tensor) -> Tensor:
    """Compute `table_kernels.mixed` for 32-bit numbers in 64 bits."""
    bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) & _LOW
    bits = ((bits ^ (bits >> 15)) * 0x846CA68B) & _LOW
    return bits ^ (bits >> 16)
