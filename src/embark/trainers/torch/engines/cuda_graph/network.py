"""The dense network's way there and back, written out over fixed buffers: nothing is made while it runs."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from embark.model.work import padded
from embark.trainers.torch.dense_network import CrossNetwork, DotNetwork
from embark.trainers.torch.dropout import ReLUWithDropout, drop
from embark.trainers.torch.engines.cuda_graph.geometry import FlatDense, Layer
from embark.trainers.torch.engines.cuda_graph.ops import TorchOps
from embark.trainers.torch.engines.cuda_graph.streams import Beside


class Dropout:
    """Of a hidden layer's output, by a key that the host sets before each step."""

    def __init__(self, module: ReLUWithDropout, num_units: int, device: torch.device) -> None:
        self._module, self._num_units = module, num_units
        self._key = torch.zeros((), dtype=torch.int64, device=device)

    def set_key(self) -> None:
        self._key.fill_(self._module.key)

    def forward(self, values: Tensor) -> None:
        units = values[:, : self._num_units]  # without what it is padded with
        units.copy_(drop(units, self._module.dropout, self._key, self._module.first_sample))

    def backward(self, *grads: Tensor) -> None:
        """What was dropped is zero, as what a ReLU holds back, and its way back is the ReLU's."""
        for grad in grads:
            grad.div_(1 - self._module.dropout)


class Network:
    """From dense features and pooled rows to logits, and from the loss to the gradients of both."""

    pooled: Tensor  # [B, sum of widths]: filled before `forward`.
    grad_pooled: Tensor  # The same of gradients: there after `backward`.

    def __init__(
        self, module: nn.Module, flat: FlatDense, ops: TorchOps, num_samples: int, num_global: int, beside: Beside
    ) -> None:
        assert isinstance(module, DotNetwork | CrossNetwork)
        self._flat, self._ops, self._beside = flat, ops, beside
        self._num_samples, self._num_global = num_samples, num_global
        self._device, self._dtype = flat.master.device, flat.shadow.dtype
        bottom = [m for m in (module.bottom or ()) if isinstance(m, nn.Linear)]
        self._bottom = [self._layer(m) for m in bottom]
        top = [m for m in module.top if isinstance(m, nn.Linear)][:-1]
        self._top = [self._layer(m) for m in top]
        self._bottom_dropouts, self._top_dropouts = (self._dropouts(mlp) for mlp in (module.bottom, module.top))
        self.inputs = self._buffer(padded(bottom[0].in_features)) if bottom else self._buffer(0)
        """[B, num_dense, padded]: filled before `forward`."""
        self._bottom_values = [self._buffer(layer.weight.shape[0]) for layer in self._bottom]
        self._bottom_grads = [self._buffer(layer.weight.shape[0]) for layer in self._bottom]
        self._top_values = [self._buffer(layer.weight.shape[0]) for layer in self._top]
        self._top_grads = [self._buffer(layer.weight.shape[0]) for layer in self._top]
        self.logits = torch.zeros(num_samples, device=self._device)
        self._middle = _Dots(self, module) if isinstance(module, DotNetwork) else _Crosses(self, module)
        self.pooled, self.grad_pooled = self._middle.pooled, self._middle.grad_pooled
        self._no_sums = torch.zeros(self._ops.num_portions(num_samples), self._middle.out.shape[1], device=self._device)

    def forward(self) -> None:
        """As far as the input of the last layer; `pooled` is first needed behind the bottom layers."""
        self.forward_bottom()
        self.forward_rest()

    def set_keys(self) -> None:
        """Of what the next step drops."""
        for dropout in (*self._bottom_dropouts.values(), *self._top_dropouts.values()):
            dropout.set_key()

    def forward_bottom(self) -> None:
        """What needs no table."""
        self._forward(self.inputs, self._bottom, self._bottom_values, self._bottom_dropouts)

    def forward_rest(self) -> None:
        """From the pooled rows on."""
        self._middle.forward()
        self._forward(self._middle.out, self._top, self._top_values, self._top_dropouts)

    def _forward(
        self, values: Tensor, layers: list[Layer], outs: list[Tensor], dropouts: dict[int, Dropout]
    ) -> None:
        for at, (layer, out) in enumerate(zip(layers, outs, strict=True)):
            self._ops.linear_relu(values, layer, out)
            if at in dropouts:
                dropouts[at].forward(out)
            values = out

    def backward_to_pooled(self, label: Tensor) -> None:
        """Logits, the loss's gradient, and back until the gradient of the pooled rows is there."""
        values = [self._middle.out, *self._top_values]
        grads = [self._middle.grad_out, *self._top_grads]
        sums = _sums(self._top[-1]) if self._top else self._no_sums
        self._ops.head(values[-1], self._flat.head, label, self.logits, grads[-1], sums,
                       num_global=self._num_global, has_relu=bool(self._top))
        if self._top_dropouts:
            self._top_dropouts[len(self._top) - 1].backward(grads[-1], sums)
        for at in range(len(self._top) - 1, -1, -1):
            layer = self._top[at]
            with self._beside():
                self._ops.grad_weight(grads[at + 1], values[at], layer)
            if at and not self._top_dropouts:
                self._ops.grad_input_relu(grads[at + 1], layer, values[at], grads[at], _sums(self._top[at - 1]))
                continue
            self._ops.grad_input(grads[at + 1], layer, grads[at])
            if at:
                self._top_dropouts[at - 1].backward(grads[at])
                self._ops.relu_backward(grads[at], values[at], _sums(self._top[at - 1]))
        self._middle.backward()

    def backward_bottom(self) -> None:
        """The rest of the way, which the tables do not wait for."""
        values = [self.inputs, *self._bottom_values]
        last = len(self._bottom) - 1
        for at in range(last, -1, -1):
            layer, grad = self._bottom[at], self._bottom_grads[at]
            if at in self._bottom_dropouts:
                self._bottom_dropouts[at].backward(grad)
            if at == last or self._bottom_dropouts:
                self._ops.relu_backward(grad, values[at + 1], _sums(layer))
            with self._beside():
                self._ops.grad_weight(grad, values[at], layer)
            if at and self._bottom_dropouts:
                self._ops.grad_input(grad, layer, self._bottom_grads[at - 1])
            elif at:
                self._ops.grad_input_relu(grad, layer, values[at], self._bottom_grads[at - 1],
                                          _sums(self._bottom[at - 1]))

    @property
    def bottom_out(self) -> Tensor | None:
        return self._bottom_values[-1] if self._bottom else None

    @property
    def bottom_grad(self) -> Tensor | None:
        return self._bottom_grads[-1] if self._bottom else None

    def _layer(self, linear: nn.Linear) -> Layer:
        return self._flat.layers[id(linear)]

    def _dropouts(self, mlp: nn.Module | None) -> dict[int, Dropout]:
        """By the place of the layer whose output they thin out: every hidden one's, or none's."""
        layers: list[Any] = [m for m in mlp.children() if isinstance(m, nn.Linear)] if mlp is not None else []
        found = [m for m in mlp.children() if isinstance(m, ReLUWithDropout)] if mlp is not None else []
        return {at: Dropout(one, layers[at].out_features, self._device) for at, one in enumerate(found)}

    def _buffer(self, width: int) -> Tensor:
        return torch.zeros(self._num_samples, width, device=self._device, dtype=self._dtype)


class _Dots:
    """DLRM's middle: dots of all pairs of vectors."""

    def __init__(self, network: Network, module: DotNetwork) -> None:
        self._network, self._dim, self._num_vectors = network, module.dim, module.num_vectors
        self.pooled = network._buffer((module.num_vectors - (module.bottom is not None)) * module.dim)
        self.grad_pooled = torch.zeros_like(self.pooled)
        first: Any = next(m for m in module.top if isinstance(m, nn.Linear))
        self.out = network._buffer(padded(first.in_features))
        self.grad_out = torch.zeros_like(self.out)

    def forward(self) -> None:
        self._network._ops.interact(
            self._network.bottom_out, self.pooled, self.out, num_vectors=self._num_vectors, dim=self._dim
        )

    def backward(self) -> None:
        self._network._ops.interact_backward(
            self._network.bottom_out, self.pooled, self.grad_out, self._network.bottom_grad, self.grad_pooled,
            num_vectors=self._num_vectors, dim=self._dim,
        )


class _Crosses:
    """DCNv2's middle: each cross layer multiplies the first vector by a low-rank view of the last."""

    def __init__(self, network: Network, module: CrossNetwork) -> None:
        self._network = network
        self._down = [network._layer(m) for m in module.down if isinstance(m, nn.Linear)]
        self._up = [network._layer(m) for m in module.up if isinstance(m, nn.Linear)]
        width: int = module.down[0].in_features
        self._dim = module.bottom[-2].out_features if module.bottom is not None else 0
        wide = padded(width)
        self._values = [network._buffer(wide) for _ in range(len(self._down) + 1)]
        self._narrow = [network._buffer(layer.weight.shape[0]) for layer in self._down]
        self._raised = [network._buffer(wide) for _ in self._down]
        self._grad_first, self._last_grad_up, self._grad_up = (network._buffer(wide) for _ in range(3))
        self._grad_narrow = [torch.zeros_like(narrow) for narrow in self._narrow]
        self.pooled = self._values[0][:, self._dim : width]
        self.grad_pooled = self._grad_first[:, self._dim : width]
        self.out, self.grad_out = self._values[-1], network._buffer(wide)

    def forward(self) -> None:
        ops, first = self._network._ops, self._values[0]
        if (bottom := self._network.bottom_out) is not None:
            first[:, : self._dim] = bottom[:, : self._dim]
        for at, (down, up) in enumerate(zip(self._down, self._up, strict=True)):
            ops.linear(self._values[at], down, self._narrow[at])
            ops.linear(self._narrow[at], up, self._raised[at])
            ops.cross(first, self._raised[at], self._values[at], self._values[at + 1])

    def backward(self) -> None:
        ops, beside, first = self._network._ops, self._network._beside, self._values[0]
        for at in range(len(self._down) - 1, -1, -1):
            down, up, is_last = self._down[at], self._up[at], at == len(self._down) - 1
            grad_up = self._last_grad_up if is_last else self._grad_up
            ops.cross_backward(self.grad_out, first, self._raised[at], grad_up, self._grad_first, _sums(up),
                               is_first_call=is_last, is_last_call=at == 0)
            with beside() if is_last else nullcontext():  # the others' is overwritten by the next layer's
                ops.grad_weight(grad_up, self._narrow[at], up)
            ops.grad_input(grad_up, up, self._grad_narrow[at])
            with beside():
                ops.grad_weight(self._grad_narrow[at], self._values[at], down)
            ops.add_grad_input(self._grad_narrow[at], down, self.grad_out if at else self._grad_first)
        if (to_bottom := self._network.bottom_grad) is not None:
            to_bottom[:, : self._dim] = self._grad_first[:, : self._dim]


def _sums(layer: Layer) -> Tensor:
    assert layer.sums is not None
    return layer.sums
