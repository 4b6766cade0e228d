"""The dense network's forward pass on a GPU: bias and ReLU in the matrix product, dots of pairs in one kernel."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from embark.model.work import padded
from embark.spec.serve import Precision
from embark.trainers.torch.dense_network import CrossNetwork, DotNetwork, PairwiseDots

MAX_VECTORS = 64  # Of the kernel that makes the dots.
FillPooled = Callable[[Tensor], None]
"""Writes the pooled rows of all tables into a tensor [n, width]."""


class Forward(Protocol):
    """A forward pass whose weights stay where they are in memory: CUDA graphs have their addresses."""

    def __call__(self, dense: Tensor, fill: FillPooled) -> Tensor:
        """From dense features [n, D] in float32, and what fills in the pooled rows, to logits [n] in float32."""

    def weights(self) -> list[Tensor]:
        """In an order that is the same for every version of a model."""


@dataclass(frozen=True, slots=True)
class _Layer:
    weight: Tensor  # [out, in], both padded with zeros: TF32 wants it so.
    bias: Tensor  # [out]


def gpu_forward(module: nn.Module, width: int, device: torch.device, precision: Precision, *, kernels: bool) -> Forward:
    """Of any dense network; `width` is that of the pooled rows of all tables. Without `kernels` all is plain torch."""
    if isinstance(module, DotNetwork):
        return _Dots(module, device, precision, kernels=kernels)
    if isinstance(module, CrossNetwork):
        return _Crosses(module, device, precision)
    return _Own(module, width, device, precision)


class _BuiltIn:
    """What both kinds of built-in models have: layers below and above, a last one with one output."""

    def __init__(self, module: DotNetwork | CrossNetwork, device: torch.device, precision: Precision) -> None:
        self._device, self._dtype = device, torch.bfloat16 if precision == "bf16" else torch.float32
        bottom = [m for m in module.bottom if isinstance(m, nn.Linear)] if module.bottom is not None else []
        self._num_dense = bottom[0].in_features if bottom else 0
        self._bottom = [self._layer(one) for one in bottom]
        *top, last = (m for m in module.top if isinstance(m, nn.Linear))
        self._top = [self._layer(one) for one in top]
        self._num_last = last.in_features
        self._last_weight, self._last_bias = (one.detach().to(device, torch.float32) for one in (
            last.weight[0], last.bias))

    def weights(self) -> list[Tensor]:
        layers = [*self._bottom, *self._top, *self._crosses()]
        return [*(one for layer in layers for one in (layer.weight, layer.bias)), self._last_weight, self._last_bias]

    def _crosses(self) -> list[_Layer]:
        """Those between the layers below and above."""
        return []

    def _layer(self, linear: nn.Linear) -> _Layer:
        num_in, num_out = linear.in_features, linear.out_features
        weight = torch.zeros(padded(num_out), padded(num_in), device=self._device, dtype=self._dtype)
        bias = torch.zeros(padded(num_out), device=self._device, dtype=self._dtype)
        weight[:num_out, :num_in] = linear.weight.detach().to(self._device)
        if linear.bias is not None:
            bias[:num_out] = linear.bias.detach().to(self._device)
        return _Layer(weight, bias)

    def _below(self, dense: Tensor) -> Tensor | None:
        if not self._bottom:
            return None
        values = self._zeros(len(dense), padded(self._num_dense))
        values[:, : self._num_dense] = dense
        return _relu_layers(values, self._bottom)

    def _above(self, values: Tensor) -> Tensor:
        """The last layer is in float32: rounding its output would be seen in the score."""
        values = _relu_layers(values, self._top)
        return values[:, : self._num_last].float() @ self._last_weight + self._last_bias

    def _zeros(self, num_rows: int, width: int) -> Tensor:
        return torch.zeros(num_rows, width, device=self._device, dtype=self._dtype)


def _relu_layers(values: Tensor, layers: list[_Layer]) -> Tensor:
    for layer in layers:
        values = torch.ops.aten._addmm_activation(layer.bias, values, layer.weight.t())
    return values


class _Dots(_BuiltIn):
    """DLRM."""

    def __init__(self, module: DotNetwork, device: torch.device, precision: Precision, *, kernels: bool) -> None:
        super().__init__(module, device, precision)
        self._num_vectors, self._dim = module.num_vectors, module.dim
        first = next(m for m in module.top if isinstance(m, nn.Linear))
        self._out_width = padded(first.in_features)
        self._dots = PairwiseDots(module.num_vectors, device)
        self._input_precision = "tf32" if precision == "tf32" else "ieee"
        self._has_kernel = kernels and module.num_vectors <= MAX_VECTORS

    def __call__(self, dense: Tensor, fill: FillPooled) -> Tensor:
        num_rows, bottom = len(dense), self._below(dense)
        pooled = torch.empty(num_rows, (self._num_vectors - bool(self._bottom)) * self._dim, device=self._device,
                             dtype=self._dtype)
        fill(pooled)
        return self._above(self._passed_on_and_dots(bottom, pooled))

    def _passed_on_and_dots(self, bottom: Tensor | None, pooled: Tensor) -> Tensor:
        out = self._zeros(len(pooled), self._out_width)
        if self._has_kernel:
            from embark.trainers.torch.engines.cuda_graph.dense_kernels import interact

            interact(bottom, pooled, out, num_vectors=self._num_vectors, dim=self._dim,
                     input_precision=self._input_precision)
            return out
        vectors = pooled if bottom is None else torch.cat([bottom[:, : self._dim], pooled], dim=1)
        passed_on = pooled.shape[1] if bottom is None else self._dim
        dots = self._dots(vectors.view(-1, self._num_vectors, self._dim))
        out[:, :passed_on] = vectors[:, :passed_on]
        out[:, passed_on : passed_on + dots.shape[1]] = dots
        return out


class _Crosses(_BuiltIn):
    """DLRM-DCNv2."""

    def __init__(self, module: CrossNetwork, device: torch.device, precision: Precision) -> None:
        super().__init__(module, device, precision)
        self._down, self._up = ([self._layer(m) for m in part if isinstance(m, nn.Linear)]
                                for part in (module.down, module.up))
        first = next(m for m in module.top if isinstance(m, nn.Linear))
        self._width = first.in_features
        self._num_below = [m for m in module.bottom if isinstance(m, nn.Linear)][-1].out_features \
            if module.bottom is not None else 0

    def _crosses(self) -> list[_Layer]:
        return [*self._down, *self._up]

    def __call__(self, dense: Tensor, fill: FillPooled) -> Tensor:
        first, bottom = self._zeros(len(dense), padded(self._width)), self._below(dense)
        if bottom is not None:
            first[:, : self._num_below] = bottom[:, : self._num_below]
        fill(first[:, self._num_below : self._width])
        crossed = first
        for down, up in zip(self._down, self._up, strict=True):
            raised = torch.addmm(up.bias, torch.mm(crossed, down.weight.t()), up.weight.t())
            crossed = torch.addcmul(crossed, first, raised)
        return self._above(crossed)


class _Own:
    """A module of the user's own, as it is; in bf16 by autocast, as it is trained."""

    def __init__(self, module: nn.Module, width: int, device: torch.device, precision: Precision) -> None:
        self._module, self._width, self._device = module.to(device), width, device
        self._is_bf16 = precision == "bf16"

    def weights(self) -> list[Tensor]:
        return list(self._module.state_dict().values())

    def __call__(self, dense: Tensor, fill: FillPooled) -> Tensor:
        pooled = torch.empty(len(dense), self._width, device=self._device)
        fill(pooled)
        # Without its cache: that would hold tensors of a graph's memory.
        with torch.autocast(self._device.type, torch.bfloat16, cache_enabled=False) if self._is_bf16 else nullcontext():
            logits: Tensor = self._module(dense, pooled)
        return logits.float()
