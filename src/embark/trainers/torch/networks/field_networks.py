"""DeepFM, Wide & Deep, xDeepFM, AutoInt, FinalMLP, MaskNet and TabM: networks over fields, which are the numbers and
the tables of a row, each with a vector.

A number's vector is learned and multiplied by the number. In models with a linear part the weight of an id is the
first number of its row, and the others are its vector: a second group of tables of width 1 would double the lookups,
the exchange between ranks and the updates, and a row of one more number would not be aligned.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from embark.spec.model import FIRST_ORDER_KINDS, ModelSpec
from .dlrm import top_layers
from .layers import ReLUWithDropout, mlp


class FieldNetwork(nn.Module):
    """What the networks share: a deep part, whose outputs are added to terms that need none.

    With several tasks the terms are inputs of their head, beside those of the deep part.
    """

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.fields = Fields(model)
        self.has_tasks = bool(model.tasks)

    def finish(self, deep: Tensor, terms: Tensor | None = None) -> Tensor:
        """Return logits of the inputs of the deep part, [samples, width], and the terms, [samples, any number]."""
        if self.has_tasks:
            outputs: Tensor = self.top(deep if terms is None else torch.cat([deep, terms], dim=1))
            return outputs
        logits: Tensor = self.top(deep)
        if terms is not None:
            logits = logits + self.weigh(terms)
        return logits.squeeze(1)

    def weigh(self, terms: Tensor) -> Tensor:
        """Return what the terms add to a logit, [samples, 1]."""
        return terms.sum(dim=1, keepdim=True)

    def make_top(self, model: ModelSpec, width: int, num_terms: int = 0) -> None:
        """Make the deep part, or the head of several tasks."""
        self.top = top_layers(model, width + (num_terms if model.tasks else 0))


class Fields(nn.Module):
    """Vectors of all fields side by side, [samples, width], and the sum of the fields' linear weights, [samples, 1]."""

    is_vector: Tensor

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        dim, dims = model.embedding_dim, [table.dim or 0 for table in model.table_list()]
        self.numbers = None
        if model.num_dense and model.kind not in ("wide_deep", "tabm"):  # which take the numbers as they are
            self.numbers = nn.Parameter(torch.empty(model.num_dense, dim).uniform_(-1 / dim, 1 / dim))
            dims = [dim] * model.num_dense + dims
        self.width, self.num_fields, self.dim = sum(dims), len(dims), dim
        self.has_first_order = model.kind in FIRST_ORDER_KINDS
        if self.has_first_order:
            # Zeros in place of the linear weights leave every product as it is, and the rows aligned.
            one_row = [torch.cat([torch.zeros(1), torch.ones(width - 1)]) for width in dims]
            self.register_buffer("is_vector", torch.cat(one_row), persistent=False)

    def forward(self, dense: Tensor, pooled: Tensor) -> tuple[Tensor, Tensor | None]:
        values = pooled
        if self.numbers is not None:
            values = torch.cat([(dense.unsqueeze(2) * self.numbers).flatten(1), pooled], dim=1)
        if not self.has_first_order:
            return values, None
        vectors = values * self.is_vector
        return vectors, (values - vectors).sum(dim=1, keepdim=True)

    def apart(self, vectors: Tensor) -> Tensor:
        """Return [samples, fields, dim]."""
        return vectors.view(-1, self.num_fields, self.dim)


class DeepFM(FieldNetwork):
    """DeepFM (Guo 2017, https://arxiv.org/abs/1703.04247): a factorization machine beside an MLP over its vectors."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__(model)
        self.make_top(model, self.fields.width, num_terms=2)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        vectors, linear = self.fields(dense, pooled)
        fields = self.fields.apart(vectors)
        # The sum of all pairs' products, without the pairs.
        pairs = (fields.sum(dim=1).square() - fields.square().sum(dim=1)).sum(dim=1, keepdim=True) / 2
        return self.finish(vectors, torch.cat([linear, pairs], dim=1))


class WideAndDeep(FieldNetwork):
    """Wide & Deep (Cheng 2016, https://arxiv.org/abs/1606.07792): a linear model beside an MLP over numbers and
    vectors; crosses of columns are columns of the data."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__(model)
        self.linear = nn.Linear(model.num_dense, 1, bias=False) if model.num_dense else None
        self.make_top(model, model.num_dense + self.fields.width, num_terms=1)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        vectors, linear = self.fields(dense, pooled)
        if self.linear is not None:
            linear = linear + self.linear(dense)
        return self.finish(torch.cat([dense, vectors], dim=1), linear)


class XDeepFM(FieldNetwork):
    """xDeepFM (Lian 2018, https://arxiv.org/abs/1803.05170): a linear model, a compressed interaction network and
    an MLP, added up.

    Map h of a layer is the sum over fields i of the layer before and j of the input of weight h, i, j times the product
    of both vectors; the sums of the maps' numbers are features.
    """

    def __init__(self, model: ModelSpec) -> None:
        super().__init__(model)
        num_fields, num_maps = self.fields.num_fields, model.num_feature_maps
        widths = [num_fields] + [num_maps] * (model.num_cross_layers - 1)
        self.maps = nn.ModuleList(nn.Linear(width, num_maps * num_fields, bias=False) for width in widths)
        num_sums = num_maps * model.num_cross_layers
        self.of_sums = None if model.tasks else nn.Linear(num_sums, 1, bias=False)
        self.make_top(model, self.fields.width, num_terms=1 + num_sums)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        vectors, linear = self.fields(dense, pooled)
        first = self.fields.apart(vectors).transpose(1, 2).contiguous()  # [samples, dim, fields]
        last, terms = first, [linear]
        for weights in self.maps:
            # Weighted first, then multiplied: products of all pairs, as the paper draws it, take twice the time.
            last = (weights(last).unflatten(2, (-1, self.fields.num_fields)) * first.unsqueeze(2)).sum(dim=3)
            terms.append(last.sum(dim=1))
        return self.finish(vectors, torch.cat(terms, dim=1))

    def weigh(self, terms: Tensor) -> Tensor:
        assert self.of_sums is not None
        return terms[:, :1] + self.of_sums(terms[:, 1:])


class AutoInt(FieldNetwork):
    """AutoInt+ (Song 2019, https://arxiv.org/abs/1810.11921): self-attention between fields, beside an MLP."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__(model)
        self.layers = nn.ModuleList(
            FieldAttention(model.embedding_dim, model.num_heads) for _ in range(model.num_cross_layers))
        self.of_fields = None if model.tasks else nn.Linear(self.fields.width, 1, bias=False)
        self.make_top(model, self.fields.width, num_terms=self.fields.width)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        vectors, _ = self.fields(dense, pooled)
        fields = self.fields.apart(vectors)
        for layer in self.layers:
            fields = layer(fields)
        return self.finish(vectors, fields.flatten(1))

    def weigh(self, terms: Tensor) -> Tensor:
        assert self.of_fields is not None
        added: Tensor = self.of_fields(terms)
        return added


class FieldAttention(nn.Module):
    """An interacting layer of AutoInt: each field is the mean of all, weighted by what a head finds alike, and added to
    what it was."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.query, self.key, self.value, self.residual = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, fields: Tensor) -> Tensor:
        query, key, value = (self._heads(layer(fields)) for layer in (self.query, self.key, self.value))
        weights = torch.matmul(query, key.transpose(2, 3)).softmax(dim=3)
        attended = torch.matmul(weights.to(value.dtype), value).transpose(1, 2).flatten(2)
        return (attended + self.residual(fields)).relu()

    def _heads(self, values: Tensor) -> Tensor:
        """Return [samples, heads, fields, numbers of a head]."""
        return values.unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2)


class FinalMLP(FieldNetwork):
    """FinalMLP (Mao 2023, https://arxiv.org/abs/2304.00902): two MLPs, each over the features that its gate
    selects, and the bilinear product of their outputs by heads.

    A gate sees the whole row, since nothing says which features are the user's and which the item's.
    """

    def __init__(self, model: ModelSpec) -> None:
        super().__init__(model)
        width, out = self.fields.width, model.top_mlp[-1]
        self.gates = nn.ModuleList(
            mlp(width, (model.embedding_dim, width), 0.0, ends_linear=True) for _ in range(2))
        self.streams = nn.ModuleList(mlp(width, model.top_mlp, model.dropout) for _ in range(2))
        self.num_heads, head_dim = model.num_heads, out // model.num_heads
        self.product = nn.Parameter(torch.empty(model.num_heads, head_dim, head_dim))
        nn.init.xavier_normal_(self.product)
        if model.tasks:
            self.make_top(model, 2 * out, num_terms=model.num_heads)
        else:
            self.top = nn.Linear(2 * out, 1)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        values, _ = self.fields(dense, pooled)
        one, other = (stream(values * (2 * gate(values).sigmoid()))
                      for gate, stream in zip(self.gates, self.streams, strict=True))
        products = torch.matmul(self._heads(one), self.product) * self._heads(other)
        return self.finish(torch.cat([one, other], dim=1), products.sum(dim=2).t())

    def _heads(self, values: Tensor) -> Tensor:
        """Return [heads, samples, numbers of a head]."""
        return values.unflatten(1, (self.num_heads, -1)).transpose(0, 1)


class MaskNet(FieldNetwork):
    """MaskNet (Wang 2021, https://arxiv.org/abs/2102.07619), the parallel one: blocks that each multiply the normalized
    vectors by a mask made of the row, and an MLP over all blocks."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__(model)
        fields, width = self.fields, self.fields.width
        rank = min(model.cross_rank, width)
        self.scale = nn.Parameter(torch.ones(fields.num_fields, fields.dim))
        self.shift = nn.Parameter(torch.zeros(fields.num_fields, fields.dim))
        self.masks = nn.ModuleList(
            mlp(width, (rank, width), 0.0, ends_linear=True) for _ in range(model.num_cross_layers))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, rank, bias=False), nn.LayerNorm(rank), nn.ReLU())
                                    for _ in range(model.num_cross_layers))
        self.make_top(model, rank * model.num_cross_layers)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        values, _ = self.fields(dense, pooled)
        fields = nn.functional.layer_norm(self.fields.apart(values).float(), (self.fields.dim,))
        normalized = (fields * self.scale + self.shift).flatten(1)
        return self.finish(torch.cat([block(normalized * mask(values))
                                      for mask, block in zip(self.masks, self.blocks, strict=True)], dim=1))


class TabM(nn.Module):
    """TabM (Gorishniy 2024, https://arxiv.org/abs/2410.24210): MLPs over numbers and vectors that share their
    matrices; each member scales the inputs of every layer, and has biases and an output of its own.

    In training it returns the logits of all members, [samples, members], whose losses are averaged; else their mean.
    """

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        sizes = (model.num_dense + sum(table.dim or 0 for table in model.table_list()), *model.top_mlp)
        num = model.num_members
        self.layers = nn.ModuleList(nn.Linear(*pair, bias=False) for pair in pairwise(sizes))
        self.scales = nn.ParameterList(torch.ones(num, width) for width in sizes[:-1])
        self.biases = nn.ParameterList(
            torch.empty(num, after).uniform_(-1, 1) / math.sqrt(width) for width, after in pairwise(sizes))
        self.outputs = nn.Parameter(torch.empty(num, sizes[-1]).uniform_(-1, 1) / math.sqrt(sizes[-1]))
        self.shift = nn.Parameter(torch.zeros(num))
        self.after = nn.ModuleList(
            ReLUWithDropout(model.dropout) if model.dropout else nn.ReLU() for _ in self.layers)
        if self.layers:  # members differ by the signs of their inputs, to begin with
            self.scales[0].data.uniform_(-1, 1).sign_()

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        values = torch.cat([dense, pooled], dim=1).unsqueeze(1)
        for layer, scale, bias, after in zip(self.layers, self.scales, self.biases, self.after, strict=True):
            values = after((layer(values * scale) + bias).flatten(1)).unflatten(1, bias.shape)
        logits = (values * self.outputs).sum(dim=2) + self.shift
        return logits if self.training else logits.mean(dim=1)


def of_members(logits: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean logit of each sample, and its loss: the mean over the losses of members, where there are any."""
    if logits.ndim == 1:
        return logits, binary_cross_entropy_with_logits(logits, label, reduction="none")
    losses = binary_cross_entropy_with_logits(logits, label.unsqueeze(1).expand_as(logits), reduction="none")
    return logits.mean(dim=1), losses.mean(dim=1)


FIELD_NETWORKS: dict[str, type[nn.Module]] = {
    "deepfm": DeepFM, "wide_deep": WideAndDeep, "xdeepfm": XDeepFM, "autoint": AutoInt, "finalmlp": FinalMLP,
    "masknet": MaskNet, "tabm": TabM,
}
