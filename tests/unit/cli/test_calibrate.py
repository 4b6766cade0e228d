"""`embark bench --calibrate` measures for real, keeps what it found, and the plan uses it."""

from __future__ import annotations

import json

import pytest

from embark.__main__ import run
from embark.plan.calibration import calibration_path, clear_cache, load_calibrations
from embark.plan.predict import predict_local
from embark.spec import ModelSpec, load_spec

HERE = {"device": "cpu", "device_name": "2 CPU threads", "engine": "pipeline", "precision": "fp32", "world_size": 1,
        "host_bytes": 8 * 2**30, "device_bytes": 0}


@pytest.mark.slow
def test_a_calibration_is_measured_kept_and_used(tmp_path, monkeypatch, capsys):
    from embark.trainers.torch.bench import calibrate as measuring

    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr(measuring, "CPU_BATCHES", {"tiny": (64, 2048)})
    monkeypatch.setattr(measuring, "calibration_models", lambda is_gpu: {
        "tiny": ModelSpec(embedding_dim=8, bottom_mlp=(8,), top_mlp=(8,), num_tables=2, rows_per_table=100)})
    assert run(["bench", "laptop", "-s", "place.device=cpu", "--seconds", "0.2", "--calibrate", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert [row["batch"] for row in output["rows"]] == [64, 2048]
    assert calibration_path().exists()
    found = load_calibrations()["cpu"]
    assert found.rates.copy_bytes > 1e8
    assert 50e6 < found.memory["pipeline"].context_bytes < 5e9
    foreseen = predict_local(load_spec("laptop", []), HERE)
    assert foreseen["peak_bytes"] > found.memory["pipeline"].context_bytes
    clear_cache()


def test_a_run_on_a_card_that_the_catalog_lacks_is_not_foreseen():
    assert (
        predict_local(
            load_spec("laptop", []),
            HERE | {"device": "cuda", "device_name": "Voodoo 2", "engine": "cuda_graph", "device_bytes": 2**23},
        )
        is None
    )


def test_a_run_on_an_h200_is_foreseen_as_calibrated():
    here = HERE | {"device": "cuda", "device_name": "NVIDIA H200", "device_bytes": 150e9, "engine": "cuda_graph",
                   "precision": "bf16"}
    read = predict_local(load_spec("quickstart", ["data.kind=prepared", "data.path=/data"]), here)
    assert read["is_calibrated"]
    assert read["step_s"] == pytest.approx(0.000109, rel=0.1)
    assert read["peak_bytes"] == pytest.approx(2.31e9, rel=0.05)
    # The card draws synthetic samples itself, beside the step; what that takes was not measured.
    drawn = predict_local(load_spec("quickstart", []), here)
    assert not drawn["is_calibrated"]
    assert drawn["step_s"] == pytest.approx(read["step_s"])
    # Measurement on an H200: the loader draws samples far slower than the card learns from them.
    by_loader = predict_local(load_spec("quickstart", ["train.batch_size=65536"]), here | {"engine": "pipeline"})
    assert by_loader["is_calibrated"]
    assert by_loader["bound_by"] == "drawing samples"


@pytest.mark.parametrize(("batch_size", "together"), [(2_048, 8), (16_384, 4), (65_536, 1)])
def test_memory_counts_batches_made_together_and_evaluation(batch_size, together):
    here = HERE | {"device": "cuda", "device_name": "NVIDIA H200", "device_bytes": 150e9, "engine": "cuda_graph",
                   "precision": "bf16"}
    read, drawn = (
        predict_local(load_spec("quickstart", [f"train.batch_size={batch_size}", *sets]), here)["parts"]
        for sets in (["data.kind=prepared", "data.path=/data"], []))
    assert read["input buffers"] == drawn["input buffers"] == 2 * together * batch_size * 4 * (1 + 13 + 26)
    outputs = 512 + 256 + 64 + (64 + 351) + 512 + 256 + 1
    assert read["evaluation"] == drawn["evaluation"] == 8_192 * (8 * 26 * 64 + 2 * outputs)


def test_a_run_tells_what_was_predicted_and_what_it_took(tmp_path):
    from embark.trainers import train

    spec = load_spec("laptop", [f"store.root={tmp_path}", "train.num_steps=60", "data.num_eval_samples=2048",
                                "place.device=cpu", "data.num_train_samples=65536"])
    train(spec)
    events = [json.loads(line) for line in (tmp_path / "laptop" / "events.jsonl").read_text().splitlines()]
    predicted = next(e for e in events if e["event"] == "predict")
    end = next(e for e in events if e["event"] == "end")
    assert predicted["step_s"] > 0
    assert end["step_s"] > 0
    assert end["peak_bytes"] > 100e6


def test_the_closing_lines_set_them_side_by_side():
    from embark.events.events import Event
    from embark.events.summary import History, predicted_and_actual

    history = History()
    history.add(Event("predict", {"step_s": 0.000171, "peak_bytes": 2.12e9, "is_calibrated": True}))
    history.add(Event("end", {"step_s": 0.000165, "peak_bytes": 2.11e9}))
    assert predicted_and_actual(history) == "predicted 0.171 ms a step and 2.12 GB, actual 0.165 ms a step and 2.11 GB"
    assert predicted_and_actual(History()) == ""
