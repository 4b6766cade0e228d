"""A plan speaks of TPUs as TPUs: their trainer, their memory, their datasheets; nothing of CUDA is in it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from embark.__main__ import run
from embark.catalog import load_catalog
from embark.model.jax_layout import LINE_WIDTHS, make_layout
from embark.plan.cost import save_bytes
from embark.plan.predict import predict
from embark.plan.prediction import Prediction, Setup
from embark.plan.tpu import tpu_step_time
from embark.spec import load_spec

GIB = 1024**3


def on(machine: str, *sets: str, name: str = "criteo-1tb", nodes: int = 1) -> Prediction:
    return predict(Setup(load_spec(name, list(sets)), load_catalog().machines[machine], nodes))


def step_on(chip: str, *sets: str, num_chips: int = 8, precision: str = "bf16", chips_per_host: int = 4):
    spec = load_spec("quickstart", ["train.batch_size=65536", *sets])
    return tpu_step_time(spec, load_catalog().gpus[chip], make_layout(spec, num_chips, LINE_WIDTHS["tpu"]), precision,
                         chips_per_host=chips_per_host, network_gbyte_per_s=0.0, num_slices=1)


def test_criteo_fits_a_slice_of_v5e_and_every_chip_holds_its_share():
    found = on("v5litepod-8")
    assert found.fits
    assert found.memory.device["tables"] == pytest.approx(204_184_588 * 512 / 8, rel=0.001)
    assert found.memory.device_limit == 15.75 * GIB
    assert found.engine == "jax"
    assert set(found.placement.shardings.values()) == {"row_wise"}


@pytest.mark.parametrize("machine", ["v5litepod-8", "v6e-8", "v5p-8", "v4-16"])
def test_nothing_of_a_gpu_is_counted(machine):
    found = on(machine)
    words = " ".join([*found.memory.device, *found.memory.host, *found.step.parts_s, found.step.basis, *found.notes])
    for word in ("CUDA", "NCCL", "launches", "fragmentation", "H200", "host memory"):
        assert word not in words
    assert "datasheet" in found.step.basis
    assert "unmeasured" in found.step.basis
    assert not found.step.is_calibrated


@pytest.mark.parametrize(("sets", "result"), [
    (("train.optimizer=adam",), "train.optimizer = adam is not supported by the JAX trainer"),
    (("train.table_dtype=bf16",), "train.table_dtype = bf16 is not supported by the JAX trainer"),
    (("model.dropout=0.2",), "model.dropout = 0.2 is not supported by the JAX trainer"),
    (("train.sharding=table_row_wise",), "train.sharding = table_row_wise"),
    (("train.batch_size=65537",), "does not divide over 8 devices"),
])
def test_what_the_trainer_would_refuse_is_reported_before(sets, result):
    found = on("v5litepod-8", *sets)
    assert not found.fits
    assert result in found.why


def test_a_chip_too_small_says_what_it_needs():
    found = on("v5litepod-4")
    assert not found.fits
    assert found.why.startswith("a chip needs 25.")


def test_an_odd_width_is_reported_what_it_costs():
    found = on("v5p-8", "model.embedding_dim=100")
    assert found.memory.device["tables copied"] > found.memory.device["tables"]
    assert any("take a width that divides 128" in note for note in found.notes)
    assert not any("width" in note for note in on("v5p-8").notes)


def test_links_of_a_slice_carry_the_exchange_however_many_hosts_it_has():
    """v5litepod-16 has four hosts; between them too goes ICI, not the network."""
    one, four = (on(name, "train.batch_size=65536").step for name in ("v5litepod-8", "v5litepod-16"))
    assert four.total_s < one.total_s
    assert "between slices" not in four.parts_s
    two_slices = on("v6e-8", nodes=2).step
    assert two_slices.parts_s["between slices"] > two_slices.parts_s["all-to-all"]


def test_a_step_is_what_the_datasheet_allows():
    v5e, v6e = step_on("TPU-v5e"), step_on("TPU-v6e")
    ratio = 1638 / 819
    assert v5e.parts_s["lookup and update"] / v6e.parts_s["lookup and update"] == pytest.approx(ratio)
    assert v5e.total_s == pytest.approx(sum(s for name, s in v5e.parts_s.items() if name != "loader"))
    assert step_on("TPU-v5e", "train.comms_dtype=bf16").parts_s["all-to-all"] < v5e.parts_s["all-to-all"]


def test_wider_numbers_take_several_passes_of_the_matrix_units():
    wide = ("model.bottom_mlp=[8192,8192]", "model.top_mlp=[8192,8192]")
    bf16, fp32 = (step_on("TPU-v5e", *wide, precision=p).parts_s["dense layers"] for p in ("bf16", "fp32"))
    assert fp32 == pytest.approx(6 * bf16)


def test_links_without_a_figure_are_left_out_and_reported_to_be():
    step = step_on("TPU-v4")
    assert "all-to-all" not in step.parts_s
    assert "left out" in step.basis


def test_one_process_of_a_host_writes_what_all_its_chips_hold():
    written = save_bytes(on("v5litepod-8"))
    assert written.process == written.host
    assert written.rank < written.host / 7
    of_gpus = save_bytes(on("a3-highgpu-8g"))
    assert of_gpus.process == of_gpus.rank


def test_the_guide_s_table_of_machines_is_what_the_plan_says(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    text = (Path(__file__).parents[3] / "docs" / "guides" / "tpu.md").read_text()
    row = r"^\| `([\w-]+)` \| \d+ × \w+ \| ([\d.]+) of ([\d.]+) \|.* (\d+) min \| \$([\d.]+) \| \$([\d.]+) \|$"
    rows = re.findall(row, text, re.MULTILINE)
    assert [row[0] for row in rows] == ["v5litepod-8", "v6e-8", "v5p-8", "a3-highgpu-8g"]
    for machine, needs, has, minutes, on_demand, spot in rows:
        words = ["plan", "criteo-1tb", "--samples", "4195197692", "--set", f"place.machine={machine}", "--json"]
        assert run(words) == 0
        output = json.loads(capsys.readouterr().out)
        assert f"{output['memory']['device_total_bytes'] / GIB:.1f}" == needs
        assert f"{output['memory']['device_limit_bytes'] / GIB:.1f}" == has
        bill = output["bills"]["on_demand"]
        assert f"{bill['time']['total_s'] / 60:.0f}" == minutes
        assert f"{bill['total_usd']:.2f}" == on_demand
        assert f"{output['bills']['spot']['total_usd']:.2f}" == spot
