"""Checkpoints go to every kind of store and come back, under another sharding too."""

from __future__ import annotations

import numpy as np
import pytest
from integration.cloud.conftest import HASTY
from integration.cloud.emulators import s3_env
from integration.cloud.faulty_proxy import proxy_to

from embark.errors import Fault
from embark.store import ChecksumWriter, ObjectStore, open_store
from embark.store.checkpoint_arrays import INDEX, CheckpointArrays, Index, TensorChunk, unsharded, write_pieces

DENSE = np.arange(1000, dtype=np.float32)


def table(num_rows: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(num_rows, 64)).astype(np.float32)


def save(full: np.ndarray, store: ObjectStore, folder: str) -> None:
    half = len(full) // 2
    pieces = [TensorChunk("table", full.shape, (first, 0), full[first : first + half]) for first in (0, half)]
    entries = write_pieces(ChecksumWriter(store), folder, 0, [*pieces, unsharded("dense", DENSE)])
    store.write(f"{folder}/{INDEX}", Index(entries).to_json())


def test_a_checkpoint_comes_back_under_another_sharding(store):
    full = table(120_000)
    save(full, store, "checkpoints/step-000000100")
    assert [entry.path.rpartition("/")[2] for entry in store.list("checkpoints")] == [
        "index.json", "rank-00000-00.bin", "rank-00000-01.bin", "rank-00000-02.bin",
    ]
    arrays = CheckpointArrays(store, "checkpoints/step-000000100")
    thirds = [arrays.rows("table", first, first + 40_000) for first in (0, 40_000, 80_000)]
    assert np.array_equal(np.concatenate(thirds), full)
    assert np.array_equal(arrays.tensor("dense", (1000,)), DENSE)


def test_a_save_that_fails_has_no_index_and_says_why(s3_emulator, environment):
    with proxy_to(s3_emulator.port) as proxy:
        environment(s3_env(proxy.port))
        store = open_store(f"s3://models/failing-{proxy.port}", HASTY)
        proxy.fault = lambda method, path: "503" if "rank-00000-01" in path else ""
        with pytest.raises(Fault, match=r"could not write s3://.*rank-00000-01\.bin in 4 attempts: SlowDown"):
            save(table(1000), store, "c")
        proxy.fault = lambda method, path: ""
        assert not store.exists("c/index.json")


def test_a_load_over_a_bad_line_is_complete(s3_emulator, environment):
    full = table(20_000)
    with proxy_to(s3_emulator.port) as proxy:
        environment(s3_env(proxy.port))
        store = open_store(f"s3://models/line-{proxy.port}", HASTY)
        save(full, store, "c")
        # With pauses between: each may strike any request, and one request is sent four times at most.
        faults = iter(["cut", "", "reset", "", "503"])
        proxy.fault = lambda method, path: next(faults, "")
        found = CheckpointArrays(store, "c").tensor("table", full.shape)
        assert next(faults, None) is None
    assert np.array_equal(found, full)
