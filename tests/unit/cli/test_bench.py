"""`embark bench`: one table, the peers in it, a ratio, and what the device could do."""

from __future__ import annotations

import json

import pytest
from captured_kinds import KINDS, sets_of

from embark.__main__ import run

SIZES = ("train.batch_size=64", "model.num_tables=3", "model.rows_per_table=100", "model.embedding_dim=8",
         "model.bottom_mlp=[16]", "model.top_mlp=[16]")
MODEL = tuple(word for size in SIZES for word in ("-s", size))
TINY = (*MODEL, "--seconds", "0.01")
SMALL = ("-s", "place.device=cpu", *TINY)


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "220")


@pytest.mark.parametrize("engine", ["pipeline", "cuda_graph"])
def test_embark_and_stock_torchrec_are_measured_in_one_run(capsys, engine):
    assert run(["bench", "laptop", *SMALL, "-s", f"train.engine={engine}", "--json", "-s", "train.precision=bf16"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = [row["name"] for row in found["rows"]]
    assert names == ["stock TorchRec, fp32", "stock TorchRec, bf16 autocast", f"Embark, {engine}, bf16, from memory"]
    ours = found["rows"][-1]
    for row in found["rows"]:
        assert row["samples_per_s"] == pytest.approx(64 / (row["step_ms"] / 1e3))
        assert row["ratio"] == pytest.approx(ours["samples_per_s"] / row["samples_per_s"])
    limit = found["roofline"]
    assert 0 < limit["share"] < 1
    assert limit["step_ms"] / 1e3 == pytest.approx(
        max(limit["bytes_per_step"] / limit["bytes_per_s"], limit["flops_per_step"] / limit["flops_per_s"]))


def test_a_model_of_one_s_own_is_measured_in_both_engines(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["init", "laptop", "--model"]) == 0
    assert run(["bench", "laptop.toml", *SMALL, "-s", "train.engine=cuda_graph", "-s", "train.precision=fp32"]) == 0
    shown = capsys.readouterr().out
    assert "TorchRec's pipeline, fp32" in shown
    assert "Embark, cuda_graph, fp32, from memory" in shown
    assert "1.00×" in shown


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_is_measured_in_both_engines(capsys, tmp_path, kind):
    sets = (*SIZES, "place.device=cpu", "model.num_dense=3", *sets_of(kind, tmp_path), "train.engine=cuda_graph",
            "train.precision=fp32")
    assert run(["bench", "laptop", "--seconds", "0.01", *(word for one in sets for word in ("-s", one)), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in found["rows"]] == [
        "stock TorchRec, fp32" if kind == "many_ids" else "TorchRec's pipeline, fp32",  # which is a plain DLRM
        "Embark, cuda_graph, fp32, from memory"]


def test_a_person_sees_a_table_and_what_the_device_could_do(capsys):
    assert run(["bench", "laptop", *SMALL, "--no-peers"]) == 0
    shown = capsys.readouterr().out
    assert "Embark, pipeline" in shown
    assert "limit of this device" in shown
    assert "1.00×" in shown


def test_prepared_data_is_measured_from_its_loader_too(capsys, tmp_path):
    assert run(["data", "make", "laptop", "--out", str(tmp_path / "made"), *MODEL, "-s", "data.num_train_samples=5000",
                "-s", "data.num_eval_samples=100", "-q"]) == 0
    capsys.readouterr()
    sets = ("-s", "data.kind=prepared", "-s", f"data.path={tmp_path / 'made'}", "-s", "train.engine=cuda_graph")
    assert run(["bench", "laptop", *SMALL, *sets, "--no-peers", "--json"]) == 0
    names = [row["name"] for row in json.loads(capsys.readouterr().out)["rows"]]
    assert [name.rpartition(", ")[2] for name in names] == ["from memory", "from its loader"]


def test_the_jax_trainer_is_not_measured(capsys):
    assert run(["bench", "laptop", "-s", "place.device=jax"]) == 64
    assert "measures the torch trainer only" in capsys.readouterr().err


def test_no_time_is_refused(capsys):
    assert run(["bench", "laptop", "--seconds", "0"]) == 64
    assert "--seconds 8" in capsys.readouterr().err
