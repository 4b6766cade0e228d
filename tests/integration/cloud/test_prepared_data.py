"""Prepared data read straight from every kind of store gives the rows of the folder it was copied from."""

from __future__ import annotations

import numpy as np
import pytest
from prepared_rows import RAGGED, make_prepared

from embark.data import Loader, open_source, resolve_from_data
from embark.errors import DataError
from embark.spec import resolve


def test_batches_from_a_store_are_those_of_the_folder(store, tmp_path):
    made = make_prepared(tmp_path / "made", RAGGED, part_bytes=3_000)
    files = [file for file in made.path.rglob("*") if file.is_file()]
    store.upload_many([(file, file.relative_to(made.path).as_posix()) for file in files])
    size_gb = 3 * max(part.size_bytes for part in made.manifest.parts["train"]) / 1e9
    raw = {"data": {"kind": "prepared", "path": store.uri, "cache_dir": str(tmp_path / "cache"), "cache_gb": size_gb}}
    spec = resolve_from_data(resolve(raw))
    found = open_source(spec)
    near = made.open()
    with Loader(found, batch_size=100, rank=0, world_size=1, start_step=0, stop_step=12, num_threads=2) as loader:
        for step, batch in enumerate(loader):
            epoch, start = divmod(step, 10)
            wanted = near.train_rows(epoch, 100 * start, 100 * start + 100)
            np.testing.assert_array_equal(batch.ids, wanted.ids)
            np.testing.assert_array_equal(batch.lengths, wanted.lengths)


def test_missing_or_shortened_part_in_the_store_is_reported_at_once(store, tmp_path):
    made = make_prepared(tmp_path / "made")
    first, second = made.manifest.parts["train"][:2]
    files = [file for file in made.path.rglob("*") if file.is_file() and file != made.path / first.file]
    store.upload_many([(file, file.relative_to(made.path).as_posix()) for file in files])
    store.write(second.file, b"short")
    raw = {"data": {"kind": "prepared", "path": store.uri, "cache_dir": str(tmp_path / "cache")}}
    spec = resolve_from_data(resolve(raw))
    with pytest.raises(DataError, match="incomplete") as caught:
        open_source(spec)
    assert f"{first.file} is missing" in str(caught.value)
    assert f"{second.file} has 5 bytes" in str(caught.value)
