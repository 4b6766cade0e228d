"""DLRM and DLRM-DCNv2: a bottom MLP, an interaction of all features, and a top MLP or the heads of several tasks."""

from typing import Any

import numpy as np
import torch
import torch.fx
from torch import Tensor, nn

from embark.spec.model import ModelSpec
from .layers import bottom_mlp, mlp
from .task_heads import task_head

LARGE_PRODUCT = 400
"""Multiplications of a sample's product from which on torch calls BLAS for it: OpenBLAS wakes its threads each time."""


class DotNetwork(nn.Module):
    """DLRM: bottom MLP, dot products of all pairs, top MLP."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.dim = model.embedding_dim
        self.num_vectors = len(model.table_list()) + bool(model.num_dense)
        self.bottom = bottom_mlp(model)
        self.interaction = DotInteraction(self.num_vectors, self.dim)
        num_dots = self.num_vectors * (self.num_vectors - 1) // 2
        # Without dense features the vectors themselves stand where the bottom MLP's output would.
        passed_on = self.dim if self.bottom is not None else self.dim * self.num_vectors
        self.top, self.has_tasks = top_layers(model, passed_on + num_dots), bool(model.tasks)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        outputs = self.top(self.interaction(self.bottom(dense) if self.bottom is not None else None, pooled))
        return outputs if self.has_tasks else outputs.squeeze(1)


class CrossNetwork(nn.Module):
    """DLRM-DCNv2: bottom MLP, low-rank cross layers over all of it, top MLP."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.bottom = bottom_mlp(model)
        width = sum(t.dim or 0 for t in model.table_list()) + (model.embedding_dim if self.bottom is not None else 0)
        rank = min(model.cross_rank, width)
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(model.num_cross_layers))
        self.up = nn.ModuleList(nn.Linear(rank, width) for _ in range(model.num_cross_layers))
        self.top, self.has_tasks = top_layers(model, width), bool(model.tasks)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        first = pooled if self.bottom is None else torch.cat([self.bottom(dense), pooled], dim=1)
        crossed = first
        for down, up in zip(self.down, self.up, strict=True):
            crossed = first * up(down(crossed)) + crossed
        outputs = self.top(crossed)
        return outputs if self.has_tasks else outputs.squeeze(1)


def top_layers(model: ModelSpec, width: int) -> nn.Module:
    """Make the layers that give [samples, 1], or the outputs of all tasks."""
    return task_head(model, width) if model.tasks else mlp(width, (*model.top_mlp, 1), model.dropout, ends_linear=True)


class DotInteraction(nn.Module):
    """The bottom MLP's output, or all vectors where there is none, followed by the dot products of all pairs."""

    def __init__(self, num_vectors: int, dim: int) -> None:
        super().__init__()
        self.num_vectors, self.dim, self.dots = num_vectors, dim, PairwiseDots(num_vectors)

    def forward(self, bottom: Tensor | None, pooled: Tensor) -> Tensor:
        passed_on = pooled
        if bottom is not None:
            passed_on = bottom
            pooled = torch.cat([passed_on, pooled.to(passed_on.dtype)], dim=1)
        dots = self.dots(pooled.reshape(-1, self.num_vectors, self.dim))
        return torch.cat([passed_on, dots], dim=1)


class PairwiseDots(nn.Module):
    """Dots of pairs i < j, by rows: from vectors `[batch, F, D]` to `[batch, F * (F - 1) / 2]`.

    Autograd's backward pass of picking the upper triangle is a scatter, two batched products and a sum, and costs
    several times the forward pass. The gradient of the full matrix is symmetric, so here it is one gather and one
    product.
    """

    pair_cells: Tensor  # Cell of the flattened F x F matrix that holds each pair.
    cell_pairs: Tensor  # Pair that each cell holds, either way round; the diagonal's zeros mean nothing.

    def __init__(self, num_vectors: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        if num_vectors < 1:
            raise ValueError(f"PairwiseDots needs at least one vector, got {num_vectors}.")
        self.num_vectors = num_vectors
        self.num_pairs = num_vectors * (num_vectors - 1) // 2
        pair_cells = torch.empty(self.num_pairs, dtype=torch.int64, device=device)
        cell_pairs = torch.empty(num_vectors**2, dtype=torch.int64, device=device)
        self.register_buffer("pair_cells", pair_cells, persistent=False)
        self.register_buffer("cell_pairs", cell_pairs, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the index buffers; DMP calls this after it moves a module off `meta`."""
        first, second = torch.triu_indices(self.num_vectors, self.num_vectors, 1, device="cpu")
        pairs = torch.arange(self.num_pairs, device="cpu")
        cell_pairs = torch.zeros(self.num_vectors, self.num_vectors, dtype=torch.int64, device="cpu")
        cell_pairs[first, second] = pairs
        cell_pairs[second, first] = pairs
        self.pair_cells.copy_(first * self.num_vectors + second)
        self.cell_pairs.copy_(cell_pairs.view(-1))

    def forward(self, vectors: Tensor) -> Tensor:
        if self.num_vectors == 1:
            return vectors[:, 0, :0]
        if isinstance(vectors, torch.fx.Proxy) or torch.compiler.is_compiling():
            # Traced for serving: plain operations, which TorchScript and an exported program can hold.
            return torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, self.pair_cells)
        vectors = _as_autocast(vectors)
        if vectors.device.type == "cpu" and vectors.dtype == torch.float32 and not torch.is_grad_enabled():
            return batch_products(vectors).flatten(1).index_select(1, self.pair_cells)
        dots: Tensor = _Dots.apply(vectors, self.pair_cells, self.cell_pairs)
        return dots


def batch_products(vectors: Tensor) -> Tensor:
    """Return [batch, F, F] on a CPU.

    Without MKL torch's product of batches takes 14 times as long as numpy's, which may sum in another order.
    """
    if torch.backends.mkl.is_available():
        return torch.bmm(vectors, vectors.transpose(1, 2))
    values = vectors.detach().numpy()
    return torch.from_numpy(np.matmul(values, values.transpose(0, 2, 1)))


class _Dots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vectors: Tensor, pair_cells: Tensor, cell_pairs: Tensor) -> Tensor:
        ctx.save_for_backward(vectors, cell_pairs)
        is_large = vectors.shape[1] ** 2 * vectors.shape[2] >= LARGE_PRODUCT
        by_numpy = is_large and vectors.device.type == "cpu" and vectors.dtype == torch.float32
        cells = (batch_products(vectors) if by_numpy else torch.bmm(vectors, vectors.transpose(1, 2))).flatten(1)
        # On a CPU in bfloat16 three times as fast as index_select.
        return cells.gather(1, pair_cells.expand(cells.shape[0], -1))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        vectors, cell_pairs = ctx.saved_tensors
        num_vectors = vectors.shape[1]
        cells = grad.gather(1, cell_pairs.expand(grad.shape[0], -1))
        cells = cells.view(-1, num_vectors, num_vectors)
        cells.diagonal(dim1=1, dim2=2).zero_()
        return torch.bmm(cells, vectors), None, None


def _as_autocast(vectors: Tensor) -> Tensor:
    """Cast once, for both directions: autocast would only cast inside the product."""
    device_type = vectors.device.type
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return vectors.to(torch.get_autocast_dtype(device_type))
    return vectors
