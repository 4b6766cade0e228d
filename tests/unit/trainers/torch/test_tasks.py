"""Several tasks: heads, masked losses, metrics, resuming, and one output for each task wherever a model answers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from served_models import while_serving
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from embark import export_run, score_file
from embark.errors import SpecError, UserError
from embark.export.artifact import open_artifact
from embark.model.jax_layout import check_supported
from embark.model.work import layers_of
from embark.plan.predict import predict_local
from embark.report.context import read_run
from embark.report.document import html_page
from embark.report.report import report
from embark.run.task_metrics import combine
from embark.spec import resolve
from embark.trainers import evaluate, train
from embark.trainers.torch.networks import dense_network
from embark.trainers.torch.networks.task_heads import scores_of
from embark.trainers.torch.networks.trace_network import trace_network
from embark.trainers.torch.task_metrics import TaskHeldOut, TaskLoss, TaskWindow

TASKS = ("model.tasks=[{name='click', weight=0.5}, {name='stars', loss='regression', weight=0.25}, "
         "{name='kind', loss='softmax', num_classes=3}, {name='buy'}]")
HEADS = {"shared_bottom": (), "mmoe": ("model.num_experts=3",), "ple": ("model.num_experts=1",)}


@pytest.mark.parametrize("kind", ["dlrm", "dcnv2"])
@pytest.mark.parametrize("head", HEADS)
def test_the_layers_that_plan_counts_are_those_that_are_trained(tiny, kind, head):
    model = tiny(TASKS, f"model.kind={kind}", f"model.task_head={head}", *HEADS[head], "model.tower_mlp=[5]").model
    network = dense_network(model)
    assert layers_of(model).num_values == sum(value.numel() for value in network.parameters())
    outputs = network(torch.randn(7, 3), torch.randn(7, 32))
    assert outputs.shape == (7, 6)
    outputs.square().sum().backward()
    assert all(value.grad is not None for value in network.parameters())  # or DDP would wait for some
    with torch.no_grad():
        assert torch.allclose(scores_of(model.tasks, outputs)[:, 2:5].sum(dim=1), torch.ones(7))


def test_a_sample_without_a_label_counts_in_no_loss_or_metric(tiny, alone):
    tasks = tiny(TASKS).model.tasks
    torch.manual_seed(1)
    outputs, labels = torch.randn(40, 6, requires_grad=True), torch.zeros(40, 4)
    labels[:, 0], labels[:, 1] = (torch.rand(40) < 0.5).float(), torch.randn(40)
    labels[:, 2], labels[:, 3] = torch.randint(3, (40,)), torch.nan
    labels[::3, 0], labels[5:, 1], labels[:30, 2] = torch.nan, torch.nan, torch.nan
    here = ~labels.isnan()
    click = binary_cross_entropy_with_logits(outputs[here[:, 0], 0], labels[here[:, 0], 0])
    stars = (outputs[:5, 1] - labels[:5, 1]).square().mean()
    kind = cross_entropy(outputs[30:, 2:5], labels[30:, 2].long())
    shares = here.float().mean(dim=0)
    loss = TaskLoss(tasks)(outputs, labels)
    expected = 0.5 * click * shares[0] + 0.25 * stars * shares[1] + kind * shares[2]
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward()
    assert (outputs.grad[~here[:, 0], 0] == 0).all()
    assert (outputs.grad[:, 5] == 0).all()
    window, held = TaskWindow(tasks, torch.device("cpu")), TaskHeldOut(tasks, alone)
    for half in (slice(0, 21), slice(21, 40)):
        window.add(outputs.detach()[half], labels[half])
        held.add(outputs.detach()[half], labels[half])
    saved, restored = window.state(alone), TaskWindow(tasks, torch.device("cpu"))
    restored.set_state(restored.empty_state().copy_(saved), alone)
    for found in (window.take(alone), restored.take(alone), held.metrics()):
        of = found["tasks"]
        assert of["click"]["log_loss"] == pytest.approx(click.item(), rel=1e-6)
        assert of["stars"] | {"r_squared": 0} == pytest.approx(
            {"mse": stars.item(), "mae": (outputs[:5, 1] - labels[:5, 1]).abs().mean().item(), "r_squared": 0,
             "num_samples": 5}, rel=1e-6)
        right = (outputs[30:, 2:5].argmax(dim=1) == labels[30:, 2]).float().mean()
        assert of["kind"] == pytest.approx({"cross_entropy": kind.item(), "accuracy": right.item(), "num_samples": 10})
        assert of["buy"]["num_samples"] == 0
        assert found["auc"] == of["click"]["auc"]
        assert found["log_loss"] == pytest.approx((0.5 * click + 0.25 * stars + kind).item(), rel=1e-6)
    again = combine(tasks[1:3], {name: of[name] for name in ("stars", "kind")})
    assert np.isnan(again["auc"])


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    """A file with labels of three tasks, many of them missing."""
    path, rng = tmp_path_factory.mktemp("rows") / "rows.csv", np.random.default_rng(1)
    lines = ["user,price,click,rating,kind"]
    for _ in range(600):
        user, price = rng.integers(20), rng.normal()
        cells = [int(rng.random() < user / 20), round(float(price + user / 10), 3), int(user % 3)]
        lines.append(",".join(map(str, [user, round(float(price), 3), *("" if rng.random() < 0.4 else cell
                                                                        for cell in cells)])))
    path.write_text("\n".join(lines) + "\n")
    return path


def spec_of(rows: Path, root: Path, **changes):
    return resolve({
        "name": changes.pop("name", "tasks"),
        "model": {"num_dense": 1, "embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [8], "tower_mlp": [4],
                  "task_head": "mmoe", "num_experts": 2, "tables": [{"name": "user", "rows": 20}],
                  "tasks": [{"name": "click"}, {"name": "stars", "label": "rating", "loss": "regression"},
                            {"name": "kind", "loss": "softmax", "num_classes": 3}], **changes.pop("model", {})},
        "data": {"kind": "columns", "path": str(rows), "dense_columns": ["price"]},
        "train": {"batch_size": 64, "precision": "fp32", "num_steps": 8, "learning_rate": 0.2,
                  **changes.pop("train", {})},
        "place": {"device": "cpu"}, "store": {"root": str(root), "checkpoint_every": 3},
        "watch": {"every": 1, "tensorboard": False}})


def steps(run_dir: str) -> list[dict]:
    lines = map(json.loads, Path(run_dir, "events.jsonl").read_text().splitlines())
    return [{key: line[key] for key in ("step", "loss", "tasks")} for line in lines if line["event"] == "step"]


@pytest.fixture(scope="module")
def trained(rows, tmp_path_factory):
    """A run with missing labels."""
    return train(spec_of(rows, tmp_path_factory.mktemp("runs"), train={"engine": "pipeline"}))


def test_a_resumed_run_gives_every_loss_of_every_task_bit_for_bit(rows, trained, tmp_path):
    train(spec_of(rows, tmp_path, train={"num_steps": 3}))
    resumed = train(spec_of(rows, tmp_path))
    assert [step for step in steps(resumed["run_dir"]) if step["step"] > 3] == \
        [step for step in steps(trained["run_dir"]) if step["step"] > 3]
    assert resumed["tasks"] == trained["tasks"]


def test_evaluate_and_the_report_show_each_task(trained):
    found = evaluate(trained["run_dir"])
    assert found.tasks == trained["tasks"]
    assert found.auc == trained["tasks"]["click"]["auc"]
    page = html_page(report(read_run(trained["run_dir"])))
    assert all(text in page for text in ("mean squared error", "cross-entropy", ">stars<", "accuracy"))


def test_score_and_serve_have_one_output_for_each_task(trained, rows, tmp_path):
    artifact = open_artifact(export_run(trained["run_dir"], str(tmp_path / "models")).uri)
    score_file(artifact.uri, str(rows), tmp_path / "scores.parquet")
    table = pq.read_table(tmp_path / "scores.parquet")
    assert table.column_names == ["click", "stars", "kind"]
    scores = {name: table.column(name).to_pylist() for name in table.column_names}
    assert np.sum(scores["kind"], axis=1) == pytest.approx(np.ones(600), abs=1e-5)
    cells = [line.split(",") for line in rows.read_text().splitlines()[1:3]]
    sent = [{"user": int(user), "price": float(price)} for user, price, *_ in cells]

    def use(client):
        plain = client("POST", "/score", {"rows": [*sent, {"user": "x", "price": 1}]})
        inputs = [{"name": "user", "datatype": "INT64", "shape": [2], "data": [row["user"] for row in sent]},
                  {"name": "price", "datatype": "FP32", "shape": [2], "data": [row["price"] for row in sent]}]
        about = client("GET", "/v2/models/tasks")
        return plain, client("POST", "/v2/models/tasks/infer", {"inputs": inputs}), about, client(
            "POST", "/v2/models/tasks/infer", {"inputs": inputs, "outputs": [{"name": "stars"}]})

    plain, infer, about, stars = (answer for _, answer, _ in while_serving(artifact, use))
    for name, expected in scores.items():
        assert np.allclose(plain["scores"][name][:2], expected[:2], atol=1e-6)
        assert plain["scores"][name][2] is None
    assert {one["name"]: one["shape"] for one in about["outputs"]} == {"click": [-1], "stars": [-1], "kind": [-1, 3]}
    by_name = {one["name"]: one for one in infer["outputs"]}
    assert by_name["kind"]["shape"] == [2, 3]
    assert np.allclose(by_name["kind"]["data"], np.reshape(scores["kind"][:2], -1), atol=1e-6)
    assert [one["name"] for one in stars["outputs"]] == ["stars"]


OWN = """
import torch
from torch import nn

class MyModel(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.towers = nn.ModuleDict({t.name: nn.Linear(5, t.num_outputs) for t in model.tasks})

    def forward(self, dense, pooled):
        x = torch.cat([dense, pooled["user"]], dim=1)
        return RETURNED
"""
OWN_MODEL = {"kind": "my_model:MyModel", "task_head": "shared_bottom", "num_experts": 4, "tower_mlp": [64]}


def test_a_model_of_one_s_own_returns_a_dictionary_of_logits(rows, tmp_path):
    code = OWN.replace("RETURNED", "{name: tower(x) for name, tower in self.towers.items()}")
    spec = spec_of(rows, tmp_path, name="own", model=OWN_MODEL | {"code": code})
    values = train(spec)
    assert set(values["tasks"]) == {"click", "stars", "kind"}
    assert steps(values["run_dir"])[-1]["loss"] < steps(values["run_dir"])[0]["loss"]
    assert trace_network(spec.model).num_values == 6 * 5
    for returned, what in (("self.towers['click'](x)", "forward returned Tensor, and the tasks are click, stars, kind"),
                           ("{'click': self.towers['click'](x)}", "forward returned logits of click"),
                           ("{name: tower(x)[:, :1] for name, tower in self.towers.items()}", "for task kind and")):
        wrong = spec_of(rows, tmp_path, name="bad", model=OWN_MODEL | {"code": OWN.replace("RETURNED", returned)})
        with pytest.raises(UserError, match="(?s)" + what.replace("[", r"\[")):
            train(wrong, fresh=True)


def test_jax_has_no_tasks_and_plan_counts_them(tiny):
    spec, plain = tiny(TASKS), tiny()
    with pytest.raises(SpecError, match="several tasks are not supported by the JAX trainer"):
        check_supported(spec)
    assert layers_of(spec.model).flops_per_sample > layers_of(plain.model).flops_per_sample
    where = {"device": "cpu", "device_name": "", "engine": "pipeline", "precision": "fp32", "world_size": 1,
             "host_bytes": 8e9, "local_world_size": 1, "device_bytes": 0}
    assert (predict_local(spec, where) is None) == (predict_local(plain, where) is None)
