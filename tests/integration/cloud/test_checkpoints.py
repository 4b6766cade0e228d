"""Checkpoints go to every kind of store and come back, under another sharding too."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from integration.cloud.conftest import HASTY
from integration.cloud.emulators import s3_env
from integration.cloud.faulty_proxy import proxy_to
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, init_from_local_shards
from torch.distributed._shard.sharding_spec import ShardMetadata

from embark.errors import Fault
from embark.store.object_store import open_store
from embark.trainers.torch.dcp_files import load, save


@pytest.fixture(autouse=True)
def _one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def table(full: torch.Tensor, num_shards: int) -> ShardedTensor:
    rows = len(full) // num_shards
    shards = [
        Shard(full[first : first + rows].clone(), ShardMetadata([first, 0], [rows, full.shape[1]], "rank:0/cpu"))
        for first in range(0, len(full), rows)
    ]
    return init_from_local_shards(shards, list(full.shape))


def state(full: torch.Tensor, num_shards: int, filled: bool) -> dict:
    dense = torch.arange(1000.0) if filled else torch.zeros(1000)
    return {"model": {"table": table(full if filled else torch.zeros_like(full), num_shards), "dense": dense},
            "optimizer": {"lr": 0.1 if filled else 0.0}}


def test_a_checkpoint_comes_back_under_another_sharding(store):
    full = torch.randn(120_000, 64)
    save(state(full, 2, filled=True), store, "checkpoints/step-000000100", threads=2)
    assert [entry.path.rpartition("/")[2] for entry in store.list("checkpoints")] == [
        "index.json", "rank-00000-00.bin", "rank-00000-01.bin",
    ]
    found = state(full, 3, filled=False)
    load(found, store, "checkpoints/step-000000100", threads=2)
    assert torch.equal(torch.cat([shard.tensor for shard in found["model"]["table"].local_shards()]), full)
    assert torch.equal(found["model"]["dense"], torch.arange(1000.0))
    assert found["optimizer"]["lr"] == 0.1


def test_a_save_that_fails_has_no_index_and_says_why(s3_emulator, environment):
    with proxy_to(s3_emulator.port) as proxy:
        environment(s3_env(proxy.port))
        store = open_store(f"s3://models/failing-{proxy.port}", HASTY)
        proxy.fault = lambda method, path: "503" if "rank-00000-01" in path else ""
        with pytest.raises(Fault, match=r"could not write s3://.*rank-00000-01\.bin in 4 attempts: SlowDown"):
            save(state(torch.randn(1000, 8), 2, filled=True), store, "c", threads=2)
        proxy.fault = lambda method, path: ""
        assert not store.exists("c/index.json")


def test_a_load_over_a_bad_line_is_whole(s3_emulator, environment):
    full = torch.randn(20_000, 64)
    with proxy_to(s3_emulator.port) as proxy:
        environment(s3_env(proxy.port))
        store = open_store(f"s3://models/line-{proxy.port}", HASTY)
        save(state(full, 2, filled=True), store, "c")
        # With pauses between: each may strike any request, and one request is sent four times at most.
        faults = iter(["cut", "", "reset", "", "503"])
        proxy.fault = lambda method, path: next(faults, "")
        found = state(full, 1, filled=False)
        load(found, store, "c")
        assert next(faults, None) is None
    assert torch.equal(found["model"]["table"].local_shards()[0].tensor, full)
