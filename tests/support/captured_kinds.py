"""Kinds of models that the captured step runs by autograd, and a watch for what a graph cannot hold."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

TASKS = ("data.ragged=true", "model.tables=[{name='a', rows=9, multi_hot=4, pooling='mean'}, {name='b', rows=60}]",
         "model.tasks=[{name='click', weight=0.5}, {name='stars', loss='regression'}, {name='kind', loss='softmax', "
         "num_classes=3}]", "model.tower_mlp=[5]")
FILE = ("data.kind=columns", "data.dense_columns=['age']", "model.num_dense=1", "data.num_eval_samples=0")
TOWERS = (*FILE, "model.kind=two_tower", "model.tables=[{name='user', rows=60}, {name='item', rows=40}, "
          "{name='shops', rows=9, multi_hot=2}]", "model.two_tower.item=item", "model.two_tower.user=user",
          "model.two_tower.user_layers=[8]")
WEIGHTED = (*FILE, "model.tables=[{name='shops', rows=9, multi_hot=4, pooling='mean', weights_column='seconds'}, "
            "{name='user', rows=60}, {name='item', rows=40, weights_column='times'}]")
DYNAMIC = ("model.tables=[{name='a', ids='dynamic', rows=900, capacity=64, evict='lfu', half_life=7}, {name='b', "
           "ids='dynamic', rows=400, capacity=32, multi_hot=2}, {name='c', shares='b', multi_hot=3}, "
           "{name='d', rows=7}]",)
RANKED = ("model.tables=[{name='item', rows=40, pooling='none', max_length=9}, {name='shown', shares='item'}, "
          "{name='shop', rows=9, multi_hot=3, pooling='mean'}]", "model.sequence.history=item",
          "model.sequence.candidate=shown", "data.ragged=true")
NEXT = ("data.kind=interactions", 'data.interactions.column_names=["user", "item"]', "model.num_dense=0",
        "model.tables=[{name='item', rows=40, pooling='none', max_length=8}, {name='negatives', shares='item', "
        "pooling='none', max_length=10}]", "model.sequence.history=item", "model.sequence.negatives=negatives")
SLOWLY = "train.dense_learning_rate=0.002"  # HSTU norms sums that are near zero here: rounding grows with each step.
KINDS: dict[str, tuple[str, ...]] = {
    "shared_bottom": (*TASKS, "model.task_head=shared_bottom"),
    "mmoe": (*TASKS, "model.task_head=mmoe", "model.num_experts=3", "model.dropout=0.2"),
    "ple": (*TASKS, "model.task_head=ple", "model.num_experts=1", "model.kind=dcnv2"),
    "tasks_of_a_field_network": (*TASKS, "model.kind=deepfm"),
    "two_tower_in_batch": TOWERS,
    "two_tower_sampled": (*TOWERS, "model.two_tower.num_sampled_negatives=32"),
    "weighted_ids": WEIGHTED,
    "weighted_ids_of_a_field_network": (*WEIGHTED, "model.kind=deepfm"),
    "dynamic_tables_of_a_field_network": (*DYNAMIC, "model.kind=masknet"),
    "dynamic_tables_of_tasks": (*DYNAMIC, "model.tasks=[{name='click'}, {name='stars', loss='regression'}]"),
    "many_ids": ("model.tables=[{name='a', rows=9, multi_hot=1500}]", "train.batch_size=8", "data.num_eval_samples=8"),
    "din": (*RANKED, "model.kind=din"),
    "hstu_ranker": (*RANKED, "model.kind=hstu", "model.sequence.num_heads=2", SLOWLY),
    "hstu_ranker_without_dense": (*RANKED, "model.kind=hstu", "model.num_dense=0", "model.dropout=0.1",
                                  SLOWLY),
    "sasrec": (*NEXT, "model.kind=sasrec", "model.dropout=0.2"),
    "sasrec_shared_negatives": (*NEXT, "model.kind=sasrec", "model.sequence.share_negatives=true"),
    "sasrec_frequent_negatives": (*NEXT, "model.kind=sasrec", "data.interactions.negatives=frequency"),
    "sasrec_negatives_in_batch": (*NEXT, "model.kind=sasrec", "data.interactions.negatives=in_batch"),
    "hstu_next_item": (*NEXT, "model.kind=hstu", SLOWLY),
}


def sets_of(kind: str, folder: Path) -> tuple[str, ...]:
    """Return the settings of a kind of model, with a file of its samples in `folder` if they are not drawn."""
    path, draw = folder / "samples.csv", random.Random(1)
    if "data.kind=interactions" in KINDS[kind]:
        with path.open("w") as file:
            for user in range(600):
                first, length = draw.randrange(39), draw.randrange(4, 14)
                file.writelines(f"{user} {1 + (first + step * draw.randrange(1, 3)) % 39}\n" for step in range(length))
        return (*KINDS[kind], f"data.path={path}")
    if "data.kind=columns" not in KINDS[kind]:
        return KINDS[kind]
    lines = ["user,item,times,shops,seconds,age,label"]
    for _ in range(2000):
        user, num_shops = draw.randrange(60), draw.randrange(3)
        shops, seconds = ("|".join(str(draw.randrange(low, 9)) for _ in range(num_shops)) for low in (0, 1))
        lines.append(f"{user},{user % 4 + 4 * draw.randrange(10)},{draw.random()},{shops},{seconds},{draw.random()},"
                     f"{int(draw.random() < 0.8)}")
    path.write_text("\n".join(lines) + "\n")
    return (*KINDS[kind], f"data.path={path}")


_WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "unique_dim", "bincount",
            "unique_consecutive", "equal", "is_nonzero")


class _Watch(TorchDispatchMode):
    """Raises at an operation for which the host of a GPU would wait, or whose result has a size that values decide."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        by_mask = name in ("index", "index_put", "index_put_") and any(
            one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])
        if name in _WAITING or by_mask or (name == "repeat_interleave" and (kwargs or {}).get("output_size") is None):
            raise AssertionError(f"a captured step cannot hold {func}")
        return func(*args, **(kwargs or {}))


@contextmanager
def refuse_waiting() -> Iterator[None]:
    """Fail at what would end a capture on a GPU."""
    with _Watch():
        yield
