"""Replacements for layers of a network that score faster on a CPU, and DLRM for many candidates of one user."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from embark.trainers.torch.networks.dlrm import DotNetwork, batch_products

MIN_ROWS = 16  # Products of fewer rows are summed in another order: with them, a score would depend on its batch.
_MAX_SPLITS = 16  # Clients may share different columns of a model.


def speed_up(network: nn.Module, *, is_int8: bool) -> None:
    """Replace modules by some that are faster without gradients."""
    for module in list(network.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear and type(module) in (nn.Sequential, nn.ModuleList):  # which only call it
                setattr(module, name, faster(child, is_int8=is_int8))
    if isinstance(bottom := getattr(network, "bottom", None), nn.Module):
        network.bottom = DistinctRows(bottom)


def faster(linear: nn.Linear, *, is_int8: bool) -> nn.Module:
    """Return a layer that is faster than `linear` on this CPU without gradients."""
    if torch.backends.mkl.is_available():
        return linear
    is_wide = min(linear.in_features, linear.out_features) >= MIN_WIDTH
    return Int8Linear(linear) if is_int8 and is_wide else TransposedLinear(linear)


class TransposedLinear(nn.Module):
    """A linear layer for OpenBLAS, which takes two thirds of oneDNN's time; torch calls it where weights are
    transposed."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.transposed, self.bias = linear.weight.detach().t().contiguous(), linear.bias

    def forward(self, values: Tensor) -> Tensor:
        rows = values.reshape(-1, values.shape[-1])
        found = torch.mm(rows, self.transposed) if self.bias is None else torch.addmm(self.bias, rows, self.transposed)
        return found.view(*values.shape[:-1], -1)


class DistinctRows(nn.Module):
    """Computes neighbours of the same values, as the candidates of one user have, once."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, values: Tensor) -> Tensor:
        is_first = (values[1:] != values[:-1]).any(dim=1)
        if 2 * int(is_first.sum()) > len(values):
            found: Tensor = self.network(values)
            return found
        is_first = torch.cat([torch.ones(1, dtype=torch.bool), is_first])
        return self.network(padded(values[is_first])).index_select(0, is_first.cumsum(0) - 1)


def padded(values: Tensor) -> Tensor:
    """Return at least `MIN_ROWS` rows, with zeros behind the last."""
    missing = MIN_ROWS - len(values)
    return values if missing <= 0 else torch.cat([values, values.new_zeros(missing, values.shape[1])])


@dataclass(frozen=True, slots=True)
class _Split:
    """The first layer above the dots, split for candidates that share some tables."""

    user_pairs: Tensor  # Cells of the dots of the user's vectors with each other.
    own_pairs: Tensor  # Cells of the dots of a candidate's vectors with each other.
    user_weight: Tensor  # [out, width of the user's dense vector + its pairs]
    own_layer: nn.Module  # Layer over the dots with the user's vectors and the candidate's own pairs.


class CandidateNetwork:
    """DLRM in which the columns that all candidates of a user share are computed once.

    It splits the sums of the network, so that scores differ in the last bits from those of the same rows one by one.
    """

    def __init__(self, network: DotNetwork, bottom: nn.Module, first: nn.Linear,
                 faster: Callable[[nn.Linear], nn.Module]) -> None:
        """`bottom` takes one row; `first` is the layer above the dots; `faster` replaces a layer by a faster one
        without gradients."""
        assert isinstance(network.top, nn.Sequential)
        self._network, self._bottom, self._first, self._above = network, bottom, first, network.top[1:]
        self._faster = faster
        self._splits: dict[tuple[int, ...], _Split] = {}

    def logits(self, dense: Tensor, user: Tensor, own: Tensor, shared: tuple[int, ...]) -> Tensor:
        """Return logits [n] of dense values [1, D], rows of the `shared` tables [S, dim] and of the others [n, T - S,
        dim]."""
        split = self._splits.get(shared) or self._split(shared)
        below = self._bottom(dense)
        vectors = torch.cat([below, user])
        of_user = torch.mm(vectors, vectors.t()).view(-1).index_select(0, split.user_pairs)
        user_part = torch.addmv(self._first.bias, split.user_weight, torch.cat([below[0], of_user]))
        with_user = torch.mm(own.view(-1, own.shape[2]), vectors.t()).view(len(own), -1)
        of_own = batch_products(own).flatten(1).index_select(1, split.own_pairs)
        values = split.own_layer(torch.cat([with_user, of_own], dim=1)).add_(user_part)
        logits: Tensor = self._above(values).squeeze(1)
        return logits

    def _split(self, shared: tuple[int, ...]) -> _Split:
        num, weight = self._network.num_vectors, self._first.weight.detach()
        users, dim = [0, *(1 + table for table in shared)], self._network.dim
        owns = [vector for vector in range(num) if vector not in users]
        column = torch.zeros(num, num, dtype=torch.int64)
        first, second = torch.triu_indices(num, num, 1)
        column[first, second] = column[second, first] = dim + torch.arange(len(first))

        def pairs(vectors: list[int]) -> tuple[Tensor, Tensor]:
            """Return the cells of the vectors' own matrix, and the columns of the weight."""
            upper = torch.triu_indices(len(vectors), len(vectors), 1)
            chosen = torch.tensor(vectors, dtype=torch.int64)[upper]
            return upper[0] * len(vectors) + upper[1], column[chosen[0], chosen[1]]

        user_pairs, user_columns = pairs(users)
        own_pairs, own_columns = pairs(owns)
        between = column[torch.tensor(owns)[:, None], torch.tensor(users)].view(-1)
        own_weight = weight[:, torch.cat([between, own_columns])]
        layer = nn.Linear(own_weight.shape[1], own_weight.shape[0], bias=False)
        layer.weight = nn.Parameter(own_weight.contiguous(), requires_grad=False)
        if len(self._splits) >= _MAX_SPLITS:
            self._splits.clear()
        self._splits[shared] = found = _Split(
            user_pairs=user_pairs, own_pairs=own_pairs,
            user_weight=weight[:, torch.cat([torch.arange(dim), user_columns])].contiguous(),
            own_layer=self._faster(layer))
        return found


MIN_WIDTH = 128  # Narrower layers take longer in int8: most of their time is not the product.
_LARGEST = 127
_TINY = 1e-30


@cache
def has_int8_products() -> bool:
    """Return whether products in int8 are faster than in float32: oneDNN on ARM with its dot products of bytes."""
    if not torch.backends.mkldnn.is_available() or not getattr(torch.backends.mkldnn, "is_acl_available", bool)():
        return False
    cpu = Path("/proc/cpuinfo")
    return cpu.exists() and "asimddp" in cpu.read_text().split()


class Int8Linear(nn.Module):
    """A linear layer in int8.

    Each row of values has its own scale and each column of weights too, so a score does not depend on the other rows of
    its batch, and integers are summed exactly.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.weight_scale = weight.abs().amax(dim=1).clamp(min=_TINY) / _LARGEST
        levels = (weight / self.weight_scale[:, None]).round().to(torch.int8)
        self.packed = torch.ops.onednn.qlinear_prepack(levels, None)
        self.bias = None if linear.bias is None else linear.bias.detach()
        # For the product itself: its sums come back as they are. With a scale for each column it would not use bytes.
        self.one, self.zero = torch.ones(1), torch.zeros(1, dtype=torch.int64)

    def forward(self, values: Tensor) -> Tensor:
        rows = values.reshape(-1, values.shape[-1])
        largest = rows.abs().amax(dim=1, keepdim=True).clamp_(min=_TINY)
        levels = (rows * (_LARGEST / largest)).round_().to(torch.int8)
        sums: Tensor = torch.ops.onednn.qlinear_pointwise(
            levels, 1.0, 0, self.packed, self.one, self.zero, None, 1.0, 0, torch.float32, "none", [], "")
        found = sums.mul_(largest / _LARGEST).mul_(self.weight_scale)
        return (found if self.bias is None else found.add_(self.bias)).view(*values.shape[:-1], -1)
