"""AutoInt (https://arxiv.org/abs/1810.11921): self-attention between the features of a sample.

A custom model to start from: train it with model.kind = "my_model:MyModel".
"""

from itertools import pairwise

import torch
from torch import Tensor, nn

from embark.spec import ModelSpec


class MyModel(nn.Module):
    """Built from the spec's [model]; its sizes, such as top_mlp, mean what you make of them."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        width, tables = model.embedding_dim, model.table_list()
        self.fields = nn.ModuleList(nn.Linear(table.dim or width, width) for table in tables)
        self.dense = nn.Linear(model.num_dense, width) if model.num_dense else None
        self.attention = nn.ModuleList(nn.MultiheadAttention(width, num_heads=2, batch_first=True) for _ in range(2))
        sizes = [width * (len(tables) + bool(model.num_dense)), *model.top_mlp]
        layers = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(sizes)]
        self.top = nn.Sequential(*layers, nn.Linear(sizes[-1], 1))

    def forward(self, dense: Tensor, pooled: dict[str, Tensor]) -> Tensor:
        """`dense` is [samples, num_dense], `pooled["user"]` [samples, dim of the table]; returns a logit a sample."""
        vectors = [field(value) for field, value in zip(self.fields, pooled.values(), strict=True)]
        if self.dense is not None:
            vectors.append(self.dense(dense))
        x = torch.stack(vectors, dim=1)
        for attention in self.attention:
            x = torch.relu(x + attention(x, x, x, need_weights=False)[0])
        logits: Tensor = self.top(x.flatten(1))
        return logits.squeeze(1)
