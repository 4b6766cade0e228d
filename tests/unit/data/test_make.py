"""Made data is the synthetic source's samples, complete or not there."""

from __future__ import annotations

import numpy as np
import pytest

from embark.data import make as making
from embark.data.make import make
from embark.data.prepared import MANIFEST
from embark.data.prepared.cache import open_prepared
from embark.data.synthetic import SyntheticSource
from embark.errors import Fault, UserError
from embark.spec import resolve

NUM_TRAIN, NUM_EVAL = 70_000, 5_000


def spec(tmp_path, **data):
    return resolve({
        "model": {"num_dense": 3, "embedding_dim": 8, "tables": [
            {"name": "user", "rows": 70_000}, {"name": "shop", "rows": 300},
            {"name": "tags", "rows": 90, "multi_hot": 4}]},
        "data": {"kind": "prepared", "path": str(tmp_path), "shuffle": "none", "num_train_samples": NUM_TRAIN,
                 "num_eval_samples": NUM_EVAL, **data},
    })


def same(batch, other):
    for name in ("dense", "ids", "lengths", "label"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(other, name))


@pytest.mark.parametrize("ragged", [False, True], ids=["fixed", "ragged"])
def test_made_data_is_the_synthetic_source_s(tmp_path, ragged):
    run = spec(tmp_path, ragged=ragged)
    manifest = make(run, tmp_path).manifest
    assert manifest.num_rows("train") == NUM_TRAIN
    made, drawn = open_prepared(run), SyntheticSource(run.model, run.data)
    assert (made.num_train_samples, made.num_eval_samples) == (NUM_TRAIN, NUM_EVAL)
    for start, stop in ((0, 1_000), (32_000, 34_000), (NUM_TRAIN - 1_000, NUM_TRAIN)):
        same(made.train_rows(0, start, stop), drawn.train_rows(0, start, stop))
    same(made.eval_rows(0, NUM_EVAL), drawn.eval_rows(0, NUM_EVAL))
    assert made.train_rows(0, 0, 10).is_fixed is not ragged


def test_several_processes_write_the_same_bytes_as_one(tmp_path, monkeypatch):
    one, two = tmp_path / "one", tmp_path / "two"
    monkeypatch.setattr(making, "PART_BYTES", 1 << 20)
    reports = []
    make(spec(one), one)
    monkeypatch.setattr(making, "MIN_ROWS_TO_SHARE", 0)
    run = spec(two, prepare={"num_workers": 2})
    make(run, two, on_progress=reports.append)
    files = sorted(p.relative_to(one) for p in one.rglob("*") if p.is_file())
    assert files == sorted(p.relative_to(two) for p in two.rglob("*") if p.is_file())
    assert len(files) >= 5
    assert all((one / f).read_bytes() == (two / f).read_bytes() for f in files)
    assert [p.done for p in reports if p.stage == "making"][-1] == NUM_TRAIN + NUM_EVAL


def test_existing_data_is_not_replaced_unless_forced(tmp_path):
    make(spec(tmp_path), tmp_path)
    before = (tmp_path / MANIFEST).read_text()
    with pytest.raises(UserError, match="holds prepared data already"):
        make(spec(tmp_path, seed=2), tmp_path)
    assert (tmp_path / MANIFEST).read_text() == before
    (tmp_path / "train" / "left-over.bin").write_bytes(b"x")
    manifest = make(spec(tmp_path, seed=2), tmp_path, force=True).manifest
    assert (tmp_path / MANIFEST).read_text() != before
    listed = {part.file for parts in manifest.parts.values() for part in parts}
    assert {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.bin")} == listed


def test_a_make_that_breaks_leaves_no_manifest(tmp_path, monkeypatch):
    make(spec(tmp_path), tmp_path)

    def breaks(*_args, **_words):
        raise OSError("no space")

    monkeypatch.setattr(making, "write_atomic", breaks)
    with pytest.raises(Fault, match="no space"):
        make(spec(tmp_path), tmp_path, force=True)
    assert not (tmp_path / MANIFEST).exists()


def test_an_unfinished_preparation_is_not_overwritten(tmp_path):
    (tmp_path / ".preparing").mkdir()
    with pytest.raises(UserError, match="unfinished preparation"):
        make(spec(tmp_path), tmp_path)
