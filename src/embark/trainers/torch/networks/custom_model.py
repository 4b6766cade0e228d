"""A network from the user's own file: its inputs, and the checks of its output."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from embark.errors import UserError
from embark.spec import ModelSpec, Task
from embark.spec.user_code import file_of, load_user_class, location_of, user_call, user_error
from .jagged import JaggedSequence


class CustomNetwork(nn.Module):
    """Calls the user's module with the dense features and the pooled embeddings by name."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        tables = [t for t in model.table_list() if not t.is_sequence]
        self.names, self.widths = [t.name for t in tables], [t.dim or 0 for t in tables]
        self.own = load_network(model)
        self._tasks = model.tasks
        self.checks_values = True
        """Whether to look for NaN that the file makes; a captured step cannot wait for the device."""
        self._is_checked = False

    def forward(
        self, dense: Tensor, pooled: Tensor | dict[str, Tensor], sequences: Mapping[str, JaggedSequence] | None = None
    ) -> Tensor:
        self._share_buffers()
        by_name = pooled if isinstance(pooled, dict) else \
            dict(zip(self.names, pooled.split(self.widths, dim=1), strict=True))
        inputs = (dense, by_name) if sequences is None else (dense, by_name, sequences)
        logits = logits_of(self.own, *inputs, tasks=self._tasks)
        # On a GPU each look would wait for the device, so there only the first answer is looked at.
        if self.checks_values and self.training and (logits.is_cpu or not self._is_checked):
            if not logits.isfinite().all():
                self._explain_nan(*inputs)
            self._is_checked = True
        return logits

    def _share_buffers(self) -> None:
        """Broadcast the first rank's buffers, such as BatchNorm's statistics, which each rank gathers of its own
        samples."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            for buffer in self.own.buffers():
                dist.broadcast(buffer, 0)

    def _explain_nan(self, *inputs: Any) -> None:
        """Raise where the file makes NaN of finite numbers. The loop reports bad data and diverged weights."""
        given = [value for value in tree_leaves(inputs) if isinstance(value, Tensor)]
        if not all(value.isfinite().all() for value in (*given, *self.own.parameters())):
            return
        where, what = location_of(type(self.own).forward), ""
        try:
            with _FirstNan():
                self.own(*inputs)
        except _NanError as error:
            found = user_error(error)
            where, what = (found.what.partition(": ")[0] if found else where), f" ({error})"
        raise UserError(f"{where}: forward makes NaN or infinity of finite inputs and weights{what}",
                        "keep logarithms, roots and divisions away from 0, such as with torch.clamp or an epsilon")


def load_network(model: ModelSpec) -> nn.Module:
    """Build the user's module from the spec's `[model]`."""
    kind = load_user_class(model.kind, model.code)
    if not issubclass(kind, nn.Module):
        raise UserError(f"{file_of(model.kind)}: {kind.__name__} is not a torch.nn.Module",
                        f"class {kind.__name__}(torch.nn.Module)")
    with user_call(f"{file_of(model.kind)}: class {kind.__name__}", "__init__(self, model)"):
        network: nn.Module = kind(model)
    if kind.forward is nn.Module.forward and "forward" not in vars(network):
        raise UserError(f"{file_of(model.kind)}: {kind.__name__} has no method forward(dense, pooled)",
                        "docs/guides/custom-models.md shows one")
    if lazy := [name for name, value in (*network.named_parameters(), *network.named_buffers()) if is_lazy(value)]:
        raise UserError(f"{file_of(model.kind)}: {lazy[0]} of {kind.__name__} has no shape before the first batch",
                        "a layer with its widths, such as torch.nn.Linear(width, 1), instead of a lazy one")
    if not any(p.requires_grad for p in network.parameters()):
        raise UserError(f"{location_of(type(network).forward)}: {kind.__name__} has no parameter to train",
                        "give it at least one layer, or a bias: torch.nn.Parameter(torch.zeros(()))")
    return network


def logits_of(network: nn.Module, dense: Tensor, *inputs: Any, tasks: tuple[Task, ...] = ()) -> Tensor:
    """Return logits [samples], or the outputs of all tasks [samples, outputs].

    Refuses anything but one logit for each sample, or those of each task, with a gradient for the weights. `inputs` are
    pooled vectors by name, and sequences by name where there are any.
    """
    arguments = "dense, pooled, sequences" if len(inputs) > 1 else "dense, pooled"
    with user_call(location_of(type(network).forward), f"forward(self, {arguments})"):
        logits = network(dense, *inputs)
    num_samples = dense.shape[0]  # `len` would make it a constant of an exported model.
    if tasks:
        return _logits_of_tasks(network, logits, num_samples, tasks)
    if not isinstance(logits, Tensor) or logits.shape not in ((num_samples,), (num_samples, 1)):
        found = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise UserError(f"{location_of(type(network).forward)}: forward returned {found} for {num_samples} samples",
                        f"return one logit for each sample, [{num_samples}] or [{num_samples}, 1]")
    _refuse_without_gradient(network, logits)
    return logits.reshape(-1)


def _logits_of_tasks(network: nn.Module, logits: Any, num_samples: int, tasks: tuple[Task, ...]) -> Tensor:
    where, names = location_of(type(network).forward), [task.name for task in tasks]
    if not isinstance(logits, dict) or set(logits) != set(names):
        found = f"logits of {', '.join(map(str, logits))}" if isinstance(logits, dict) else type(logits).__name__
        raise UserError(f"{where}: forward returned {found}, and the tasks are {', '.join(names)}",
                        "return a dictionary from the name of each task to its logits")
    parts = []
    for task in tasks:
        value, shape = logits[task.name], (num_samples, task.num_outputs)
        if not isinstance(value, Tensor) or (value.shape != shape and (value.shape != shape[:1] or shape[1] > 1)):
            shown = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise UserError(f"{where}: forward returned {shown} for task {task.name} and {num_samples} samples",
                            f"return {list(shape)}" + (f" or [{num_samples}]" if shape[1] == 1 else ""))
        _refuse_without_gradient(network, value)
        parts.append(value.reshape(shape))
    return torch.cat(parts, dim=1)


def _refuse_without_gradient(network: nn.Module, logits: Tensor) -> None:
    if torch.is_grad_enabled() and not logits.requires_grad:
        where = location_of(type(network).forward)
        raise UserError(f"{where}: the logits that forward returned depend on no parameter",
                        "compute them without detach(), no_grad() and integers")


class _NanError(Exception):
    pass


class _FirstNan(TorchDispatchMode):
    """Raises in the first operation that returns NaN, where the traceback names the line that called it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        values = [one for one in tree_leaves(result) if isinstance(one, Tensor) and one.is_floating_point()]
        if "empty" not in str(func) and any(one.isnan().any() for one in values):
            raise _NanError(str(func).partition(".")[2].partition(".")[0])
        return result
