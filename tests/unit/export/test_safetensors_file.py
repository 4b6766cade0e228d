"""The files are safetensors: the format's own library reads them, and hostile headers are refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from embark.errors import DataError
from embark.export.safetensors_file import TensorSource, file_of, in_memory, map_file

ARRAYS = {"keys": np.arange(5, dtype=np.uint64), "odd": np.arange(9, dtype=np.uint8).reshape(3, 3),
          "half": np.ones((2, 1), np.float16), "none": np.zeros((0, 4), np.float32),
          "ids": np.arange(7, dtype=np.int32), "mask": np.array([True, False]), "wide": np.ones(3)}


def write(path, tensors, metadata=None):
    size, pieces = file_of(tensors, metadata or {"format": "pt"})
    path.write_bytes(b"".join(pieces))
    assert path.stat().st_size == size


def test_the_library_reads_what_is_written_and_the_other_way_round(tmp_path):
    rows = np.arange(12, dtype=np.float32).reshape(6, 2)
    in_pieces = TensorSource("table", rows.dtype, rows.shape, lambda: iter([rows[:1], rows[1:5], rows[5:]]))
    write(tmp_path / "a", [*(in_memory(*item) for item in ARRAYS.items()), in_pieces])
    save_file({**ARRAYS, "table": rows}, tmp_path / "b")
    for found in (load_file(tmp_path / "a"), map_file(tmp_path / "a"), map_file(tmp_path / "b")):
        assert found.keys() == {*ARRAYS, "table"}
        assert all(np.array_equal(found[name], values) and found[name].dtype == values.dtype
                   for name, values in {**ARRAYS, "table": rows}.items())


def test_every_array_is_aligned(tmp_path):
    write(tmp_path / "a", [in_memory(*item) for item in ARRAYS.items()])
    assert all(array.flags.aligned for array in map_file(tmp_path / "a").values())


@pytest.mark.parametrize("entry", [
    {"dtype": "F32", "shape": [2], "data_offsets": [0, 80]}, {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
    {"dtype": "F32", "shape": [-2], "data_offsets": [0, -8]}, {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
    {"dtype": "O", "shape": [1], "data_offsets": [0, 8]},
    {"dtype": "F32", "shape": [1 << 62, 4], "data_offsets": [0, 8]},
    {"dtype": "F32"}, [1], "text", None,
])
def test_a_hostile_header_is_refused(tmp_path, entry):
    header = json.dumps({"a": entry}).encode()
    (tmp_path / "a").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(DataError, match="is not a safetensors file"):
        map_file(tmp_path / "a")


@pytest.mark.parametrize("data", [b"", b"1234", b"\xff" * 9, (2).to_bytes(8, "little") + b"[]",
                                  (3).to_bytes(8, "little") + b"{{{"])
def test_what_is_none_is_refused(tmp_path, data):
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(DataError, match="is not a safetensors file"):
        map_file(tmp_path / "a")
