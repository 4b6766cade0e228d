"""The operations of a step, in plain torch for any device, and in Triton and cuBLAS for a GPU in bf16."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from . import FEW_SAMPLES
from .flat_parameters import Head, Layer

Fork = Callable[[], AbstractContextManager[Any]]
"""Opens a branch of work that the rest of the step does not wait for."""


class TorchOps:
    """Operations in plain torch: the reference, and what runs on a CPU and in fp32.

    Every operation writes into existing buffers, since a graph replays addresses.
    """

    def num_portions(self, num_samples: int) -> int:
        """Number of portions that sums over the batch are split into."""
        return 1

    def linear_relu(self, values: Tensor, layer: Layer, out: Tensor) -> None:
        self.linear(values, layer, out)
        out.relu_()

    def linear(self, values: Tensor, layer: Layer, out: Tensor) -> None:
        if layer.bias is None:
            torch.mm(values, layer.weight.t(), out=out)
        else:
            torch.addmm(layer.bias, values, layer.weight.t(), out=out)

    def grad_weight(self, grad: Tensor, values: Tensor, layer: Layer) -> None:
        if grad.dtype == torch.float32:
            torch.mm(grad.t(), values, out=layer.grad_weight)
        elif grad.device.type == "cuda":
            torch.mm(grad.t(), values, out_dtype=torch.float32, out=layer.grad_weight)
        else:
            layer.grad_weight.copy_(torch.mm(grad.t(), values))

    def grad_input(self, grad: Tensor, layer: Layer, out: Tensor) -> None:
        torch.mm(grad, layer.weight, out=out)

    def grad_input_relu(self, grad: Tensor, layer: Layer, active: Tensor, out: Tensor, sums: Tensor) -> None:
        """Compute the gradient of the layer before, behind its ReLU."""
        self.grad_input(grad, layer, out)
        self.relu_backward(out, active, sums)

    def add_grad_input(self, grad: Tensor, layer: Layer, to: Tensor) -> None:
        to.addmm_(grad, layer.weight)

    def relu_backward(self, grad: Tensor, active: Tensor | None, sums: Tensor) -> None:
        if active is not None:
            grad.mul_(active > 0)
        torch.sum(grad, 0, dtype=torch.float32, out=sums[0])

    def add_up(self, sums: Tensor, out: Tensor) -> None:
        """Sum over the portions."""
        torch.sum(sums, 0, out=out)

    def interact(self, bottom: Tensor | None, pooled: Tensor, out: Tensor, *, num_vectors: int, dim: int) -> None:
        vectors = _vectors(bottom, pooled, num_vectors, dim)
        passed_on = dim if bottom is not None else num_vectors * dim
        first, second = torch.triu_indices(num_vectors, num_vectors, 1, device=out.device)
        out[:, :passed_on] = vectors.flatten(1)[:, :passed_on]
        out[:, passed_on : passed_on + len(first)] = torch.bmm(vectors, vectors.mT)[:, first, second]

    def interact_backward(
        self, bottom: Tensor | None, pooled: Tensor, grad: Tensor, grad_bottom: Tensor | None, grad_pooled: Tensor,
        *, num_vectors: int, dim: int,
    ) -> None:
        vectors = _vectors(bottom, pooled, num_vectors, dim)
        passed_on = dim if bottom is not None else num_vectors * dim
        first, second = torch.triu_indices(num_vectors, num_vectors, 1, device=grad.device)
        cells = grad.new_zeros(len(grad), num_vectors, num_vectors)
        cells[:, first, second] = grad[:, passed_on : passed_on + len(first)]
        back = torch.bmm(cells + cells.mT, vectors).flatten(1)
        back[:, :passed_on] += grad[:, :passed_on]
        if grad_bottom is not None:
            grad_bottom[:, :dim] = back[:, :dim]
            back = back[:, dim:]
        grad_pooled.copy_(back)

    def head(
        self, active: Tensor, head: Head, label: Tensor, logits: Tensor, grad: Tensor, grad_sums: Tensor,
        *, num_global: int, has_relu: bool,
    ) -> None:
        heights = active[:, : head.width].float()
        weight = head.weight.float()
        torch.add(heights @ weight, head.bias.float(), out=logits)
        slope = (logits.sigmoid() - label) / num_global
        back = slope[:, None] * weight
        if has_relu:
            back *= heights > 0
        grad[:, : head.width] = back
        torch.sum(grad, 0, dtype=torch.float32, out=grad_sums[0])
        head.sums[0, :-1] = slope @ heights
        head.sums[0, -1] = slope.sum()

    def cross(self, first: Tensor, up: Tensor, crossed: Tensor, out: Tensor) -> None:
        torch.addcmul(crossed, first, up, out=out)

    def cross_backward(
        self, grad: Tensor, first: Tensor, up: Tensor, grad_up: Tensor, grad_first: Tensor, sums: Tensor,
        *, is_first_call: bool, is_last_call: bool,
    ) -> None:
        """The last call adds the gradient itself: the first layer's input is also the vector that all multiply."""
        torch.mul(grad, first, out=grad_up)
        torch.sum(grad_up, 0, dtype=torch.float32, out=sums[0])
        if is_first_call:
            torch.mul(grad, up, out=grad_first)
        else:
            grad_first.addcmul_(grad, up)
        if is_last_call:
            grad_first.add_(grad)

    def optimizer_step(
        self, master: Tensor, indices: Tensor, grads: Tensor, shadow: Tensor, state: Tensor, second_state: Tensor,
        rates: Tensor, step: Tensor, decays: Tensor | None, *, optimizer: str, eps: float,
    ) -> None:
        """Update all parameters; `decays` is the weight decay of each value."""
        grad, rate = grads[indices], rates[0]
        kept = master if decays is None else master * (1 - rate * decays)
        if optimizer == "adagrad":
            state.addcmul_(grad, grad)
            change = rate * grad / (state.sqrt() + eps)
        elif optimizer == "adam":
            count = (step + 1).double()
            state.lerp_(grad, 0.1)
            second_state.mul_(0.999).addcmul_(grad, grad, value=0.001)
            first_share, second_share = (1 - 0.9**count).float(), (1 - 0.999**count).float()
            change = rate * (state / first_share) / ((second_state / second_share).sqrt() + eps)
        else:
            change = rate * grad
        master.copy_(torch.where(rate == 0, master, kept - change))
        shadow[indices] = master.to(shadow.dtype)


def gpu_ops() -> TorchOps:
    """Return the operations of Triton's kernels, with cuBLAS for the matrix products."""
    from . import dense_kernels as kernels

    class GpuOps(TorchOps):
        num_portions = staticmethod(kernels.num_portions)
        relu_backward = staticmethod(kernels.relu_backward)
        add_up = staticmethod(kernels.add_up)
        cross = staticmethod(kernels.cross)
        cross_backward = staticmethod(kernels.cross_backward)
        optimizer_step = staticmethod(kernels.optimizer_step)

        def linear_relu(self, values: Tensor, layer: Layer, out: Tensor) -> None:
            # cuBLAS adds the bias and takes the ReLU on the way out.
            torch.ops.aten._addmm_activation.out(layer.bias, values, layer.weight.t(), out=out)

        def grad_input_relu(self, grad: Tensor, layer: Layer, active: Tensor, out: Tensor, sums: Tensor) -> None:
            if kernels.HAS_TMA and len(out) <= kernels.MAX_SAMPLES:
                kernels.grad_input_relu_tma(grad, layer.weight, active, out, sums)
            elif len(out) <= FEW_SAMPLES:
                kernels.grad_input_relu(grad, layer.weight, active, out, sums)
            else:
                super().grad_input_relu(grad, layer, active, out, sums)

        def interact(self, bottom: Tensor | None, pooled: Tensor, out: Tensor, *, num_vectors: int, dim: int) -> None:
            do = kernels.interact if num_vectors <= kernels.MAX_VECTORS else super().interact
            do(bottom, pooled, out, num_vectors=num_vectors, dim=dim)

        def interact_backward(
            self, bottom: Tensor | None, pooled: Tensor, grad: Tensor, grad_bottom: Tensor | None,
            grad_pooled: Tensor, *, num_vectors: int, dim: int,
        ) -> None:
            do = kernels.interact_backward if num_vectors <= kernels.MAX_VECTORS else super().interact_backward
            do(bottom, pooled, grad, grad_bottom, grad_pooled, num_vectors=num_vectors, dim=dim)

        def head(
            self, active: Tensor, head: Head, label: Tensor, logits: Tensor, grad: Tensor, grad_sums: Tensor,
            *, num_global: int, has_relu: bool,
        ) -> None:
            kernels.head(active, head.weight, head.bias, label, logits, grad, head.sums, grad_sums, width=head.width,
                         num_global=num_global, has_relu=has_relu)

    return GpuOps()


def _vectors(bottom: Tensor | None, pooled: Tensor, num_vectors: int, dim: int) -> Tensor:
    if bottom is None:
        return pooled.reshape(-1, num_vectors, dim)
    return torch.cat([bottom[:, :dim], pooled], dim=1).view(-1, num_vectors, dim)
