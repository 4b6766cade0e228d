"""A network of the user's own in the captured step: autograd computes its way back, over the same buffers each time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from embark.formatting import to_one_line
from embark.model.work import DENSE_STATES
from embark.spec import RunSpec
from embark.spec.user_code import user_error
from embark.trainers.torch.engines.cuda_graph.geometry import FlatParameters
from embark.trainers.torch.engines.pipeline import EngineInputs
from embark.trainers.torch.own_model import OwnNetwork


class OwnNetworkStep:
    """What `Network` is for the built-in models: from pooled rows to logits, and from the loss to gradients."""

    def __init__(self, module: OwnNetwork, spec: RunSpec, num_samples: int, *, is_bf16: bool) -> None:
        device = next(module.parameters()).device
        self._module, self._device, self._is_bf16 = module, device, is_bf16
        self._num_global = spec.train.batch_size
        self.inputs = torch.zeros(num_samples, spec.model.num_dense, device=device)
        width = sum(t.dim or 0 for t in spec.model.table_list())
        self.pooled = torch.zeros(num_samples, width, device=device)  # fp32, as TorchRec gives them
        self.grad_pooled = torch.zeros_like(self.pooled)
        self.logits = torch.zeros(num_samples, device=device)
        self._names: list[str] = []  # Of the weights that are trained.
        self._grads: list[Tensor] = []

    @property
    def buffers(self) -> list[Tensor]:
        """Of the module, such as BatchNorm's statistics, which a forward pass changes."""
        return list(self._module.buffers())

    def flat(self, inputs: EngineInputs, dtype: torch.dtype) -> FlatParameters:
        """The weights that the loss depends on; others keep their value, and have no optimizer state."""
        with self.undone():
            grads = self.gradients(torch.zeros_like(self.logits), trainable(self._module))
        self._names = [name for name, grad in zip(trainable(self._module), grads, strict=True) if grad is not None]
        by_name = dict(self._module.named_parameters())
        used = [by_name[name] for name in self._names]
        dense = inputs.optimizers.dense
        if DENSE_STATES[inputs.optimizers.dense_kind] and not dense.state:
            ids = {id(p) for p in used}
            inputs.optimizers.init_state([f"{name}." for name, p in dense.params.items() if id(p) in ids])
        num_values = sum(p.numel() for p in used)
        flat = FlatParameters(used, torch.arange(num_values), num_values, inputs.optimizers, dtype, inputs.spec.train)
        self._grads = [part.view(p.shape) for part, p in
                       zip(flat.grads.split([p.numel() for p in used]), used, strict=True)]
        return flat

    def set_keys(self) -> None:
        """Its dropout draws from torch's generator, which a graph moves on by itself."""

    def forward_bottom(self) -> None:
        """Nothing: which of its layers need no table is not known."""

    def forward_rest(self) -> None:
        """Nothing: forward and backward are one."""

    def backward_to_pooled(self, label: Tensor) -> None:
        """Logits, and all gradients."""
        grads = self.gradients(label, self._names)
        torch._foreach_copy_(self._grads, [grad for grad in grads if grad is not None])

    def backward_bottom(self) -> None:
        """Nothing is left."""

    def check_values(self) -> None:
        """Raise where the file makes NaN of the batch in the buffers; waits for the device."""
        with self.undone(), torch.autocast(self._device.type, torch.bfloat16, enabled=self._is_bf16):
            self._module.checks_values = True
            self._module(self.inputs, self.pooled)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """What runs within leaves no trace: neither in random numbers, nor in the module's buffers."""
        kept, checks_values = [buffer.clone() for buffer in self.buffers], self._module.checks_values
        self._module.checks_values = False
        try:
            with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
                yield
        finally:
            self._module.checks_values = checks_values
            for buffer, before in zip(self.buffers, kept, strict=True):
                buffer.copy_(before)

    def gradients(self, label: Tensor, names: list[str]) -> list[Tensor | None]:
        """Of the weights of these names; those of the pooled rows go into their buffer.

        Each time of new leaves over the weights' memory: `DistributedDataParallel` keeps those of the parameters
        themselves on the stream that it was made on, and a capture may not wait for another.
        """
        from torch.func import functional_call

        parameters = dict(self._module.named_parameters())
        with torch.enable_grad():
            weights = {name: parameters[name].detach().requires_grad_() for name in names}
            pooled = self.pooled.detach().requires_grad_()
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._is_bf16):
                logits = functional_call(self._module, weights, (self.inputs, pooled)).float()
            loss = binary_cross_entropy_with_logits(logits, label, reduction="sum") / self._num_global
            of_pooled, *grads = torch.autograd.grad(loss, [pooled, *weights.values()], allow_unused=True)
        self.logits.copy_(logits.detach())
        if of_pooled is not None:
            self.grad_pooled.copy_(of_pooled)
        return list(grads)


def trainable(module: nn.Module) -> list[str]:
    """The names of its weights that have gradients."""
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


def why_not_captured(inputs: EngineInputs) -> str:
    """Capture forward and backward once, on a GPU; why that fails, or nothing. Weights and random numbers stay."""
    spec, device = inputs.spec, inputs.world.device
    assert isinstance(inputs.dense, OwnNetwork)
    step = OwnNetworkStep(inputs.dense, spec, spec.train.batch_size // inputs.world.world_size,
                          is_bf16=inputs.precision == "bf16")
    names, label = trainable(inputs.dense), torch.zeros_like(step.logits)

    def run() -> None:
        step.gradients(label, names)

    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with step.undone():
            with torch.cuda.stream(stream):
                run()
                _without_waiting(run)
            stream.synchronize()
            _try_capture(run, stream)
    except Exception as error:
        reason = user_error(error)
        said = reason.what if reason else to_one_line(str(error).strip().partition("\n")[0])
        return f"{spec.model.kind} cannot be captured: {said}"
    finally:
        torch.cuda.current_stream(device).wait_stream(stream)
    return ""


def _without_waiting(run: Callable[[], None]) -> None:
    """Raises at what would wait for the device: in a capture, that ends it, and no line would be named."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode(mode)


_failed: list[Any] = []  # Graphs whose capture failed: the allocator may still ask them.


def _try_capture(run: Callable[[], None], stream: torch.cuda.Stream) -> None:
    """Torch does not clean up after a capture that CUDA ends: generator, current stream, the allocator's pool."""
    device = stream.device_index
    generator, before = torch.cuda.default_generators[device], torch.cuda.current_stream(device)
    state = generator.graphsafe_get_state()
    generator.graphsafe_set_state(generator.clone_state())
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    first: Exception | None = None
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            try:
                run()
            except Exception as error:
                first = error
                raise
    except Exception as error:
        if error is not first:
            _failed.append(graph)
            with suppress(RuntimeError):  # nothing is left to end
                torch._C._cuda_endAllocateToPool(device, pool)
        raise first or error from None
    finally:
        torch.cuda.set_stream(before)
        generator.graphsafe_set_state(state)
