"""torch's tensors come back from a checkpoint under any sharding, into a GPU's memory too."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, init_from_local_shards
from torch.distributed._shard.sharding_spec import ShardMetadata

from embark.errors import UserError
from embark.store import ChecksumWriter
from embark.store.checkpoint_arrays import INDEX, CheckpointArrays, Index, TensorChunk, write_pieces
from embark.store.object_store import LocalStore
from embark.trainers.torch import checkpoint
from embark.trainers.torch.checkpoint import fill, local_shards, to_array


@pytest.fixture(autouse=True)
def _one_rank():
    was_there = dist.is_initialized()
    if not was_there:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if not was_there:
        dist.destroy_process_group()


def sharded(full: torch.Tensor, rows: list[int], columns: list[int]) -> ShardedTensor:
    shards = [
        Shard(full[a:b, c:d].clone(), ShardMetadata([a, c], [b - a, d - c], "rank:0/cpu"))
        for a, b in pairwise(rows) for c, d in pairwise(columns)
    ]
    return init_from_local_shards(shards, list(full.shape))


MAKE = {
    "rows": lambda full: sharded(full, [0, 30, 100], [0, 8]),
    "more rows": lambda full: sharded(full, [0, 10, 50, 90, 100], [0, 8]),
    "columns": lambda full: sharded(full, [0, 100], [0, 3, 8]),
    "unsharded": lambda full: full.clone(),
    "parameter": lambda full: torch.nn.Parameter(full.clone()),
    "f64": lambda full: full.double(),
    "turned": lambda full: full.t().contiguous().t(),
}


def saved(root: Path, state: dict) -> CheckpointArrays:
    store = LocalStore(root)
    pieces = [TensorChunk(one.name, one.size, one.offsets, *to_array(one.values.detach().cpu()))
              for one in local_shards(state)]
    store.write(f"c/{INDEX}", Index(write_pieces(ChecksumWriter(store), "c", 0, pieces)).to_json())
    return CheckpointArrays(store, "c")


@pytest.mark.parametrize("target", MAKE)
@pytest.mark.parametrize("source", ["rows", "columns", "unsharded"])
def test_any_sharding_loads_into_any_other(tmp_path, source, target, monkeypatch):
    monkeypatch.setattr(checkpoint, "READ_BYTES", 128)
    full = torch.randn(100, 8)
    arrays = saved(tmp_path, {"model": {"t": MAKE[source](full), "count": torch.tensor(2.5)}})
    state = {"model": {"t": MAKE[target](torch.zeros(100, 8)), "count": torch.tensor(0.0)}}
    fill(local_shards(state), arrays)
    for shard in local_shards(state):
        expected = full
        for axis, (offset, length) in enumerate(zip(shard.offsets, shard.values.shape, strict=True)):
            expected = expected.narrow(axis, offset, length)
        assert shard.name == "model.count" or torch.equal(shard.values.float(), expected)
    assert state["model"]["count"] == 2.5


def test_bf16_rows_are_saved_in_two_bytes_and_load_under_any_sharding(tmp_path):
    full = torch.randn(100, 8).bfloat16()
    arrays = saved(tmp_path, {"t": MAKE["rows"](full)})
    assert (arrays.entry("t").dtype, arrays.entry("t").num_bytes) == ("bfloat16", 1600)
    for target in ("columns", "unsharded"):
        for dtype in (torch.bfloat16, torch.float32):
            state = {"t": MAKE[target](torch.zeros(100, 8, dtype=dtype))}
            fill(local_shards(state), arrays)
            for shard in local_shards(state):
                first = shard.offsets[1]
                assert torch.equal(shard.values, full[:, first : first + shard.values.shape[1]].to(dtype))


def test_the_checkpoint_of_another_model_is_the_users_mistake(tmp_path):
    arrays = saved(tmp_path, {"t": torch.zeros(3)})
    for state in ({"t": torch.zeros(4)}, {"t": torch.zeros(3), "more": torch.zeros(1)}):
        with pytest.raises(UserError, match="checkpoint is of another model"):
            fill(local_shards(state), arrays)


@pytest.mark.gpu
def test_a_gpus_tensors_come_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "READ_BYTES", 1 << 20)
    full = torch.randn(100_000, 16, device="cuda")
    arrays = saved(tmp_path, {"t": full, "half": full.half()})
    state = {"t": torch.zeros_like(full), "half": torch.zeros_like(full, dtype=torch.float16)}
    fill(local_shards(state), arrays)
    assert torch.equal(state["t"], full)
    assert torch.equal(state["half"], full.half())
