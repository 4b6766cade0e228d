"""A model with nothing set about training uses the numbers of a table with few of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from embark import evaluate, feature_importance, prepare_data
from embark.data.evaluation_rows import dense_columns
from embark.run.evaluation import influence_warning
from embark.run.resolve import resolve_evaluation, resolve_run
from embark.spec import resolve
from embark.store import RunDir
from embark.trainers import train
from embark.trainers.torch.networks.layers import center_units
from embark.trainers.torch.trainer import TorchBackend


@pytest.fixture(scope="module")
def people(tmp_path_factory):
    """Rows like those of a census: the numbers say all about the label, and the word says nothing."""
    folder, generator, num = tmp_path_factory.mktemp("people"), np.random.default_rng(1), 8000
    age, hours = generator.integers(17, 90, num), generator.integers(20, 60, num)
    gain, loss = (np.where(generator.random(num) < 0.1, generator.integers(100, 9999, num), 0) for _ in range(2))
    odds = np.log1p(age) * 2 + np.log1p(hours) * 2 + np.log1p(gain) * 0.3 - 14.9
    label = (generator.random(num) < 1 / (1 + np.exp(-2 * odds))).astype(int)
    words = generator.choice(["red", "green", "blue"], num)
    (folder / "people.csv").write_text("label,age,hours,gain,loss,word\n" + "".join(
        f"{','.join(map(str, row))}\n" for row in zip(label, age, hours, gain, loss, words, strict=True)))
    spec = resolve({
        "name": "people", "store": {"root": str(folder), "checkpoint_at_end": False}, "place": {"device": "cpu"},
        "watch": {"tensorboard": False}, "model": {"embedding_dim": 16},
        "data": {"kind": "prepared", "path": str(folder / "data"), "label": "label",
                 "dense_columns": ["age", "hours", "gain", "loss"], "eval_fraction": 0.2,
                 "prepare": {"input": str(folder / "people.csv"), "format": "csv", "num_workers": 1}}})
    prepare_data(spec, folder / "data")
    return spec


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_score_depends_on_the_numbers_of_a_table_with_few(people, seed):
    result = train(resolve(people.model_dump(exclude_unset=True), [
        f"train.seed={seed}", "train.num_epochs=1"]), fresh=True)
    assert result["auc"] > 0.65  # 0.5 without them; below 0.59 where the bottom MLP has died


def test_a_number_in_several_values_is_one_feature_by_importance(people):
    result = train(resolve(people.model_dump(exclude_unset=True), [
        "name=important", "train.num_epochs=2", "store.checkpoint_at_end=true"]), fresh=True)
    found = {one.feature: one for one in feature_importance(str(result["run_dir"])).features}
    assert found.keys() == {"age", "hours", "gain", "loss", "word"}
    assert {name for name, one in found.items() if one.auc_drop.low > 0.02} == {"age", "hours", "gain"}


def test_own_data_trains_until_its_best_and_that_checkpoint_is_evaluated(people):
    small = ("train.batch_size=512", "model.bottom_mlp=[32]", "model.top_mlp=[32]", "name=best",
             "train.eval_every=36")
    result = train(resolve(people.model_dump(exclude_unset=True), small), fresh=True)
    state = result["early_stopping"]
    assert state["has_stopped"] == (state["num_without_improvement"] >= 8)
    found = evaluate(str(result["run_dir"]))
    assert (found.step, found.auc) == (state["best_step"], pytest.approx(state["best"], abs=1e-9))


def test_a_trained_run_is_evaluated_without_reading_training_rows(people):
    backend = TorchBackend()
    with backend.join(people.place) as world:
        run = resolve_run(people, world)
        assert run.spec.train.dense_init == "centered"
        assert resolve_evaluation(run.spec, world).train.dense_init == "uniform"


def test_a_number_that_changes_no_prediction_is_named(people, tmp_path):
    backend, spec = TorchBackend(), resolve(people.model_dump(exclude_unset=True), ["model.kind=dlrm"])
    with backend.join(people.place) as world:
        run = resolve_run(spec, world)
        trainer = backend.build(run.spec, world, run.num_steps, run.source, RunDir(str(tmp_path)))
        assert not influence_warning(trainer, run.source, run.spec, world, 0)
        idle = [at for at, column in enumerate(dense_columns(run.spec)) if column in ("age", "gain")]
        with torch.no_grad():
            trainer.model.module.dense.bottom[0].weight[:, idle] = 0.0
        assert influence_warning(trainer, run.source, run.spec, world, 0) == (
            "age, gain have no influence on the predictions of 1,024 held-out samples")


SHAPES = {
    "one bounded number": lambda draw, num: [draw.integers(18, 93, num)],
    "one share": lambda draw, num: [draw.random(num)],
    "mostly zero": lambda draw, num: list(np.where(draw.random((4, num)) < 0.9, 0, draw.integers(1, 99999, (4, num)))),
    "heavy tails": lambda draw, num: list(draw.pareto(1.0, (6, num)) * 100),
    "large and far from zero": lambda draw, num: list(draw.normal(1e6, 10, (3, num))),
    "of both signs": lambda draw, num: list(draw.normal(0, 50, (8, num))),
    "never positive": lambda draw, num: list(-draw.exponential(5, (5, num))),
    "flags": lambda draw, num: list(draw.integers(0, 2, (10, num)) + 0.5),
    "many on other scales": lambda draw, num: list(draw.random((30, num)) * 10.0 ** draw.integers(-4, 7, (30, 1))),
    "one constant among them": lambda draw, num: [np.full(num, 7.5), draw.normal(40, 10, num)],
}


@pytest.mark.parametrize("kind", ["dlrm", "tabm"])
@pytest.mark.parametrize("shape", SHAPES)
def test_half_the_units_over_the_numbers_live_after_training(shape, kind, tmp_path):
    draw, num = np.random.default_rng(len(shape)), 1000
    columns = [np.asarray(one, np.float64) for one in SHAPES[shape](draw, num)]
    label = (draw.random(num) < np.where(columns[-1] > np.median(columns[-1]), 0.8, 0.2)).astype(int)
    names = [f"x{number}" for number in range(len(columns))]
    (tmp_path / "rows.csv").write_text(f"label,word,{','.join(names)}\n" + "".join(
        f"{row[0]},w{number % 7},{','.join(f'{value:.6g}' for value in row[1:])}\n"
        for number, row in enumerate(zip(label.tolist(), *columns, strict=True))))
    named = {"model": {"kind": kind}} if kind == "dlrm" else {}  # TabM is the default
    spec = resolve({"name": "shape", "place": {"device": "cpu"}, "train": {"num_steps": 40}, **named, "data": {
        "kind": "prepared", "path": str(tmp_path / "data"), "dense_columns": names,
        "prepare": {"input": str(tmp_path / "rows.csv"), "num_workers": 1}}})
    prepare_data(spec, tmp_path / "data")
    backend = TorchBackend()
    with backend.join(spec.place) as world:
        run = resolve_run(spec, world)
        trainer = backend.build(run.spec, world, run.num_steps, run.source, RunDir(str(tmp_path)))
        with trainer.feed(run.source, 0, run.num_steps) as batches:
            for step in range(run.num_steps):
                trainer.step(batches, step)
    values = torch.from_numpy(run.source.eval_rows(0, run.source.num_eval_samples).dense)
    shares, network = [], trainer.model.module.dense
    units = network.bottom if kind == "dlrm" else network.after
    for layer in units:
        if isinstance(layer, nn.ReLU):
            layer.register_forward_hook(
                lambda _, inputs, found: shares.append(float((found.std(dim=0) > 0).float().mean())))
    width = sum(table.dim for table in run.spec.model.table_list())
    with torch.no_grad():
        network(values, torch.zeros(len(values), width))
    assert len(shares) == (3 if kind == "dlrm" else 2)
    assert min(shares) >= 0.5


def test_centered_units_are_those_of_standardized_columns_without_a_mean():
    generator = torch.Generator().manual_seed(1)
    rows = torch.rand(500, 3, generator=generator) * torch.tensor([1.0, 20.0, 1e4]) + torch.tensor([5.0, -40.0, 0.0])
    layers = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    weight = layers[0].weight.detach().clone()
    center_units(layers, rows)
    scaled = (rows - rows.mean(0)) / torch.cat([rows[:, :2].std(0, correction=0), torch.ones(1)])
    torch.testing.assert_close(layers[0](rows), scaled @ weight.T, rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(layers(rows).mean(0), torch.zeros(2), rtol=0, atol=1e-2)
