"""Replacements for layers of a network that score faster on a GPU: bias and ReLU in the matrix product, and the dot
products of pairs in one kernel. Weights stay where they are in memory, since CUDA graphs have their addresses."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from embark.model.work import padded
from embark.spec.serve import Precision
from embark.trainers.torch.networks.dlrm import CrossNetwork, DotNetwork

MAX_VECTORS = 64  # The kernel of dot products holds no more in registers.


def fuse_layers(network: nn.Module, precision: Precision) -> torch.dtype:
    """Replace layers of DLRM or DLRM-DCNv2; return the type of the pooled rows that the network then takes.

    Any other network stays as it is.
    """
    if not isinstance(network, DotNetwork | CrossNetwork):
        return torch.float32
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    if network.bottom is not None:
        network.bottom = PaddedLayers(_linears(network.bottom), dtype)
    *hidden, last = _linears(network.top)
    network.top = nn.Sequential(PaddedLayers(hidden, dtype), ScoreLayer(last))
    if isinstance(network, CrossNetwork):
        network.down, network.up = (
            nn.ModuleList(PaddedLayers([linear], dtype, has_relu=False) for linear in _linears(layers))
            for layers in (network.down, network.up))
    elif network.num_vectors <= MAX_VECTORS:
        network.interaction = KernelInteraction(network, "tf32" if precision == "tf32" else "ieee")
    return dtype


def _linears(layers: nn.Module) -> list[nn.Linear]:
    return [layer for layer in layers.children() if isinstance(layer, nn.Linear)]


class PaddedLayers(nn.Module):
    """Linear layers one after the other, their sizes padded with zeros as tensor cores want them."""

    def __init__(self, linears: Iterable[nn.Linear], dtype: torch.dtype, *, has_relu: bool = True) -> None:
        super().__init__()
        self.multiply = torch.ops.aten._addmm_activation if has_relu else torch.addmm
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for linear in linears:
            num_out, num_in = linear.weight.shape
            weight = linear.weight.new_zeros(padded(num_out), padded(num_in), dtype=dtype)
            weight[:num_out, :num_in] = linear.weight.detach()
            bias = weight.new_zeros(padded(num_out))
            if linear.bias is not None:
                bias[:num_out] = linear.bias.detach()
            self.weights.append(nn.Parameter(weight, requires_grad=False))
            self.biases.append(nn.Parameter(bias, requires_grad=False))
            self.num_outputs = num_out

    def forward(self, values: Tensor) -> Tensor:
        if not self.weights:
            return values
        num_in = values.shape[1]
        first = self.weights[0]
        if first.shape[1] != num_in or first.dtype != values.dtype:
            unpadded, values = values, first.new_zeros(len(values), first.shape[1])
            values[:, :num_in] = unpadded
        for weight, bias in zip(self.weights, self.biases, strict=True):
            values = self.multiply(bias, values, weight.t())
        return values[:, : self.num_outputs]


class ScoreLayer(nn.Module):
    """The last layer, with one output, in float32: rounding its output would be seen in the score."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach()[0].float(), requires_grad=False)
        self.bias = nn.Parameter(linear.bias.detach().float(), requires_grad=False)

    def forward(self, values: Tensor) -> Tensor:
        return (values[:, : len(self.weight)].float() @ self.weight + self.bias)[:, None]


class KernelInteraction(nn.Module):
    """Does what `DotInteraction` does in one Triton kernel, with zeros behind the dot products as padding."""

    def __init__(self, network: DotNetwork, input_precision: str) -> None:
        super().__init__()
        self.num_vectors, self.dim, self.input_precision = network.num_vectors, network.dim, input_precision
        passed_on = self.dim if network.bottom is not None else self.dim * self.num_vectors
        self.width = padded(passed_on + self.num_vectors * (self.num_vectors - 1) // 2)

    def forward(self, bottom: Tensor | None, pooled: Tensor) -> Tensor:
        from embark.trainers.torch.engines.cuda_graph.dense_kernels import interact

        out = pooled.new_zeros(len(pooled), self.width)
        interact(bottom, pooled, out, num_vectors=self.num_vectors, dim=self.dim, input_precision=self.input_precision)
        return out
