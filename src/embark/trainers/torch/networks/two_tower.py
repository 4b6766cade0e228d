"""The dense layers of two towers, in training and in an exported model; torch alone."""

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from embark.spec.model import ModelSpec
from embark.spec.two_tower import is_item_table
from .layers import mlp


class TwoTowerNetwork(nn.Module):
    """A vector for the user and one for the item of each sample.

    Called as a network that scores pairs, it gives their logits, as any other kind of model does.
    """

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        two, tables = model.two_tower, model.table_list()
        self.widths = [table.dim or 0 for table in tables]
        self.is_item = [is_item_table(model, table.name) for table in tables]
        self.num_user_dense = model.num_dense - two.num_item_dense
        self.is_normalized, self.temperature = two.normalize, two.temperature
        own = [[width for width, is_item in zip(self.widths, self.is_item, strict=True) if is_item == of_item]
               for of_item in (False, True)]
        self.user = Tower(own[0], self.num_user_dense, two.user_layers)
        self.item = Tower(own[1], two.num_item_dense, two.item_layers)

    def forward(
        self, dense: Tensor, pooled: Tensor, gives_vectors: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        user, item = self.user_vectors(dense, pooled), self.item_vectors(dense, pooled)
        return (user, item) if gives_vectors else (user * item).sum(dim=1) / self.temperature

    def user_vectors(self, dense: Tensor, pooled: Tensor) -> Tensor:
        """Return the users' vectors, `[samples, width]`."""
        return self._scaled(self.user(dense[:, : self.num_user_dense], self._rows(pooled, of_item=False)))

    def item_vectors(self, dense: Tensor, pooled: Tensor) -> Tensor:
        """Return the items' vectors, `[samples, width]`."""
        return self._scaled(self.item(dense[:, self.num_user_dense :], self._rows(pooled, of_item=True)))

    def _rows(self, pooled: Tensor, *, of_item: bool) -> list[Tensor]:
        parts = pooled.split(self.widths, dim=1)
        return [part for part, is_item in zip(parts, self.is_item, strict=True) if is_item == of_item]

    def _scaled(self, vectors: Tensor) -> Tensor:
        vectors = vectors.float()
        return normalize(vectors, dim=1) if self.is_normalized else vectors


class Tower(nn.Module):
    """Layers over the rows and dense features side by side; without layers the sum of the rows, and a bias."""

    def __init__(self, widths: list[int], num_dense: int, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.bias = None if sizes else nn.Parameter(torch.zeros(widths[0]))
        self.layers = mlp(sum(widths) + num_dense, sizes, 0.0, ends_linear=True)

    def forward(self, dense: Tensor, rows: list[Tensor]) -> Tensor:
        if self.bias is not None:
            total = self.bias
            for row in rows:
                total = total + row
            return total
        vectors: Tensor = self.layers(torch.cat([*rows, dense], dim=1))
        return vectors
