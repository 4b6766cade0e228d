"""DeepFM, Wide & Deep, xDeepFM, AutoInt, FinalMLP, MaskNet and TabM: the equations of their papers, in both engines."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from exported_runs import draw_rows, prepared_spec, validation_rows, write_csv
from torch import Tensor
from torch.nn.functional import layer_norm
from torch.utils.flop_counter import FlopCounterMode

from embark import export_run
from embark.data import eval_batches
from embark.data.evaluation_rows import open_rows
from embark.errors import SpecError
from embark.export.artifact import open_artifact
from embark.model.engine_selection import cuda_graph_obstacle, select_engine
from embark.model.jax_layout import check_supported
from embark.model.work import dense_work_of
from embark.run.evaluate_run import loaded
from embark.spec import ModelSpec, resolve
from embark.spec.model import FIELD_KINDS
from embark.store.checkpoint_inspect import find_trained
from embark.trainers import open_backend, train
from embark.trainers.torch.networks import dense_network
from embark.trainers.torch.networks.field_networks import of_members
from embark.trainers.torch.scoring.cpu_model import ExportedModel

TASKS = "model.tasks=[{name='click'}, {name='price', loss='regression'}]"


def model_of(kind: str, *sets: str, **fields) -> ModelSpec:
    sizes = {"num_dense": 3, "embedding_dim": 8, "top_mlp": [12, 6], "num_tables": 4, "rows_per_table": 9,
             "num_cross_layers": 2, **({"cross_rank": 5} if kind == "masknet" else {})}
    if kind == "tabm":
        sizes["num_members"] = 3
    if kind == "xdeepfm":
        sizes["num_feature_maps"] = 3
    return resolve({"model": {"kind": kind, **sizes, **fields}}, sets).model


def batch_of(model: ModelSpec, num: int = 5, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    width = sum(table.dim for table in model.table_list())
    return (torch.randn(num, model.num_dense, generator=draw, dtype=dtype),
            torch.randn(num, width, generator=draw, dtype=dtype))


def by_equations(model: ModelSpec, weights: dict[str, Tensor], dense: Tensor, pooled: Tensor) -> Tensor:
    """The logit of one row, as the paper of `model.kind` writes it, with sums over single fields and maps."""
    fields = [row.clone() for row in pooled.split(model.embedding_dim)]
    if model.kind == "wide_deep":
        linear = sum(row[0] for row in fields) + weights["linear.weight"][0] @ dense
        return linear + _mlp(weights, "top", torch.cat([dense, *(_behind_first(row) for row in fields)]))
    if model.kind == "tabm":
        return sum(_member(weights, torch.cat([dense, pooled]), member) for member in range(3)) / 3
    fields = [x * v for x, v in zip(dense, weights["fields.numbers"], strict=True)] + fields
    linear = sum(row[0] for row in fields)
    if model.kind == "deepfm":
        pairs = sum(a[1:] @ b[1:] for a, b in combinations(fields, 2))
        return linear + pairs + _mlp(weights, "top", torch.cat([_behind_first(row) for row in fields]))
    if model.kind == "xdeepfm":
        first = [row[1:] for row in fields]
        maps, sums = first, []
        for layer in range(model.num_cross_layers):
            of_pairs = weights[f"maps.{layer}.weight"].view(model.num_feature_maps, len(first), len(maps))
            maps = [sum(of_map[j, i] * maps[i] * first[j] for i in range(len(maps)) for j in range(len(first)))
                    for of_map in of_pairs]
            sums += [one.sum() for one in maps]
        return linear + weights["of_sums.weight"][0] @ torch.stack(sums) + _mlp(
            weights, "top", torch.cat([_behind_first(row) for row in fields]))
    row = torch.cat(fields)
    if model.kind == "autoint":
        attended = torch.stack(fields)
        for layer in range(model.num_cross_layers):
            attended = _interacting(weights, f"layers.{layer}", attended, model.num_heads)
        return weights["of_fields.weight"][0] @ attended.flatten() + _mlp(weights, "top", row)
    if model.kind == "finalmlp":
        one, other = (_mlp(weights, f"streams.{i}", row * 2 * _mlp(weights, f"gates.{i}", row).sigmoid(), ends="relu")
                      for i in range(2))
        products = sum(a @ w @ b for a, w, b in zip(one.chunk(model.num_heads), weights["product"],
                                                    other.chunk(model.num_heads), strict=True))
        return weights["top.weight"][0] @ torch.cat([one, other]) + weights["top.bias"][0] + products
    normalized = torch.cat([layer_norm(field, (len(field),)) * scale + shift for field, scale, shift in zip(
        fields, weights["scale"], weights["shift"], strict=True)])
    blocks = []
    for number in range(model.num_cross_layers):
        hidden = weights[f"blocks.{number}.0.weight"] @ (_mlp(weights, f"masks.{number}", row) * normalized)
        blocks.append((layer_norm(hidden, (len(hidden),)) * weights[f"blocks.{number}.1.weight"]
                       + weights[f"blocks.{number}.1.bias"]).relu())
    return _mlp(weights, "top", torch.cat(blocks))


def _behind_first(row: Tensor) -> Tensor:
    """The vector of a row whose first number is a linear weight; the first layer's weight for it means nothing."""
    return torch.cat([row.new_zeros(1), row[1:]])


def _mlp(weights: dict[str, Tensor], name: str, values: Tensor, ends: str = "linear") -> Tensor:
    layers = sorted(int(key.split(".")[-2]) for key in weights if key.startswith(f"{name}.") and key.endswith("weight"))
    for layer in layers:
        values = weights[f"{name}.{layer}.weight"] @ values + weights[f"{name}.{layer}.bias"]
        if layer != layers[-1] or ends == "relu":
            values = values.relu()
    return values[0] if name == "top" else values


def _member(weights: dict[str, Tensor], values: Tensor, member: int) -> Tensor:
    """The logit of one of the MLPs that share their matrices."""
    for layer in range(2):
        values = weights[f"layers.{layer}.weight"] @ (weights[f"scales.{layer}"][member] * values)
        values = (values + weights[f"biases.{layer}"][member]).relu()
    return weights["outputs"][member] @ values + weights["shift"][member]


def _interacting(weights: dict[str, Tensor], name: str, fields: Tensor, num_heads: int) -> Tensor:
    heads = []
    for query, key, value in zip(*(weights[f"{name}.{one}.weight"].chunk(num_heads) for one in (
            "query", "key", "value")), strict=True):
        alike = torch.stack([torch.stack([(query @ m) @ (key @ k) for k in fields]).softmax(0) for m in fields])
        heads.append(torch.stack([sum(a * (value @ k) for a, k in zip(row, fields, strict=True)) for row in alike]))
    return (torch.cat(heads, dim=1) + fields @ weights[f"{name}.residual.weight"].t()).relu()


@pytest.mark.parametrize("kind", FIELD_KINDS)
def test_logits_are_those_of_the_paper_s_equations(kind):
    torch.manual_seed(3)
    model = model_of(kind)
    network = dense_network(model).double().eval()
    for value in network.parameters():
        torch.nn.init.normal_(value, std=0.5)
    dense, pooled = batch_of(model)
    expected = [by_equations(model, dict(network.named_parameters()), *row) for row in zip(dense, pooled, strict=True)]
    torch.testing.assert_close(network(dense, pooled), torch.stack(expected))


def measured(model: ModelSpec) -> tuple[int, float, float]:
    """The weights, and for a sample the arithmetic of forward and backward and the values that autograd keeps."""
    network, num = dense_network(model).float(), 64
    dense, pooled = batch_of(model, num, torch.float32)
    given = {one.untyped_storage().data_ptr() for one in (dense, *network.parameters(), *network.buffers())}
    kept: dict[int, Tensor] = {}

    def keep(value: Tensor) -> Tensor:
        kept[value.untyped_storage().data_ptr()] = value
        return value

    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
            outputs = network(dense, pooled.requires_grad_())
        outputs.sum().backward()
    num_kept = sum(value.untyped_storage().nbytes() // 4 for key, value in kept.items() if key not in given)
    return sum(p.numel() for p in network.parameters()), counter.get_total_flops() / num, num_kept / num


@pytest.mark.parametrize(("kind", "sets"), [
    pytest.param(kind, sets, id=f"{kind} {name}") for kind in FIELD_KINDS for name, sets in (
        ("", ()), ("no numbers", ("model.num_dense=0",)), ("tasks", (TASKS,))) if (kind, name) != ("tabm", "tasks")])
def test_the_plan_counts_what_torch_counts(kind, sets):
    model = model_of(kind, *sets, num_dense=13, embedding_dim=32, num_tables=26, top_mlp=[64, 32])
    work, (num_values, flops, num_kept) = dense_work_of(model), measured(model)
    assert work.num_values == num_values
    assert work.flops_per_sample == pytest.approx(flops, rel=0.03)
    assert model.tasks or work.output_width == pytest.approx(num_kept, rel=0.15)


SIZES = {kind: (f"model.kind={kind}", "model.num_cross_layers=2") for kind in FIELD_KINDS}
SIZES["masknet"] += ("model.cross_rank=16",)
SIZES["tabm"] = ("model.kind=tabm", "model.num_members=4")
SIZES["xdeepfm"] += ("model.num_feature_maps=4",)
VARIED = ("model.dropout=0.3", "model.top_mlp=[16, 8]", "train.max_gradient_norm=0.02", "train.weight_decay=0.5",
          "train.dense_optimizer=adam", "train.dense_learning_rate=0.01", "data.ragged=true", "model.num_dense=0",
          "model.tables=[{name='a', rows=9, multi_hot=4, pooling='mean'}, {name='b', rows=60, multi_hot=3}]")


@pytest.mark.parametrize("kind", FIELD_KINDS)
def test_both_engines_learn_the_same_and_more_than_the_mean(train_tiny, kind):
    sets = (*SIZES[kind], "train.num_steps=24", "train.learning_rate=0.05", "train.dense_learning_rate=0.02",
            "data.num_eval_samples=2000")
    pipeline = train_tiny(*sets, "train.engine=pipeline")
    captured = train_tiny(*sets, "train.engine=cuda_graph")
    assert captured.of("start")[0]["engine"] == "cuda_graph"
    assert captured.losses() == pytest.approx(pipeline.losses(), rel=1e-5)
    assert captured.of("eval")[-1]["auc"] == pytest.approx(pipeline.of("eval")[-1]["auc"], abs=1e-4)
    assert pipeline.of("eval")[-1]["normalized_entropy"] < 0.99


@pytest.mark.parametrize("kind", FIELD_KINDS)
def test_a_resumed_run_gives_the_same_losses_bit_for_bit(train_tiny, kind):
    sets = (*SIZES[kind], *VARIED, "store.checkpoint_every=2", "train.engine=cuda_graph")
    whole = train_tiny(*sets, "name=whole", "train.num_steps=4")
    train_tiny(*sets, "name=parts", "train.num_steps=2", fresh=False)
    assert train_tiny(*sets, "name=parts", "train.num_steps=4", fresh=False).losses() == whole.losses()
    if kind in ("deepfm", "finalmlp"):  # a checkpoint of one engine continues in the other
        train_tiny(*sets, "name=other", "train.num_steps=2", "train.engine=pipeline", fresh=False)
        resumed = train_tiny(*sets, "name=other", "train.num_steps=4", fresh=False)
        assert resumed.losses() == pytest.approx(whole.losses(), rel=1e-5)


@pytest.fixture(scope="module")
def clicks(tmp_path_factory):
    """Prepared data of every kind of column, and the spec without a model."""
    folder = tmp_path_factory.mktemp("clicks")
    raw = write_csv(folder / "train.csv", draw_rows(256, 1))
    return prepared_spec(folder, raw, write_csv(folder / "later.csv", draw_rows(160, 2, new_words=["unseen"])))


@pytest.mark.parametrize("kind", FIELD_KINDS)
def test_exported_scores_are_those_of_evaluation(clicks, tmp_path, kind):
    model = {"kind": kind, "embedding_dim": 8, "top_mlp": [32], "num_cross_layers": 2, "cross_rank": 4}
    spec = resolve({**clicks.model_dump(exclude_unset=True), "name": kind, "model": model})
    train(spec)
    found = find_trained(f"{spec.store.root}/{kind}")
    with open_rows(found.spec, found.fingerprint) as rows, loaded(found, open_backend(found.spec), rows) as trained, \
            trained.trainer.evaluating(trained.step) as evaluator:
        for batch in eval_batches(rows.source, batch_size=64, rank=0, world_size=1):
            evaluator.add(batch)
        logits = torch.cat(evaluator._held_out._logits).numpy()
    exported = ExportedModel(open_artifact(export_run(found.run_dir.uri, str(tmp_path / "models")).uri))
    rows = validation_rows(spec.data.path)
    assert len(set(logits.tolist())) > 150
    assert exported.logits(rows).numpy() == pytest.approx(logits, rel=1e-5, abs=1e-5)
    alone = [exported.logits(rows.cut(row, row + 1)).item() for row in range(8)]
    assert alone == pytest.approx(exported.logits(rows.cut(0, 8)).tolist(), rel=1e-5, abs=1e-5)


def test_each_member_learns_from_its_own_loss():
    torch.manual_seed(3)
    network = dense_network(model_of("tabm")).double()
    dense, pooled = batch_of(model_of("tabm"))
    label = torch.tensor([0.0, 1, 1, 0, 1], dtype=torch.float64)
    logits = network(dense, pooled)
    mean, losses = of_members(logits, label)
    alone = [of_members(one, label)[1] for one in logits.unbind(1)]
    torch.testing.assert_close(losses, sum(alone) / 3)
    torch.testing.assert_close(network.eval()(dense, pooled), mean)
    assert torch.all(losses > of_members(mean, label)[1])  # members differ, and the loss is convex


@pytest.mark.parametrize("kind", ["deepfm", "finalmlp"])
def test_several_tasks_and_dynamic_tables_train(train_tiny, kind):
    tables = "model.tables=[{name='a', ids='dynamic', capacity=40, rows=60}, {name='b', rows=9}]"
    run = train_tiny(*SIZES[kind], "train.num_steps=3", tables, "model.tasks=[{name='click'}, {name='buy'}]")
    assert run.of("start")[0]["engine"] == "pipeline"
    assert len(run.of("eval")[-1]["tasks"]) == 2


@pytest.mark.parametrize("kind", FIELD_KINDS)
def test_a_gpu_captures_it_and_the_jax_trainer_refuses_it(kind):
    spec = resolve({"model": {"kind": kind}})
    assert cuda_graph_obstacle(spec, "cuda", has_tables_on_host=False) == ""
    assert select_engine(spec, "cuda", "it waits") == ("pipeline", "it waits")
    with pytest.raises(SpecError, match="is not supported by the JAX trainer"):
        check_supported(spec)


@pytest.mark.parametrize(("sets", "expected"), [
    (["model.kind=deepfm", "model.tables=[{name='a', rows=9, dim=8}]"], "multiplies rows of all tables"),
    (["model.kind=autoint", "model.embedding_dim=4", "model.num_heads=8"], "does not divide the width 4"),
    (["model.kind=finalmlp", "model.top_mlp=[9]"], "does not divide the width 9"),
    (["model.kind=finalmlp", "model.top_mlp=[]"], "joins the outputs of two such MLPs"),
    (["model.kind=deepfm", "model.num_heads=4"], "num_heads = 4"),
    (["model.num_feature_maps=4"], "num_feature_maps = 4"),
    (["model.num_members=4"], "num_members = 4"),
    (["model.kind=tabm", TASKS], '"tabm" has one task'),
    (["model.kind=masknet", "model.tables=[{name='a', rows=9, pooling='none', max_length=4}]"], "takes pooled"),
])
def test_conflicts_of_fields_are_refused(sets, expected):
    with pytest.raises(SpecError, match=expected):
        resolve({}, sets)
    resolve({}, ["model.kind=wide_deep", "model.tables=[{name='a', rows=9, dim=8}, {name='b', rows=9}]"])
