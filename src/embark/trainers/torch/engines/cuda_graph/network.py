"""The dense network in the captured step: forward and backward over fixed buffers, which nothing allocates while it
runs.

The layers, their order and the interaction are those of the module of `networks`, which the tests compare it with.
Custom networks and those over fields go back by autograd.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from embark.formatting import to_one_line
from embark.model.work import DENSE_STATES, padded
from embark.spec import RunSpec
from embark.spec.user_code import user_error
from embark.trainers.torch.engines.pipeline import EngineInputs
from embark.trainers.torch.networks.custom_model import CustomNetwork
from embark.trainers.torch.networks.dlrm import CrossNetwork, DotNetwork
from embark.trainers.torch.networks.field_networks import of_members
from embark.trainers.torch.networks.jagged import JaggedSequence
from embark.trainers.torch.networks.layers import ReLUWithDropout, SequenceDropout, drop
from embark.trainers.torch.task_metrics import weighted_loss
from .batch_layout import SequenceLayout, pooled_tables
from .flat_parameters import FlatDense, FlatParameters, Layer
from .ops import Fork, TorchOps


class Dropout:
    """Dropout of a hidden layer's output, by a key that the host sets before each step."""

    def __init__(self, module: ReLUWithDropout, num_units: int, device: torch.device) -> None:
        self._module, self._num_units = module, num_units
        self._key = torch.zeros((), dtype=torch.int64, device=device)

    def set_key(self) -> None:
        self._key.fill_(self._module.key)

    def forward(self, values: Tensor) -> None:
        units = values[:, : self._num_units]  # without what it is padded with
        units.copy_(drop(units, self._module.dropout, self._key, self._module.first_sample))

    def backward(self, *grads: Tensor) -> None:
        """Scale gradients. What was dropped is zero, and the ReLU's backward pass holds it back."""
        for grad in grads:
            grad.div_(1 - self._module.dropout)


class Network:
    """Computes logits from dense features and pooled rows, and the gradients of both from the loss."""

    pooled: Tensor  # [B, sum of widths]: filled before `forward`.
    grad_pooled: Tensor  # Gradients of `pooled`: there after `backward`.

    def __init__(
        self, module: nn.Module, flat: FlatDense, ops: TorchOps, num_samples: int, num_global: int, fork: Fork
    ) -> None:
        assert isinstance(module, DotNetwork | CrossNetwork)
        self._flat, self._ops, self._fork = flat, ops, fork
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

    def set_keys(self) -> None:
        """Choose what the next step drops."""
        for dropout in (*self._bottom_dropouts.values(), *self._top_dropouts.values()):
            dropout.set_key()

    def forward_bottom(self) -> None:
        """Compute the layers that need no table."""
        self._forward(self.inputs, self._bottom, self._bottom_values, self._bottom_dropouts)

    def forward_rest(self) -> None:
        """Compute the layers from the pooled rows on."""
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

    def backward_to_pooled(self, label: Tensor, ids: Tensor) -> None:
        """Compute logits, the loss's gradient, and all gradients down to that of the pooled rows."""
        values = [self._middle.out, *self._top_values]
        grads = [self._middle.grad_out, *self._top_grads]
        sums = _sums(self._top[-1]) if self._top else self._no_sums
        self._ops.head(values[-1], self._flat.head, label, self.logits, grads[-1], sums,
                       num_global=self._num_global, has_relu=bool(self._top))
        if self._top_dropouts:
            self._top_dropouts[len(self._top) - 1].backward(grads[-1], sums)
        for at in range(len(self._top) - 1, -1, -1):
            layer = self._top[at]
            with self._fork():
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
        """Compute the gradients of the bottom layers, which the tables do not wait for."""
        values = [self.inputs, *self._bottom_values]
        last = len(self._bottom) - 1
        for at in range(last, -1, -1):
            layer, grad = self._bottom[at], self._bottom_grads[at]
            if at in self._bottom_dropouts:
                self._bottom_dropouts[at].backward(grad)
            if at == last or self._bottom_dropouts:
                self._ops.relu_backward(grad, values[at + 1], _sums(layer))
            with self._fork():
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
        """Return the dropouts by the index of the layer before: after every hidden layer, or after none."""
        layers: list[Any] = [m for m in mlp.children() if isinstance(m, nn.Linear)] if mlp is not None else []
        found = [m for m in mlp.children() if isinstance(m, ReLUWithDropout)] if mlp is not None else []
        return {at: Dropout(one, layers[at].out_features, self._device) for at, one in enumerate(found)}

    def _buffer(self, width: int) -> Tensor:
        return torch.zeros(self._num_samples, width, device=self._device, dtype=self._dtype)


class _Dots:
    """DLRM's interaction: dots of all pairs of vectors."""

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
    """DCNv2's interaction: each cross layer multiplies the first vector by a low-rank view of the last."""

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
        ops, fork, first = self._network._ops, self._network._fork, self._values[0]
        for at in range(len(self._down) - 1, -1, -1):
            down, up, is_last = self._down[at], self._up[at], at == len(self._down) - 1
            grad_up = self._last_grad_up if is_last else self._grad_up
            ops.cross_backward(self.grad_out, first, self._raised[at], grad_up, self._grad_first, _sums(up),
                               is_first_call=is_last, is_last_call=at == 0)
            with fork() if is_last else nullcontext():  # the others' is overwritten by the next layer's
                ops.grad_weight(grad_up, self._narrow[at], up)
            ops.grad_input(grad_up, up, self._grad_narrow[at])
            with fork():
                ops.grad_weight(self._grad_narrow[at], self._values[at], down)
            ops.add_grad_input(self._grad_narrow[at], down, self.grad_out if at else self._grad_first)
        if (to_bottom := self._network.bottom_grad) is not None:
            to_bottom[:, : self._dim] = self._grad_first[:, : self._dim]


def _sums(layer: Layer) -> Tensor:
    assert layer.sums is not None
    return layer.sums


class AutogradNetwork:
    """Replaces `Network` for all but DLRM and DLRM-DCNv2 of one task: autograd computes gradients, over fixed
    buffers."""

    def __init__(self, inputs: EngineInputs, num_samples: int) -> None:
        """`num_samples` includes sampled negatives."""
        module, spec = inputs.dense, inputs.spec
        tables = pooled_tables(spec.model)
        device = next(module.parameters()).device
        self._module, self._device, self._is_bf16 = module, device, inputs.precision == "bf16"
        self._tasks, self._num_ranks = list(spec.model.tasks), inputs.world.world_size
        self._softmax: Any = inputs.model.module.softmax if spec.model.kind == "two_tower" else None
        self._num_positives = spec.train.batch_size // self._num_ranks  # Samples that are no sampled negatives.
        self.inputs = torch.zeros(num_samples, spec.model.num_dense, device=device)
        width = sum(t.dim or 0 for t in tables)
        self.pooled = torch.zeros(num_samples, width, device=device)  # fp32, as TorchRec gives them
        self.grad_pooled = torch.zeros_like(self.pooled)
        num_outputs = [sum(task.num_outputs for task in self._tasks)] if self._tasks else []
        self.logits = torch.zeros(self._num_positives, *num_outputs, device=device)
        """What the window counts: outputs, or, of two towers, losses."""
        self._no_label = torch.zeros(num_samples, *([len(self._tasks)] if self._tasks else []), device=device)
        self._no_ids = torch.zeros(num_samples * sum(t.multi_hot for t in tables), dtype=torch.int32, device=device)
        self._dropouts = [one for one in module.modules() if isinstance(one, ReLUWithDropout | SequenceDropout)]
        self._keys = torch.zeros(len(self._dropouts), dtype=torch.int64, device=device)
        self._names: list[str] = []  # Names of the weights that are trained.
        self._grads: list[Tensor] = []

    @property
    def buffers(self) -> list[Tensor]:
        """Buffers of the module that a forward pass changes, such as BatchNorm's statistics."""
        return list(self._module.buffers())

    def flat(self, inputs: EngineInputs, dtype: torch.dtype) -> FlatParameters:
        """Flatten the weights that the loss depends on; others keep their value, and have no optimizer state."""
        with self.undone():
            grads = self.gradients(trainable(self._module))
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
        """Choose what the next step drops; dropout of a custom network draws from torch's generator, which a graph
        advances by itself."""
        for one, key in zip(self._dropouts, self._keys, strict=True):
            key.fill_(one.key)

    def forward_bottom(self) -> None:
        """Do nothing: which layers need no table is not known."""

    def forward_rest(self) -> None:
        """Do nothing: forward and backward are one."""

    def backward_to_pooled(self, label: Tensor, ids: Tensor) -> None:
        """Compute logits and all gradients."""
        grads = self.gradients(self._names, label, ids)
        torch._foreach_copy_(self._grads, [grad for grad in grads if grad is not None])

    def backward_bottom(self) -> None:
        """Do nothing: all gradients are there."""

    def check_values(self) -> None:
        """Raise where the file makes NaN of the batch in the buffers; waits for the device."""
        with self.undone(), torch.autocast(self._device.type, torch.bfloat16, enabled=self._is_bf16):
            if isinstance(self._module, CustomNetwork):
                self._module.checks_values = True
            self._module(self.inputs, self.pooled)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Restore random numbers and the module's buffers at the end."""
        kept, own = [buffer.clone() for buffer in self.buffers], self._module
        checks_values = isinstance(own, CustomNetwork) and own.checks_values
        if isinstance(own, CustomNetwork):
            own.checks_values = False
        try:
            with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
                yield
        finally:
            if isinstance(own, CustomNetwork):
                own.checks_values = checks_values
            for buffer, before in zip(self.buffers, kept, strict=True):
                buffer.copy_(before)

    def counted(self, label: Tensor) -> Tensor:
        """Return what the window counts beside `logits`."""
        return label if self._softmax is None else (label[: self._num_positives] > 0.5).float()

    def gradients(
        self, names: list[str], label: Tensor | None = None, ids: Tensor | None = None
    ) -> list[Tensor | None]:
        """Return the gradients of the weights of these names; those of the pooled rows go into their buffer. Without
        labels and ids those of any samples will do.

        Each call makes new leaves over the weights' memory: `DistributedDataParallel` keeps those of the parameters
        themselves on the stream that it was made on, and a capture may not wait for another.
        """
        from torch.func import functional_call

        parameters = dict(self._module.named_parameters())
        with torch.enable_grad(), self._keys_on_device():
            weights = {name: parameters[name].detach().requires_grad_() for name in names}
            looked_up = [values.detach().requires_grad_() for values in self._looked_up()]
            arguments, more = self._arguments(looked_up, self._no_ids if ids is None else ids)
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._is_bf16):
                outputs = functional_call(self._module, weights, arguments, more)
            loss, logits = self._loss(outputs, self._no_label if label is None else label,
                                      self._no_ids if ids is None else ids)
            found = torch.autograd.grad(loss, [*looked_up, *weights.values()], allow_unused=True)
        self._keep(logits.detach(), found[: len(looked_up)])
        return list(found[len(looked_up) :])

    def _looked_up(self) -> list[Tensor]:
        """Return the rows that the loss has gradients of."""
        return [self.pooled]

    def _arguments(self, looked_up: list[Tensor], ids: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what the module takes."""
        return (self.inputs, *looked_up), {} if self._softmax is None else {"gives_vectors": True}

    def _keep(self, logits: Tensor, grads: Sequence[Tensor | None]) -> None:
        """Keep what the window counts, and the gradients of the looked-up rows."""
        self.logits.copy_(logits)
        if grads[0] is not None:
            self.grad_pooled.copy_(grads[0])

    def _loss(self, outputs: Any, label: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's part of the loss of the global batch, and what the window counts."""
        if self._softmax is not None:
            loss, logits, _ = self._softmax.losses_of_all(*outputs, ids, label)
        elif self._tasks:
            logits = outputs.float()
            loss = weighted_loss(logits, label, self._tasks)
        else:
            logits, losses = of_members(outputs.float(), label)
            loss = losses.mean()
        return loss / self._num_ranks, logits

    @contextmanager
    def _keys_on_device(self) -> Iterator[None]:
        """Let dropout read its keys where a graph can change them."""
        before = [one.key for one in self._dropouts]
        for one, key in zip(self._dropouts, self._keys, strict=True):
            one.key = key
        try:
            yield
        finally:
            for one, own in zip(self._dropouts, before, strict=True):
                one.key = own


class SequenceNetwork(AutogradNetwork):
    """DIN, SASRec and HSTU. Rows of sequences have no buffers of their own: how many there are differs from graph to
    graph, and graphs share their memory."""

    def __init__(self, inputs: EngineInputs, layout: SequenceLayout, num_samples: int) -> None:
        super().__init__(inputs, num_samples)
        self._layout, self._is_next_item = layout, inputs.spec.model.is_next_item
        self.rows: list[Tensor] = []
        """[ids, dim] of each table that is looked up row by row; after `gradients` the gradients of its rows."""
        self.offsets: dict[str, Tensor] = {}
        self._is_there: Tensor | None = None  # Which logits are predictions; None: all are.

    def counted(self, label: Tensor) -> Tensor:
        """Return labels, NaN where there is no prediction."""
        return label if self._is_there is None else torch.where(self._is_there, 1.0, torch.nan)

    def gradients(
        self, names: list[str], label: Tensor | None = None, ids: Tensor | None = None
    ) -> list[Tensor | None]:
        if ids is None:
            layout = self._layout
            layout.capacities, num_ids = layout.some_room, layout.first_id + sum(layout.some_room)
            ids = torch.full((num_ids,), -1, dtype=torch.int32, device=self._device)
            nothing = torch.zeros(layout.size_bytes, dtype=torch.uint8, device=self._device)
            self.offsets = layout.offsets(nothing)
            self.make_rows()
            torch._foreach_zero_(self.rows)
        return super().gradients(names, label, ids)

    def make_rows(self) -> None:
        """Make room for the rows of a batch."""
        self.rows = [torch.empty(span.stop - span.start, table.dim, device=self._device)
                     for table, span in zip(self._layout.tables, self._layout.table_spans(), strict=True)]

    def release_rows(self) -> None:
        """Give back the memory of a batch."""
        self.rows, self._is_there = [], None
        self.logits = torch.empty(0, device=self._device)

    def _looked_up(self) -> list[Tensor]:
        return [self.pooled, *self._rows_by_feature()]

    def _rows_by_feature(self) -> Iterator[Tensor]:
        """Yield the rows of each feature."""
        rooms = iter(self._layout.capacities)
        for table, rows in zip(self._layout.tables, self.rows, strict=True):
            yield from rows.split([next(rooms) for _ in table.features])

    def _arguments(self, looked_up: list[Tensor], ids: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        pooled, *rows = looked_up
        layout, sequences = self._layout, dict[str, JaggedSequence]()
        by_name = dict(zip([one.name for one in layout.pooled],
                           pooled.split([one.dim or 0 for one in layout.pooled], dim=1), strict=True))
        for at, (feature, span) in enumerate(zip(layout.unpooled, layout.spans(), strict=True)):
            if not feature.is_sequence:
                by_name[feature.name] = rows[at]
                continue
            values = rows[at] if feature.lookup else ids[span]
            sequences[feature.name] = JaggedSequence(values, self.offsets[feature.name], ids[span])
        return (self.inputs, by_name, sequences), {"has_spare_rows": True}

    def _loss(self, outputs: Any, label: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        if not self._is_next_item:
            return super()._loss(outputs, label, ids)
        logits, self._is_there = outputs
        losses = torch.where(self._is_there, softplus(-logits), 0.0)
        return losses.sum() / self._is_there.sum().clamp(min=1), logits

    def _keep(self, logits: Tensor, grads: Sequence[Tensor | None]) -> None:
        self.logits = logits
        if grads[0] is not None:
            self.grad_pooled.copy_(grads[0])
        for rows, grad in zip(self._rows_by_feature(), grads[1:], strict=True):
            rows.zero_() if grad is None else rows.copy_(grad)


def autograd_network(inputs: EngineInputs, layout: object = None) -> AutogradNetwork:
    """Make the network of a model whose gradients autograd computes, for batches of `layout`, if it is known."""
    num_samples = num_rows(inputs.spec) // inputs.world.world_size
    if not inputs.spec.model.has_sequences:
        return AutogradNetwork(inputs, num_samples)
    if not isinstance(layout, SequenceLayout):
        layout = SequenceLayout(inputs.spec.model, num_samples)
    return SequenceNetwork(inputs, layout, num_samples)


def trainable(module: nn.Module) -> list[str]:
    """Return the names of the weights that have gradients."""
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


def num_rows(spec: RunSpec) -> int:
    """Return the rows of a global batch: its samples, and behind them sampled negatives."""
    return spec.train.batch_size + (
        spec.model.two_tower.num_sampled_negatives if spec.model.kind == "two_tower" else 0)


def why_not_captured(inputs: EngineInputs) -> str:
    """Capture forward and backward once, on a GPU, and return why that fails, or nothing.

    Weights and random numbers stay as they are.
    """
    spec, device = inputs.spec, inputs.world.device
    step, names = autograd_network(inputs), trainable(inputs.dense)

    def run() -> None:
        step.gradients(names)

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
    """Raise at an operation that would wait for the device: that ends a capture, and no line would be named."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode(mode)


_failed: list[Any] = []  # Graphs whose capture failed: the allocator may still ask them.


def _try_capture(run: Callable[[], None], stream: torch.cuda.Stream) -> None:
    """Capture once, and clean up what torch leaves behind when CUDA ends a capture: generator, current stream, pool."""
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
