"""The optimizers of tables and dense layers, and the schedule that moves the rates of both."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from embark.model.learning_rate import dense_rate, rate_factor
from embark.spec import TrainSpec

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
    apply_optimizer_in_backward(
        TABLE_OPTIMIZERS[train.optimizer], tables.parameters(), _arguments(train.optimizer, train, train.learning_rate)
    )


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

    def init_state(self) -> None:
        """Make the dense optimizer's state exist. Adam makes it at the first step, so that without this a load
        would find nothing to fill and silently restore nothing."""
        self.dense.init_state()


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
    return lambda parameters: kind(parameters, **arguments, fused=is_fused or None)


def _arguments(name: str, train: TrainSpec, rate: float) -> dict[str, Any]:
    return {"lr": rate} if name == "sgd" else {"lr": rate, "eps": train.eps}


def _set_rate(groups: list[dict[str, Any]], rate: float) -> None:
    for group in groups:
        group["lr"] = rate


SUFFIX = ".momentum1"


class RowwiseRecut:
    """Stands plain tensors where a saved state has another length than the one to fill, and fills it from them."""

    def __init__(self, saved: Metadata) -> None:
        self._saved = saved.state_dict_metadata
        self._recut: list[tuple[ShardedTensor, Tensor, list[int]]] = []

    def prepare(self, optimizers: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """The state to load into: as it is, but for what must be cut anew."""
        return {
            parameter: {name: self._place(parameter, name, value) for name, value in states.items()}
            for parameter, states in optimizers.items()
        }

    def fill(self) -> None:
        """After loading: give every shard its rows."""
        for wanted, loaded, widths in self._recut:
            rows = loaded.numel() // len(widths)
            share = torch.tensor(widths, dtype=loaded.dtype) / sum(widths)
            whole = (loaded.view(len(widths), rows) * share[:, None]).sum(0)
            for shard in wanted.local_shards():
                first = shard.metadata.shard_offsets[0] % rows
                shard.tensor.copy_(whole[first : first + shard.tensor.numel()])

    def _place(self, parameter: str, name: str, value: Any) -> Any:
        was = self._saved.get(f"optimizers.{parameter}.{name}")
        if not (name.endswith(SUFFIX) and isinstance(value, ShardedTensor) and isinstance(was, TensorStorageMetadata)):
            return value
        about = value.metadata()  # asked for its size, a ShardedTensor warns that it is deprecated
        if len(about.size) != 1 or was.size == about.size:
            return value
        loaded = torch.empty(was.size, dtype=about.tensor_properties.dtype)
        self._recut.append((value, loaded, self._widths(parameter)))
        return loaded

    def _widths(self, parameter: str) -> list[int]:
        """Of the column shards that were saved, from left to right."""
        table = self._saved[f"model.{parameter.removeprefix('tables.')}"]
        widths = {chunk.offsets[1]: chunk.sizes[1] for chunk in table.chunks}
        return [widths[first] for first in sorted(widths)]
