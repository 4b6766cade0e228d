"""The optimizers of tables and dense layers, and the schedule of their rates."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import PartialRowWiseAdam, in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from embark.model.placement import optimizer_of, tables_by_name
from embark.model.steps import dense_rate, rate_factor
from embark.spec import RunSpec, TrainSpec
from .model import WithoutValues

TABLE_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": RowWiseAdagrad,
    "adam": torch.optim.Adam,
    "rowwise_adam": PartialRowWiseAdam,
}
DENSE_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
}


def fuse_into_backward(tables: nn.Module, spec: RunSpec) -> None:
    """Give the tables their optimizers. Before sharding: after it, the rate would never reach them. TorchRec puts
    tables of different optimizers or rates into different batches of FBGEMM's. Data-parallel tables get none here."""
    alike = dict[tuple[str, float], list[nn.Parameter]]()
    rates, stored = table_rates(spec), tables_by_name(spec.model)
    for name, weight in tables.named_parameters():
        table = stored[_table_of(name)]
        if not table.is_data_parallel:
            alike.setdefault((optimizer_of(spec, table), rates[table.name]), []).append(weight)
    with WithoutValues():
        for (optimizer, rate), weights in alike.items():
            apply_optimizer_in_backward(TABLE_OPTIMIZERS[optimizer], weights, _arguments(optimizer, spec.train, rate))


def _table_of(parameter: str) -> str:
    return parameter.split(".")[-2]


def table_rates(spec: RunSpec) -> dict[str, float]:
    """Return the full rate of each table."""
    return {table.name: spec.train.learning_rate if table.learning_rate is None else table.learning_rate
            for table in spec.model.stored_tables()}


@dataclass(frozen=True, slots=True)
class Optimizers:
    """The optimizers of tables and dense layers as one, with their learning rates accessible."""

    both: CombinedOptimizer
    dense: KeyedOptimizerWrapper
    _table_groups: list[tuple[dict[str, Any], float]]  # Groups, and the full rate of each.
    _dense_groups: list[dict[str, Any]]
    _train: TrainSpec
    _num_steps: int

    def set_rates(self, step: int) -> float:
        """Set the rates of `step`; returns the rate of tables that have none of their own."""
        factor = self.factor(step)
        for group, full_rate in self._table_groups:
            group["lr"] = full_rate * factor
        _set_rate(self._dense_groups, dense_rate(self._train) * factor)
        return self._train.learning_rate * factor

    def factor(self, step: int) -> float:
        """Return the share of their full rates that tables and dense layers train with in `step`."""
        return rate_factor(self._train, step, self._num_steps)

    @property
    def dense_kind(self) -> str:
        """The name of the dense layers' optimizer."""
        return self._train.dense_optimizer

    def set_step(self, step: int) -> None:
        """Tell fused Adam how many steps it has taken. It counts lookups, those of an evaluation among them, and a
        checkpoint does not hold its count: either would change what comes next."""
        self.both.set_optimizer_step(step)

    def init_state(self, saved: Iterable[str] = ()) -> None:
        """Create the dense optimizer's state, or, given `saved` names, that of the weights among them.

        Adam creates it at a weight's first gradient, so that without this a load would find nothing to fill and
        silently restore nothing. A weight that the network has not used yet has none saved.
        """
        rates = [group["lr"] for group in self._dense_groups]
        if self._train.weight_decay:
            _set_rate(self._dense_groups, 0.0)  # it is a step without gradients, which would shrink the weights
        self.dense.init_state()
        for group, rate in zip(self._dense_groups, rates, strict=True):
            group["lr"] = rate
        with_state = {name for name in self.dense.params if any(key.startswith(f"{name}.") for key in saved)}
        for name, weight in self.dense.params.items() if with_state else ():
            if name not in with_state:
                self.dense.state.pop(weight, None)


def make_optimizers(
    sharded: DistributedModelParallel, spec: RunSpec, num_steps: int, device: torch.device
) -> Optimizers:
    """Join the fused optimizer that sharding made with one for the dense layers."""
    train, rates = spec.train, table_rates(spec)
    parameters = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    copied = list(_data_parallel_optimizers(parameters, spec))
    dense = KeyedOptimizerWrapper(
        {name: value for name, value in parameters.items() if not any(name in one.params for _, one in copied)},
        _dense_factory(train, device))
    fused = sharded.fused_optimizer
    both = CombinedOptimizer([("tables", fused), ("dense", dense), *copied])
    table_groups = [(group, next((rates[_table_of(name)] for name in one.params), train.learning_rate))
                    for one in (*_parts(fused), *(one for _, one in copied)) for group in one.param_groups]
    return Optimizers(both, dense, table_groups, list(dense.param_groups), train, num_steps)


def _data_parallel_optimizers(
    parameters: dict[str, nn.Parameter], spec: RunSpec
) -> Iterator[tuple[str, KeyedOptimizerWrapper]]:
    """Make one for each data-parallel table, with its gradient of all rows: those that no sample has do not move."""
    rates = table_rates(spec)
    for table in spec.model.stored_tables():
        if table.is_data_parallel:
            name = next(name for name in parameters if name.endswith(f"embedding_bags.{table.name}.weight"))
            optimizer = optimizer_of(spec, table)
            arguments = _arguments(optimizer, spec.train, rates[table.name])
            yield "data_parallel", KeyedOptimizerWrapper(
                {name: parameters[name]}, lambda of, kind=TABLE_OPTIMIZERS[optimizer], with_=arguments:
                kind(of, **with_))


def _parts(fused: KeyedOptimizer) -> Iterator[KeyedOptimizer]:
    """Make one optimizer for each of FBGEMM's batches, whose tables have the same learning rate."""
    if not isinstance(fused, CombinedOptimizer):
        yield fused
        return
    for _, inner in fused.optimizers:
        yield from _parts(inner)


def _dense_factory(train: TrainSpec, device: torch.device) -> Callable[[Iterable[Any]], torch.optim.Optimizer]:
    kind = DENSE_OPTIMIZERS[train.dense_optimizer]
    arguments = _arguments(train.dense_optimizer, train, dense_rate(train))
    # Fused Adagrad exists on the CPU alone; there it takes half the time.
    is_fused = device.type == "cpu" or train.dense_optimizer != "adagrad"

    def make(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        optimizer = kind(parameters, **arguments, fused=is_fused or None)
        if train.max_gradient_norm:
            optimizer.register_step_pre_hook(lambda made, *_: _clip_gradients(made.param_groups, train))
        if train.weight_decay:
            optimizer.register_step_pre_hook(lambda made, *_: _decay_weights(made.param_groups, train.weight_decay))
        return optimizer

    return make


def _clip_gradients(groups: list[dict[str, Any]], train: TrainSpec) -> None:
    nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], train.max_gradient_norm)


@torch.no_grad()
def _decay_weights(groups: list[dict[str, Any]], weight_decay: float) -> None:
    """Decay matrices that have a gradient, as AdamW does before its update, at each group's rate of this step."""
    for group in groups:
        matrices = [p for p in group["params"] if p.ndim > 1 and p.grad is not None]
        torch._foreach_mul_(matrices, 1 - group["lr"] * weight_decay)


def _arguments(name: str, train: TrainSpec, rate: float) -> dict[str, Any]:
    return {"lr": rate} if name == "sgd" else {"lr": rate, "eps": train.eps}


def _set_rate(groups: list[dict[str, Any]], rate: float) -> None:
    for group in groups:
        group["lr"] = rate
