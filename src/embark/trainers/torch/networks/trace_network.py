"""What the user's own network takes for a sample, counted on tensors without values: nothing is allocated or computed.

    python -m embark.trainers.torch.networks.trace_network ANSWER.json < spec.toml

`embark plan` starts it in a process of its own, so that it needs no torch itself.
"""

import json
import sys
import tomllib
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from embark.errors import EmbarkError
from embark.model.work import DenseWork
from embark.spec import ModelSpec, Table, resolve
from embark.spec.user_code import user_error
from .custom_model import load_network, logits_of
from .jagged import JaggedSequence

NUM_SAMPLES = 64


def trace_network(model: ModelSpec) -> DenseWork:
    """Count forward and backward of a few samples, or note why the file cannot do that without values."""
    try:
        return _traced(model)
    except Exception as error:
        reason = error if isinstance(error, EmbarkError) else user_error(error) or error
        return DenseWork(note=f"its dense layers are not counted: {str(reason).partition(chr(10))[0]}")


def _traced(model: ModelSpec) -> DenseWork:
    saved: dict[int, Tensor] = {}  # Tensors that autograd keeps for the backward pass, by address.

    def keep(value: Tensor) -> Tensor:
        saved[value.untyped_storage()._cdata] = value
        return value

    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        network = load_network(model).to("meta")
        dense = torch.empty(NUM_SAMPLES, model.num_dense)
        pooled = {t.name: torch.empty(NUM_SAMPLES, t.dim or 0, requires_grad=True) for t in model.table_list()
                  if not t.is_sequence}
        sequences = {t.name: _mean_sequence(t) for t in model.table_list() if t.is_sequence}
        inputs = (pooled, sequences) if sequences else (pooled,)
        given = {value.untyped_storage()._cdata for value in (dense, *tree_leaves(inputs), *network.parameters())}
        with _Counter() as forward, torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
            logits = logits_of(network, dense, *inputs, tasks=model.tasks)
        with _Counter() as backward:
            logits.sum().backward()
    kept = sum(value.numel() for key, value in saved.items() if key not in given)
    return DenseWork(
        note="", num_values=sum(p.numel() for p in network.parameters()), output_width=kept / NUM_SAMPLES,
        flops_per_sample=(forward.flops + backward.flops) / NUM_SAMPLES, num_layers=forward.num_products,
    )


def _mean_sequence(table: Table) -> JaggedSequence:
    """Make a sequence feature whose samples are all of the mean length, in a tensor without values."""
    total = round(NUM_SAMPLES * table.mean_ids)
    ids = torch.empty(total, dtype=torch.int32)
    values = torch.empty(total, table.dim or 0, requires_grad=True) if table.lookup else ids
    return JaggedSequence(values, torch.empty(NUM_SAMPLES + 1, dtype=torch.int32), ids)


class _Counter(TorchDispatchMode):
    """Counts matrix products and their arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.flops, self.num_products = 0.0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        from torch.utils.flop_counter import flop_registry  # here, since it imports Triton

        if count := flop_registry.get(func._overloadpacket):
            self.flops += count(*args, **(kwargs or {}), out_val=result)
            self.num_products += 1
        return result


if __name__ == "__main__":
    found = trace_network(resolve(tomllib.loads(sys.stdin.read())).model)
    with open(sys.argv[1], "w", encoding="utf-8") as answer:
        json.dump(asdict(found), answer)
