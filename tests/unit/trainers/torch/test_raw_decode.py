"""Raw batches decoded on the device: what the host would have made of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from prepared_rows import FIXED, RAGGED, make_prepared

from embark.data import Loader, open_source, resolve_from_data
from embark.trainers.torch.batch import RawDecoder, ToDevice, pinned
from embark.trainers.torch.engines.cuda_graph.batch_layout import RowOrder


@pytest.mark.parametrize("shuffle", ["rows", "blocks", "none"])
@pytest.mark.parametrize("bits", [16, 32])
def test_a_raw_batch_decodes_to_what_the_host_decodes(tmp_path: Path, shuffle: str, bits: int):
    made = make_prepared(tmp_path, dense_bits=bits)
    source = made.open(shuffle=shuffle)
    names = [f.name for f in FIXED]
    for start, stop in [(0, 1_000), (60, 70), (64, 128), (130, 500), (999, 1_000)]:
        decoder = RawDecoder(made.layout, names, stop - start, torch.device("cpu"))
        buffer = np.full(decoder.size_bytes, 0xEE, np.uint8)
        source.train_raw([(2, start, stop)], buffer)
        dense, ids, label = decoder.decode(torch.from_numpy(buffer))
        batch = source.train_rows(2, start, stop)
        assert (dense.dtype, ids.dtype, label.dtype) == (torch.float32, torch.int32, torch.float32)
        np.testing.assert_array_equal(dense, batch.dense)
        np.testing.assert_array_equal(ids, batch.ids)
        np.testing.assert_array_equal(label, batch.label)


def test_each_of_several_batches_in_one_buffer_decodes_to_its_own(tmp_path: Path):
    made = make_prepared(tmp_path, dense_bits=16)
    source = made.open()
    decoder = RawDecoder(made.layout, [f.name for f in FIXED], 70, torch.device("cpu"), num_batches=4)
    buffer = np.full(decoder.size_bytes, 0xEE, np.uint8)
    ranges = [(1, 30, 100), (1, 100, 170), (2, 0, 70)]
    source.train_raw(ranges, buffer, capacity=4)
    for number, one in enumerate(ranges):
        batch = source.train_rows(*one)
        for found, expected in zip(decoder.decode(torch.from_numpy(buffer), number),
                                   (batch.dense, batch.ids, batch.label), strict=True):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("ranges", [[(1, 30, 180), (2, 64, 214)], [(1, 60, 210), (1, 210, 360)]])
def test_the_device_brings_rows_of_blocks_into_order(tmp_path: Path, ranges: list[tuple[int, ...]], device: str):
    """Blocks that are wanted whole, for a part, and for less than a quarter; more of them than there is space for."""
    made = make_prepared(tmp_path, dense_bits=16)  # in blocks of 64
    source = made.open(shuffle="rows")
    assert (source.spare_rows(128), source.spare_rows(127)) == (128, 0)
    assert made.open(shuffle="blocks").spare_rows(1_000) == 0
    decoder = RawDecoder(made.layout, [f.name for f in FIXED], 150, torch.device(device), 2, spare_rows=128)
    row_order = RowOrder(made.layout.row_order(300, 128), 64, torch.device(device))
    buffer = np.full(decoder.size_bytes, 0xEE, np.uint8)
    source.train_raw(ranges, buffer, capacity=2, spare_rows=128)
    slot = torch.empty(decoder.size_bytes, dtype=torch.uint8, device=device)
    for _ in range(3):  # on a GPU at once, captured, replayed
        slot.copy_(torch.from_numpy(buffer))
        row_order(slot)
        for number, one in enumerate(ranges):
            batch = source.train_rows(*one)
            wanted = batch.dense, batch.ids, batch.label
            for found, expected in zip(decoder.decode(slot, number), wanted, strict=True):
                np.testing.assert_array_equal(found.cpu(), expected)


@pytest.mark.parametrize("names", [["huge"], ["pair", "edge", "wide", "middle", "many"], ["tiny", "small"]])
def test_some_features_in_an_order_of_the_models_own(tmp_path: Path, names: list[str]):
    made = make_prepared(tmp_path, num_dense=0)
    sizes = {f.name: f for f in FIXED}
    tables = [{"name": n, "rows": sizes[n].rows, "multi_hot": sizes[n].multi_hot} for n in names]
    source = made.open(model={"tables": tables})
    decoder = RawDecoder(made.layout, names, 90, torch.device("cpu"))
    buffer = np.zeros(decoder.size_bytes, np.uint8)
    source.train_raw([(0, 30, 120)], buffer)
    dense, ids, _ = decoder.decode(torch.from_numpy(buffer))
    assert dense.shape == (90, 0)
    np.testing.assert_array_equal(ids, source.train_rows(0, 30, 120).ids)


def test_ragged_features_have_no_raw_batches(tmp_path: Path):
    made = make_prepared(tmp_path, RAGGED)
    with pytest.raises(ValueError, match="different numbers of ids"):
        RawDecoder(made.layout, ["a"], 10, torch.device("cpu"))
    with pytest.raises(ValueError, match="different numbers of ids"):
        made.open().train_raw([(0, 0, 10)], np.zeros(10_000, np.uint8))


@pytest.mark.gpu
def test_on_a_gpu_and_in_a_graph_it_decodes_the_same(tmp_path: Path):
    made = make_prepared(tmp_path, dense_bits=16)
    source = made.open()
    device = torch.device("cuda")
    decoder = RawDecoder(made.layout, [f.name for f in FIXED], 128, device)
    on_device = torch.zeros(decoder.size_bytes, dtype=torch.uint8, device=device)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        decoder.decode(on_device)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoded = decoder.decode(on_device)
    buffer = torch.empty(decoder.size_bytes, dtype=torch.uint8, pin_memory=True)
    for start in (0, 128, 500):
        source.train_raw([(0, start, start + 128)], buffer.numpy())
        on_device.copy_(buffer)
        graph.replay()
        batch = source.train_rows(0, start, start + 128)
        for found, wanted in zip(decoded, (batch.dense, batch.ids, batch.label), strict=True):
            np.testing.assert_array_equal(found.cpu(), wanted)


@pytest.mark.gpu
def test_reused_pinned_memory_gives_the_right_batches(tmp_path: Path):
    made = make_prepared(tmp_path)
    device = torch.device("cuda", 0)
    spec = resolve_from_data(made.spec())
    source, plain = open_source(spec, allocate=pinned(device)), open_source(spec)
    to_device = ToDevice([f.name for f in FIXED], device)
    batch = source.train_rows(0, 0, 96)
    ready = to_device(batch)
    assert ready.dense.is_pinned()
    assert ready.sparse.values().data_ptr() == batch.ids.ctypes.data, "pinned without a copy"
    copies = []
    for _ in range(50):
        with Loader(source, batch_size=96, rank=0, world_size=1, start_step=0, stop_step=10, num_threads=2) as loader:
            copies.append([one.to(device, non_blocking=True) for one in map(to_device, loader)])
    wanted = [plain.train_rows(0, 96 * step, 96 * step + 96) for step in range(10)]
    for steps in copies:
        for found, batch in zip(steps, wanted, strict=True):
            np.testing.assert_array_equal(found.dense.cpu(), batch.dense)
            np.testing.assert_array_equal(found.sparse.values().cpu(), batch.ids)
            np.testing.assert_array_equal(found.label.cpu(), batch.label)
