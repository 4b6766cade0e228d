"""A model on a GPU scores as it does on a CPU. Without a GPU the same steps run here, kernels in Triton's interpreter;
with one, run by hand: pytest -m gpu."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from exported_runs import EditedRun, save_run

from embark import export_run
from embark.data.prepared import Rows
from embark.errors import UserError
from embark.export.artifact import DENSE, Artifact, open_artifact
from embark.serve.request_rows import JsonColumns
from embark.serve.served_model import ServedModel
from embark.serve.version_poller import VersionPoller, load_scorer
from embark.spec import resolve
from embark.spec.serve import ScoringDevice
from embark.trainers.torch import starter_model
from embark.trainers.torch.scoring.cpu_model import ExportedModel, lookup_of
from embark.trainers.torch.scoring.gpu_model import GpuModel, buckets
from embark.trainers.torch.scoring.gpu_tables import RESERVED_BYTES, GpuTables, check_memory, table_bytes

GIB = 1 << 30
TABLES = [{"name": "a", "rows": 70}, {"name": "tags", "rows": 40, "multi_hot": 3, "pooling": "mean"},
          {"name": "liked", "shares": "tags", "multi_hot": 2}, {"name": "b", "rows": 9}]
MODELS = {
    "dlrm": {"embedding_dim": 8, "bottom_mlp": [8], "top_mlp": [8], "num_dense": 3, "tables": TABLES},
    "without dense": {"embedding_dim": 4, "top_mlp": [], "num_dense": 0, "tables": TABLES},
    "dcnv2": {"kind": "dcnv2", "embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [8], "num_dense": 3,
              "num_cross_layers": 2, "cross_rank": 4, "tables": [*TABLES, {"name": "wide", "rows": 30, "dim": 12}]},
}
STATES = """
import torch

class States(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(()))

    def forward(self, dense, pooled):
        total = pooled["a"].sum(1) + self.bias
        return total if float(total.sum()) < 1e30 else total * 0
"""
gpu = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=["cpu", gpu])
def device(request):
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("Triton's kernels are compiled for the GPU here")
    return request.param


def exported(folder, model: dict, tables: str = "int8", seed: int = 0) -> Artifact:
    """With weights so small that few scores are 0 or 1."""
    spec = resolve({"name": "clicks", "model": model, "data": {"num_train_samples": 64}, "store": {"root": str(folder)},
                    "train": {"batch_size": 16}})
    artifact = open_artifact(export_run(save_run(spec, seed).uri, tables=tables).uri)
    for name, values in artifact.weights.items():
        if name.startswith(DENSE):
            values *= 0.2
    return artifact


def draw(artifact: Artifact, num_rows: int) -> Rows:
    rng, layout = np.random.default_rng(1), artifact.info.rows.layout
    lengths = tuple(rng.integers(feature.multi_hot + 1, size=num_rows) if feature.is_ragged else None
                    for feature in layout.features)
    ids = tuple(rng.integers(feature.rows, size=num_rows if own is None else own.sum())
                for feature, own in zip(layout.features, lengths, strict=True))
    return Rows(np.zeros(num_rows), rng.normal(size=(num_rows, len(layout.dense))).astype(np.float32), ids, lengths)


@pytest.mark.parametrize(("model", "tables"), [
    ("dlrm", "fp32"), ("dlrm", "fp16"), ("dlrm", "int8"), ("dlrm", "int4"), ("without dense", "int8"),
    ("dcnv2", "int4")])
def test_in_fp32_scores_are_those_of_the_cpu(tmp_path, device, model, tables):
    artifact = exported(tmp_path, MODELS[model], tables)
    rows = draw(artifact, 37)
    on_gpu = GpuModel(artifact, precision="fp32", max_batch_rows=16, device=device)
    expected = ExportedModel(artifact).score_encoded(rows)
    assert len(np.unique(expected)) > 30
    assert on_gpu.score_encoded(rows) == pytest.approx(expected, abs=2e-5)  # in three batches, the last one smaller
    assert on_gpu.score_encoded(rows.cut(0, 1)) == pytest.approx(expected[:1], abs=2e-5)
    assert on_gpu.score_encoded(rows.cut(0, 0)).shape == (0,)
    assert not on_gpu.not_captured


@pytest.mark.parametrize("model", ["dlrm", "dcnv2"])
def test_scores_in_tf32_are_those_of_the_cpu_within_the_rounding(tmp_path, device, model):
    check_rounded_scores(tmp_path, device, model, precision="tf32", tolerance=5e-3)


@pytest.mark.gpu  # Triton's interpreter does not multiply bf16.
@pytest.mark.parametrize("model", ["dlrm", "dcnv2"])
def test_scores_in_bf16_are_those_of_the_cpu_within_the_rounding(tmp_path, model):
    check_rounded_scores(tmp_path, "cuda", model, precision="bf16", tolerance=5e-2)


def check_rounded_scores(tmp_path, device, model, precision, tolerance) -> None:
    artifact = exported(tmp_path, MODELS[model])
    rows = draw(artifact, 16)
    found = GpuModel(artifact, precision=precision, max_batch_rows=16, device=device).score_encoded(rows)
    assert found == pytest.approx(ExportedModel(artifact).score_encoded(rows), abs=tolerance)


def test_an_custom_model_scores_as_on_the_cpu(tmp_path, device):
    file, code = tmp_path / "my_model.py", Path(starter_model.__file__).read_text()
    file.write_text(code)
    artifact = exported(tmp_path, {**MODELS["dlrm"], "kind": "my_model:MyModel", "code": code})
    rows = draw(artifact, 16)
    found = GpuModel(artifact, str(file), precision="fp32", max_batch_rows=16, device=device)
    assert found.score_encoded(rows) == pytest.approx(ExportedModel(artifact, str(file)).score_encoded(rows), abs=2e-5)


def test_the_kernel_looks_up_what_the_cpu_does(tmp_path, device):
    for dtype in ("fp32", "fp16", "int8", "int4"):
        artifact = exported(tmp_path / dtype, MODELS["dcnv2"], dtype)
        tables = GpuTables(artifact, torch.device(device))
        ids = torch.from_numpy(np.random.default_rng(2).integers(-1, 9, 16 * sum(tables.num_ids)).astype(np.int32))
        found = torch.full((16, tables.width), np.nan, device=device)
        tables.look_up(ids.to(device), found)
        expected = []
        for table, part in zip(artifact.info.model.table_list(), ids.split([16 * num for num in tables.num_ids]),
                               strict=True):
            is_id = part.view(16, -1) >= 0
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), is_id.sum(dim=1).cumsum(0)])
            expected.append(lookup_of(artifact, table)(part[part >= 0].long(), offsets))
        assert found.cpu().numpy() == pytest.approx(torch.cat(expected, dim=1).numpy(), abs=1e-5)


def test_an_id_that_no_table_has_gives_no_score_and_touches_no_other_row(tmp_path, device):
    artifact = exported(tmp_path, MODELS["dlrm"])
    rows = draw(artifact, 16)
    model = GpuModel(artifact, precision="fp32", max_batch_rows=16, device=device)
    expected = model.score_encoded(rows)
    ids = rows.ids[0].copy()
    ids[3] = 70
    found = model.score_encoded(replace(rows, ids=(ids, *rows.ids[1:])))
    assert np.flatnonzero(np.isnan(found)).tolist() == [3]
    assert np.array_equal(np.delete(found, 3), np.delete(expected, 3))


def test_batches_have_sizes_of_powers_of_two():
    assert buckets(1) == [16]
    assert buckets(100) == [16, 32, 64, 128]


def test_tables_that_do_not_fit_are_refused_with_the_type_that_would(tmp_path):
    artifact = exported(tmp_path, MODELS["dlrm"], "fp32")
    in_fp32, in_int8 = (table_bytes(artifact.info.model, dtype) for dtype in ("fp32", "int8"))
    assert in_fp32 > in_int8
    check_memory(artifact, RESERVED_BYTES + in_fp32, "the GPU")
    with pytest.raises(UserError, match=r"fp32 tables take .* and the GPU has .* for them") as caught:
        check_memory(artifact, RESERVED_BYTES + in_int8, "the GPU")
    assert "--tables int8" in caught.value.fix or "--tables fp16" in caught.value.fix
    with pytest.raises(UserError) as caught:
        check_memory(artifact, GIB, "the GPU")
    assert caught.value.fix == "--device cpu"


@pytest.mark.parametrize("tables", ["fp32", "int8"])
def test_deltas_are_written_into_the_tables_and_weights_that_graphs_read(tmp_path, device, tables):
    run, place = EditedRun(tmp_path, rows=4_000), str(tmp_path / "at")
    open_last = lambda: open_artifact(export_run(run.save(), place, tables=tables, delta=True).uri)  # noqa: E731
    model = GpuModel(open_last(), precision="fp32", max_batch_rows=16, device=device)
    rows, graphs = draw(model._artifact, 40), dict(model._graphs)
    kept = [*model._tables._stored.values(), *model._network.state_dict().values()]
    pointers = [one.data_ptr() for one in kept]
    for missed in (0, 0, 2):  # versions between this one and the next that it is asked for
        for _ in range(missed):
            open_last()
        artifact = open_last()
        assert model.advance(artifact)
        fresh = GpuModel(artifact, precision="fp32", max_batch_rows=16, device=device)
        assert np.array_equal(model.score_encoded(rows), fresh.score_encoded(rows))
        assert model.score_encoded(rows) == pytest.approx(ExportedModel(artifact).score_encoded(rows), abs=2e-5)
    kept = [*model._tables._stored.values(), *model._network.state_dict().values()]
    assert pointers == [one.data_ptr() for one in kept]
    assert model._graphs == graphs
    full = open_artifact(export_run(run.save(), place, tables=tables).uri)
    assert not model.advance(full)
    assert not model.advance(replace(artifact, identities=("other", *artifact.identities[1:])))  # the same folders
    assert model.advance(artifact)  # the version that it is


@pytest.mark.gpu
def test_a_server_on_a_gpu_takes_deltas_in_place_while_it_answers(tmp_path):
    run, place, device = EditedRun(tmp_path, rows=4_000), str(tmp_path / "at"), ScoringDevice("cuda", "fp32")
    asked = [{"dense_0": i / 9, "dense_1": -i, "a": 9 * i % 400, "b": i % 3} for i in range(40)]
    export_run(run.save(), place)
    served = ServedModel(load_scorer(place, None, device=device), load=lambda number, onto: load_scorer(
        place, number, device=device, onto=onto))
    poller = VersionPoller(place, served, 10.0)
    answers, stop, models = [], threading.Event(), []

    def ask() -> None:
        while not stop.is_set():
            found, = served.score([JsonColumns(asked)])
            answers.append((found.version, tuple(found.scores)))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        for version in range(2, 12):
            export_run(run.save(), place, delta=True)
            while served.artifact.version != version:  # a batch may still use the version before the last
                poller.poll()
            models.append(served.scorer.model)
            while answers[-1][0] != version:
                time.sleep(0.001)
    finally:
        stop.set()
        thread.join()
    assert len({id(one) for one in models}) < len(models) / 2  # two take turns, but where one was still in use
    expected = {number: tuple(load_scorer(place, number, device=device).score([JsonColumns(asked)])[0].scores)
                for number in range(1, 12)}
    assert {version for version, _ in answers} >= set(range(2, 12))
    assert all(scores == expected[version] for version, scores in answers)


@pytest.mark.gpu
def test_an_uncapturable_custom_model_runs_without_graphs(tmp_path, caplog):
    file = tmp_path / "states.py"
    file.write_text(STATES)
    artifact = exported(tmp_path, {**MODELS["dlrm"], "kind": "states:States", "code": STATES})
    rows = draw(artifact, 40)
    with caplog.at_level(logging.WARNING):
        found = GpuModel(artifact, str(file), precision="fp32", max_batch_rows=32)
    assert "cannot be captured" in caplog.text
    assert found.not_captured
    assert found.not_captured in found.device
    expected = ExportedModel(artifact, str(file)).score_encoded(rows)
    for _ in range(3):
        assert found.score_encoded(rows) == pytest.approx(expected, abs=2e-5)
    another = exported(tmp_path / "b", MODELS["dlrm"])  # what failed leaves nothing behind
    captured = GpuModel(another, precision="fp32", max_batch_rows=32)
    assert captured._graphs
    assert captured.score_encoded(rows) == pytest.approx(ExportedModel(another).score_encoded(rows), abs=2e-5)


@pytest.mark.gpu
def test_a_new_version_is_captured_while_the_old_one_answers(tmp_path):
    old, new = (exported(tmp_path / str(seed), MODELS["dlrm"], seed=seed) for seed in (1, 2))
    rows, stop, wrong = draw(old, 100), threading.Event(), []
    answering = GpuModel(old, max_batch_rows=128)
    expected = answering.score_encoded(rows)
    num_answers = 0

    def answer() -> None:
        nonlocal num_answers
        while not stop.is_set():
            num_answers += 1
            wrong.extend([] if np.array_equal(answering.score_encoded(rows), expected) else [num_answers])

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        loaded = [GpuModel(new, max_batch_rows=1024) for _ in range(3)]
    finally:
        stop.set()
        thread.join()
    assert num_answers > 0
    assert not wrong
    for model in loaded:
        assert model._graphs
        assert model.score_encoded(rows) == pytest.approx(ExportedModel(new).score_encoded(rows), abs=2e-2)
