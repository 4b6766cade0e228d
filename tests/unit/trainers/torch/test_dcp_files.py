"""A checkpoint comes back as it went, under any sharding, reads no more than it needs, and runs nothing it reads."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, init_from_local_shards
from torch.distributed._shard.sharding_spec import ShardMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard as ShardDim
from torch.distributed.tensor import distribute_tensor

from embark.errors import Fault, UserError
from embark.store.errors import NotFound
from embark.store.local_store import LocalStore
from embark.trainers.torch import dcp_files, dcp_spans
from embark.trainers.torch.dcp_files import load, reader, save, writer


@pytest.fixture(autouse=True)
def _one_rank():
    was_there = dist.is_initialized()
    if not was_there:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if not was_there:
        dist.destroy_process_group()


def by_rows(full: torch.Tensor, *cuts: int) -> ShardedTensor:
    edges = [0, *cuts, len(full)]
    return sharded(full, [((a, 0), (b - a, full.shape[1])) for a, b in pairwise(edges)])


def by_columns(full: torch.Tensor, *cuts: int) -> ShardedTensor:
    edges = [0, *cuts, full.shape[1]]
    return sharded(full, [((0, a), (len(full), b - a)) for a, b in pairwise(edges)])


def sharded(full: torch.Tensor, parts: list[tuple[tuple[int, int], tuple[int, int]]]) -> ShardedTensor:
    shards = [
        Shard(full[r : r + rows, c : c + columns].clone(), ShardMetadata([r, c], [rows, columns], "rank:0/cpu"))
        for (r, c), (rows, columns) in parts
    ]
    return init_from_local_shards(shards, list(full.shape))


def joined(tensor: ShardedTensor) -> torch.Tensor:
    full = torch.full(tensor.size(), -1.0)
    for shard in tensor.local_shards():
        (r, c), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        full[r : r + rows, c : c + columns] = shard.tensor
    return full


class Counting(LocalStore):
    """Notes what is read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.ranges: list[tuple[str, int, int]] = []

    def read_into(self, path: str, start: int, into: memoryview) -> None:
        self.ranges.append((path, start, len(into)))
        super().read_into(path, start, into)


TENSORS = {
    "f32": torch.randn(7, 5), "bf16": torch.randn(6).bfloat16(), "f16": torch.randn(2, 3, 4).half(),
    "i8": torch.arange(3, dtype=torch.int8), "i64": torch.arange(9).reshape(3, 3), "bool": torch.tensor([True, False]),
    "f64": torch.randn(3, dtype=torch.float64), "scalar": torch.tensor(2.5), "empty": torch.empty(0, 4),
    "turned": torch.randn(4, 6).t(), "part": torch.randn(10, 10)[2:5, 1:7],
    "parameter": torch.nn.Parameter(torch.ones(3)), "c64": torch.randn(3, dtype=torch.complex64),
    "f8": torch.randn(4).to(torch.float8_e4m3fn),
}
VALUES = {"lr": 0.1, "betas": (0.9, 0.99), "name": "é", "steps": [1, 2, {"x": None}], "shape": torch.Size([2])}


@pytest.mark.parametrize("threads", [1, 3])
def test_every_kind_of_tensor_and_value_comes_back(tmp_path, threads):
    save({"model": TENSORS, "optimizer": {"groups": [VALUES]}}, tmp_path, "step-1", threads)
    empty = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    others = {"lr": 0.0, "betas": (0.0, 0.0), "name": "", "steps": [0, 0, {"x": 1}], "shape": torch.Size([1])}
    found = {"model": empty, "optimizer": {"groups": [others]}}
    load(found, tmp_path, "step-1", threads)
    for name, tensor in TENSORS.items():
        assert torch.equal(found["model"][name].view(torch.uint8) if name == "f8" else found["model"][name],
                           tensor.view(torch.uint8) if name == "f8" else tensor), name
    assert found["optimizer"]["groups"] == [VALUES]


@pytest.mark.parametrize("target", ["rows", "more rows", "columns", "whole", "dtensor", "f64", "turned"])
@pytest.mark.parametrize("source", ["rows", "columns", "whole"])
def test_any_sharding_loads_into_any_other(tmp_path, source, target, monkeypatch):
    monkeypatch.setattr(dcp_spans, "PIECE_BYTES", 128)
    full, zero = torch.randn(100, 8), torch.zeros(100, 8)
    make = {
        "rows": lambda full: by_rows(full, 30), "more rows": lambda full: by_rows(full, 10, 50, 90),
        "columns": lambda full: by_columns(full, 3), "whole": lambda full: full.clone(),
        "dtensor": lambda full: distribute_tensor(full, init_device_mesh("cpu", (1,)), [ShardDim(0)]),
        "f64": lambda full: full.double(), "turned": lambda full: full.t().contiguous().t(),
    }
    save({"t": make[source](full)}, tmp_path)
    state = {"t": make[target](zero)}
    load(state, tmp_path)
    tensor = state["t"]
    found = joined(tensor) if isinstance(tensor, ShardedTensor) else getattr(tensor, "to_local", lambda: tensor)()
    assert torch.equal(found.float(), full)


def test_dtensors_come_back(tmp_path):
    mesh = init_device_mesh("cpu", (1,))
    full = torch.randn(10, 4)
    save({"t": distribute_tensor(full, mesh, [ShardDim(0)])}, tmp_path)
    state = {"t": distribute_tensor(torch.zeros(10, 4), mesh, [ShardDim(0)])}
    load(state, tmp_path)
    assert torch.equal(state["t"].to_local(), full)


def test_a_rank_reads_only_its_own_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(dcp_spans, "GAP_BYTES", 0)
    full = torch.randn(1000, 16)
    save({"t": by_rows(full, 500)}, tmp_path, threads=1)
    object_store = Counting(tmp_path)
    # As at another number of ranks: this one holds rows 400 to 600 and nothing else.
    mine = torch.zeros(200, 16)
    plan = dcp.DefaultLoadPlanner()
    source = reader(object_store)
    metadata = source.read_metadata()
    source.set_up_storage_reader(metadata, True)
    part = ShardedTensorOfOthers(mine, 400, 1000)
    items = dcp.planner_helpers.create_read_items_for_chunk_list("t", metadata.state_dict_metadata["t"], part.chunks)
    monkeypatch.setattr(plan, "resolve_tensor", part.resolve, raising=False)
    source.read_data(dcp.planner.LoadPlan(items), plan)
    assert torch.equal(mine, full[400:600])
    assert sum(length for _, _, length in object_store.ranges) == 200 * 16 * 4


class ShardedTensorOfOthers:
    def __init__(self, mine: torch.Tensor, first_row: int, num_rows: int) -> None:
        self.mine, self.first_row = mine, first_row
        self.chunks = [dcp.metadata.ChunkStorageMetadata(torch.Size([first_row, 0]), mine.shape)]

    def resolve(self, item) -> torch.Tensor:
        return self.mine.narrow(0, item.dest_offsets[0], item.lengths[0])


def test_small_tensors_that_lie_together_are_read_at_once(tmp_path):
    state = {str(number): torch.full((number + 1,), number, dtype=torch.int8) for number in range(50)}
    save(state, tmp_path, threads=1)
    object_store = Counting(tmp_path)
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    load(found, object_store)
    assert len(object_store.ranges) == 1
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_a_table_larger_than_a_piece_goes_and_comes_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(dcp_spans, "PIECE_BYTES", 1000)
    monkeypatch.setattr(dcp_spans, "JOINED_BYTES", 1000)
    monkeypatch.setattr(dcp_files, "PIECE_BYTES", 1000)
    full = torch.randn(300, 7)
    save({"t": full}, tmp_path)
    object_store = Counting(tmp_path)
    state = {"t": torch.zeros(300, 7)}
    load(state, object_store)
    assert torch.equal(state["t"], full)
    assert len(object_store.ranges) > 5
    assert max(length for *_, length in object_store.ranges) <= 1000


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def test_the_evil_pickle_would_do_its_work(tmp_path):
    pickle.loads(pickle.dumps(Evil(tmp_path / "done")))
    assert (tmp_path / "done").exists()


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_value_that_would_run_code_is_refused_and_does_not_run(tmp_path, protocol):
    save({"x": 1}, tmp_path / "c")
    evil = tmp_path / "evil"
    torch.save(Evil(tmp_path / "done"), evil, pickle_protocol=protocol)
    plant(tmp_path / "c", evil.read_bytes())
    with pytest.raises(Fault, match="'x' is not a plain value"):
        load({"x": 0}, tmp_path / "c")
    assert not (tmp_path / "done").exists()


def test_a_bare_pickle_is_refused_and_does_not_run(tmp_path):
    save({"x": 1}, tmp_path / "c")
    plant(tmp_path / "c", pickle.dumps(Evil(tmp_path / "done")))
    with pytest.raises(Fault, match="'x' is not a plain value"):
        load({"x": 0}, tmp_path / "c")
    assert not (tmp_path / "done").exists()


def plant(folder: Path, data: bytes) -> None:
    """Make the checkpoint's only value be `data`."""
    index = json.loads((folder / "index.json").read_text())
    (file,) = folder.glob("*.bin")
    file.write_bytes(data)
    index["values"]["x"]["bytes"] = len(data)
    (folder / "index.json").write_text(json.dumps(index))


def test_a_pickled_index_is_refused_and_does_not_run(tmp_path):
    save({"x": 1}, tmp_path / "c")
    for name in ("index.json", ".metadata"):
        (tmp_path / "c" / name).write_bytes(pickle.dumps(Evil(tmp_path / "done")))
    with pytest.raises(Fault, match="not the index of a checkpoint"):
        load({"x": 0}, tmp_path / "c")
    assert not (tmp_path / "done").exists()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("format",), "other-9"), (("tensors",), []), (("tensors", "t", "dtype"), "nn"),
        (("tensors", "t", "size"), [1]), (("tensors", "t", "chunks", 0, "file"), "../../secret"),
        (("tensors", "t", "chunks", 0, "file"), "/etc/passwd"), (("tensors", "t", "chunks", 0, "start"), -1),
        (("tensors", "t", "chunks", 0, "bytes"), 3), (("tensors", "t", "chunks", 0, "sizes"), [True, 4]),
        (("tensors", "t", "chunks", 0, "offsets"), [5, 5]),
    ],
)
def test_a_changed_index_is_refused(tmp_path, path, value):
    save({"t": torch.zeros(3, 4)}, tmp_path)
    index = json.loads((tmp_path / "index.json").read_text())
    place = index
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(Fault, match="not the index of a checkpoint"):
        load({"t": torch.zeros(3, 4)}, tmp_path)


def test_a_file_that_was_cut_is_a_fault(tmp_path):
    save({"t": torch.zeros(300, 4)}, tmp_path)
    (file,) = tmp_path.glob("*.bin")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(Fault, match="1 bytes before what was asked"):
        load({"t": torch.zeros(300, 4)}, tmp_path)


def test_no_checkpoint_is_missing_and_a_broken_save_says_which_rank(tmp_path, monkeypatch):
    with pytest.raises(NotFound, match=r"index\.json"):
        load({"t": torch.zeros(3)}, tmp_path)
    monkeypatch.setattr(dcp_files, "_pieces", lambda tensor: 1 / 0)
    with pytest.raises(Fault, match="rank 0 could not save the checkpoint: ZeroDivisionError"):
        save({"t": torch.zeros(3)}, tmp_path)
    assert not (tmp_path / "index.json").exists()


@pytest.mark.parametrize("state", [{"t": torch.zeros(4)}, {"t": torch.zeros(3), "more": torch.zeros(1)}])
def test_the_checkpoint_of_another_model_is_the_users_mistake(tmp_path, state):
    save({"t": torch.zeros(3)}, tmp_path)
    with pytest.raises(UserError, match="checkpoint is of another model"):
        load(state, tmp_path)


def test_it_serves_dcp_directly_and_in_the_background(tmp_path):
    state = {"t": torch.arange(10.0), "lr": 0.1}
    dcp.async_save(state, storage_writer=writer(tmp_path, "a")).result()
    found = {"t": torch.zeros(10), "lr": 0.0}
    dcp.load(found, storage_reader=reader(tmp_path, "a"))
    assert torch.equal(found["t"], state["t"])
    assert found["lr"] == 0.1


@pytest.mark.gpu
def test_a_gpus_tensors_go_and_come_in_pieces(tmp_path, monkeypatch):
    for module in (dcp_spans, dcp_files):
        monkeypatch.setattr(module, "PIECE_BYTES", 1 << 20)
    full = torch.randn(100_000, 16, device="cuda")
    save({"t": full, "half": full.bfloat16()}, tmp_path)
    state = {"t": torch.zeros_like(full), "half": torch.zeros_like(full, dtype=torch.bfloat16)}
    load(state, tmp_path)
    assert torch.equal(state["t"], full)
    assert torch.equal(state["half"], full.bfloat16())


RANKS = """
import os, sys, torch, torch.distributed as dist
from pathlib import Path
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards
from torch.distributed._shard.sharding_spec import ShardMetadata
from embark.trainers.torch.dcp_files import load, save

rank, world, verb, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{verb}-{world}", rank=rank, world_size=world)
full = torch.arange(90.0).reshape(30, 3)
rows = 30 // world
first = rank * rows
mine = full[first : first + rows].clone() if verb == "save" else torch.zeros(rows, 3)
meta = ShardMetadata([first, 0], [rows, 3], f"rank:{rank}/cpu")
state = {"t": init_from_local_shards([Shard(mine, meta)], [30, 3]), "same": torch.full((5,), 7.0 * (verb == "save"))}
(save if verb == "save" else load)(state, folder / "c")
assert torch.equal(mine, full[first : first + rows]), mine
assert state["same"].sum() == 35
dist.destroy_process_group()
os._exit(0)  # what was to be shown is shown; torch's own threads now and then abort an ordinary exit
"""


@pytest.mark.slow
def test_two_ranks_save_and_three_load(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    for verb, world in (("save", 2), ("load", 3)):
        ranks = [
            subprocess.Popen([sys.executable, "-W", "ignore", script, str(rank), str(world), verb, tmp_path],
                             env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True)
            for rank in range(world)
        ]
        said = [rank.communicate(timeout=120)[1] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0] * world, said
    assert {path.name[:10] for path in (tmp_path / "c").glob("*.bin")} == {"rank-00000", "rank-00001"}
