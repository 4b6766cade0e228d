"""The optimizers of tables and dense layers, and the schedule that moves the rates of both."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from embark.model.learning_rate import dense_rate, rate_factor
from embark.spec import TrainSpec
from embark.trainers.torch.model import WithoutValues

TABLE_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": RowWiseAdagrad,
    "adam": torch.optim.Adam,
}
DENSE_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
}


def fuse_into_backward(tables: nn.Module, train: TrainSpec) -> None:
    """Give the tables their optimizer. Before sharding: after it, the rate would never reach them."""
    arguments = _arguments(train.optimizer, train, train.learning_rate)
    with WithoutValues():
        apply_optimizer_in_backward(TABLE_OPTIMIZERS[train.optimizer], tables.parameters(), arguments)


@dataclass(frozen=True, slots=True)
class Optimizers:
    """Both optimizers as one, with their rates within reach."""

    both: CombinedOptimizer
    dense: KeyedOptimizerWrapper
    _table_groups: list[dict[str, Any]]
    _dense_groups: list[dict[str, Any]]
    _train: TrainSpec
    _num_steps: int

    def set_rates(self, step: int) -> float:
        """Set what `step` trains with; returns the tables' rate."""
        factor = rate_factor(self._train, step, self._num_steps)
        table_rate = self._train.learning_rate * factor
        _set_rate(self._table_groups, table_rate)
        _set_rate(self._dense_groups, dense_rate(self._train) * factor)
        return table_rate

    def rates(self) -> tuple[float, float]:
        """What was set last: the tables' and the dense layers'."""
        return self._table_groups[0]["lr"], self._dense_groups[0]["lr"]

    @property
    def dense_kind(self) -> str:
        """The name of the dense layers' optimizer."""
        return self._train.dense_optimizer

    def set_step(self, step: int) -> None:
        """Tell fused Adam how many steps it has taken. It counts lookups, those of an evaluation among them, and a
        checkpoint does not hold its count: either would change what comes next."""
        self.both.set_optimizer_step(step)

    def init_state(self, saved: Iterable[str] = ()) -> None:
        """Make the dense optimizer's state exist. Adam makes it at a weight's first gradient, so that without this a
        load would find nothing to fill and silently restore nothing. Given `saved` names, only of the weights that
        have some among them: one that the network has not used yet has none."""
        if self._train.weight_decay:
            _set_rate(self._dense_groups, 0.0)  # it is a step without gradients, which would shrink the weights
        self.dense.init_state()
        with_state = {name for name in self.dense.params if any(key.startswith(f"{name}.") for key in saved)}
        for name, weight in self.dense.params.items() if with_state else ():
            if name not in with_state:
                self.dense.state.pop(weight, None)


def make_optimizers(
    sharded: DistributedModelParallel, train: TrainSpec, num_steps: int, device: torch.device
) -> Optimizers:
    """The fused optimizer that sharding made, joined with one for the dense layers."""
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(sharded.named_parameters())), _dense_factory(train, device)
    )
    fused = sharded.fused_optimizer
    both = CombinedOptimizer([("tables", fused), ("dense", dense)])
    return Optimizers(both, dense, list(fused.param_groups), list(dense.param_groups), train, num_steps)


def _dense_factory(train: TrainSpec, device: torch.device) -> Callable[[Iterable[Any]], torch.optim.Optimizer]:
    kind = DENSE_OPTIMIZERS[train.dense_optimizer]
    arguments = _arguments(train.dense_optimizer, train, dense_rate(train))
    # Fused Adagrad exists on the CPU alone; there it takes half the time.
    is_fused = device.type == "cpu" or train.dense_optimizer != "adagrad"

    def make(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        optimizer = kind(parameters, **arguments, fused=is_fused or None)
        if train.weight_decay:
            optimizer.register_step_pre_hook(lambda made, *_: _decay_weights(made.param_groups, train.weight_decay))
        return optimizer

    return make


@torch.no_grad()
def _decay_weights(groups: list[dict[str, Any]], weight_decay: float) -> None:
    """As AdamW does before its update, at each group's rate of this step; matrices that have a gradient."""
    for group in groups:
        matrices = [p for p in group["params"] if p.ndim > 1 and p.grad is not None]
        torch._foreach_mul_(matrices, 1 - group["lr"] * weight_decay)


def _arguments(name: str, train: TrainSpec, rate: float) -> dict[str, Any]:
    return {"lr": rate} if name == "sgd" else {"lr": rate, "eps": train.eps}


def _set_rate(groups: list[dict[str, Any]], rate: float) -> None:
    for group in groups:
        group["lr"] = rate
