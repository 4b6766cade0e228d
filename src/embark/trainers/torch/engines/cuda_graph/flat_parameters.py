"""The dense layers in flat memory: one kernel updates them all, and one all-reduce joins their gradients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from embark.model.work import DENSE_STATES, padded
from embark.spec import TrainSpec
from embark.trainers.torch.networks.dlrm import CrossNetwork, DotNetwork
from embark.trainers.torch.optimizers import Optimizers


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of a linear layer, and where its gradients go."""

    weight: Tensor  # [out, in], both padded with zeros; rounded to what the step computes in.
    bias: Tensor | None
    grad_weight: Tensor  # Shaped like `weight`, in fp32.
    sums: Tensor | None  # [portions, out]: sums over portions of the batch that add up to the gradient of `bias`.


@dataclass(frozen=True, slots=True)
class Head:
    """The last layer, which has one output."""

    weight: Tensor  # [in], not padded.
    bias: Tensor  # [1]
    sums: Tensor  # [portions, in + 1]: sums that add up to the gradients of both.
    width: int


class FlatParameters:
    """Parameters as one tensor, with their gradients, their optimizer's state and a copy of them, rounded to what the
    step computes in.

    The module's parameters and its optimizer's state become views, so that a checkpoint sees what was trained.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], indices: Tensor, size: int, optimizers: Optimizers,
        dtype: torch.dtype, train: TrainSpec,
    ) -> None:
        """`indices` says where each value stands in gradients and copy, which have `size` values."""
        self._parameters, self._optimizers = list(parameters), optimizers
        device = self._parameters[0].device
        num_values = indices.numel()
        self.master = torch.empty(num_values, device=device)
        self.indices = indices.to(device)
        self.grads = torch.zeros(size, device=device)
        self.early_grads, self.late_grads = self.grads, self.grads[:0]
        """Gradients that are ready with those of the pooled rows, and the others: ranks add the first up meanwhile."""
        self.shadow = torch.zeros(size, device=device, dtype=dtype)
        self.state, self.second_state = (torch.zeros(num_values, device=device) for _ in range(2))
        self._max_norm = train.max_gradient_norm
        self.decays: Tensor | None = None
        """The weight decay of each value; None: there is none."""
        if train.weight_decay:
            self.decays = torch.cat([
                torch.full((p.numel(),), train.weight_decay if p.ndim > 1 else 0.0) for p in self._parameters
            ]).to(device)

    def adopt(self) -> None:
        """Take over the parameters and their optimizer's state as they are now, and replace them by views."""
        states = DENSE_STATES[self._optimizers.dense_kind]
        wrapped = self._optimizers.dense
        at = 0
        for parameter in self._parameters:
            span = slice(at, at + parameter.numel())
            self.master[span] = parameter.detach().reshape(-1)
            parameter.data = self.master[span].view(parameter.shape)
            parameter.grad = None
            for name, flat in zip(states, (self.state, self.second_state), strict=False):
                held = wrapped.state[parameter]
                flat[span] = held[name].reshape(-1)
                held[name] = flat[span].view(parameter.shape)
            at += parameter.numel()
        self.shadow[self.indices] = self.master.to(self.shadow.dtype)

    def add_up(self, do: Callable[[Tensor, Tensor], None]) -> None:
        """Sum gradients that were kept by portions of the batch."""

    def clip(self) -> None:
        """Scale the gradients down to the norm that they may have, as `torch.nn.utils.clip_grad_norm_` does."""
        if self._max_norm:
            norm = torch.linalg.vector_norm(self.grads[self.indices])
            self.grads.mul_((self._max_norm / (norm + 1e-6)).clamp(max=1.0))

    def set_count(self, num_steps: int) -> None:
        """Set the number of steps that Adagrad and Adam count in each parameter's state."""
        for held in self._optimizers.dense.state.values():
            if "step" in held:
                held["step"].fill_(float(num_steps))


class FlatDense(FlatParameters):
    """Parameters of DLRM and DLRM-DCNv2, each layer padded to what tensor cores want."""

    def __init__(
        self, network: nn.Module, optimizers: Optimizers, dtype: torch.dtype, num_portions: int, train: TrainSpec
    ) -> None:
        assert isinstance(network, DotNetwork | CrossNetwork)
        # The bottom layers last: their gradients are.
        bottom = [m for m in network.bottom or () if isinstance(m, nn.Linear)]
        linears = [m for m in network.modules() if isinstance(m, nn.Linear) and m not in bottom] + bottom
        last = network.top[-1]
        parameters = list(network.parameters())
        starts: dict[int, int] = {}
        size = 0
        for linear in linears:
            if linear is not last:
                starts[id(linear.weight)] = size
                size += padded(linear.out_features) * padded(linear.in_features)
        self._sums_start = size
        for linear in linears:
            if linear is not last and linear.bias is not None:
                starts[id(linear.bias)] = size
                size += padded(linear.out_features)
        starts[id(last.weight)] = size
        starts[id(last.bias)] = size + last.in_features
        size = padded(size + last.in_features + 1)
        indices = torch.cat([_indices(p, starts[id(p)]) for p in parameters])
        super().__init__(parameters, indices, size, optimizers, dtype, train)
        end = starts[id(bottom[0].weight)] if bottom else self._sums_start
        self.early_grads, self.late_grads = self.grads[:end], self.grads[end:]
        self.sums = torch.zeros(num_portions, size - self._sums_start, device=self.master.device)
        self.layers = {id(linear): self._layer(linear, starts) for linear in linears if linear is not last}
        begin = starts[id(last.weight)]
        width = last.in_features
        self.head = Head(
            self.shadow[begin : begin + width], self.shadow[begin + width : begin + width + 1],
            self.sums[:, begin - self._sums_start : begin - self._sums_start + width + 1], width,
        )

    def add_up(self, do: Callable[[Tensor, Tensor], None]) -> None:
        do(self.sums, self.grads[self._sums_start :])

    def _layer(self, linear: nn.Linear, starts: dict[int, int]) -> Layer:
        shape = padded(linear.out_features), padded(linear.in_features)
        begin = starts[id(linear.weight)]
        span = slice(begin, begin + shape[0] * shape[1])
        bias = sums = None
        if linear.bias is not None:
            at = starts[id(linear.bias)]
            bias = self.shadow[at : at + shape[0]]
            sums = self.sums[:, at - self._sums_start : at - self._sums_start + shape[0]]
        return Layer(self.shadow[span].view(shape), bias, self.grads[span].view(shape), sums)


def _indices(parameter: Tensor, start: int) -> Tensor:
    """Return where each value of a parameter stands in the padded layout."""
    if parameter.dim() == 1 or parameter.shape[0] == 1:
        return torch.arange(start, start + parameter.numel())
    rows, columns = parameter.shape
    return (start + torch.arange(rows)[:, None] * padded(columns) + torch.arange(columns)[None, :]).reshape(-1)
