"""A model from the user's own file: it trains as the built-in ones do, and its errors name its lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from captured_kinds import DYNAMIC
from custom_models import AUTOINT, DLRM, KIND, SIMPLE, STATEFUL

from embark.__main__ import run as embark_command
from embark.errors import SpecError, UserError
from embark.events import read_events
from embark.model.engine_selection import cuda_graph_obstacle, select_engine
from embark.model.jax_layout import check_supported
from embark.model.work import layers_of
from embark.plan.predict import predict_local
from embark.spec import ModelSpec, resolve, to_toml
from embark.trainers import evaluate, train
from embark.trainers.torch.networks.custom_model import load_network, logits_of
from embark.trainers.torch.networks.trace_network import trace_network


@pytest.fixture
def own(tiny, tmp_path, monkeypatch):
    """A function from a file's text and settings to a spec that names it."""
    monkeypatch.chdir(tmp_path)

    def make(code: str, *sets: str):
        Path("my_model.py").write_text(code)
        return tiny(KIND, "train.num_steps=4", *sets)

    return make


def losses(run_dir: str) -> list[float]:
    return [e.values["loss"] for e in read_events(Path(run_dir, "events.jsonl")) if e.kind == "step"]


def start_of(values: dict) -> dict:
    events = read_events(Path(values["run_dir"], "events.jsonl"))
    return next(event.values for event in events if event.kind == "start")


def test_dlrm_as_an_custom_model_gives_its_losses_bit_for_bit(own, train_tiny):
    values = train(own(DLRM))
    assert losses(values["run_dir"]) == train_tiny("train.num_steps=4", "train.engine=pipeline").losses()


def test_the_model_to_start_from_trains_and_evaluates(own):
    spec = own(AUTOINT, "train.num_steps=12", "store.checkpoint_at_end=true", "train.learning_rate=0.2",
               "train.dense_learning_rate=0.05")
    values = train(spec)
    found = losses(values["run_dir"])
    assert found[-1] < found[0]
    Path("my_model.py").unlink()  # its text is with the checkpoint
    assert evaluate(values["run_dir"]).auc == values["auc"]


@pytest.mark.parametrize(("code", "sets"), [
    (AUTOINT, ()), (AUTOINT, ("train.dense_optimizer=sgd", "train.max_gradient_norm=0.02", "train.warmup_steps=3")),
    (DLRM, ("data.ragged=true", "train.weight_decay=0.5", "model.tables=[{name='a', rows=9, multi_hot=4, "
            "pooling='mean'}, {name='b', rows=60, multi_hot=3}, {name='c', rows=5}]")),
    (STATEFUL, ("train.dense_optimizer=adam", "train.dense_learning_rate=0.01", "train.embedding_l2=0.5")),
    (AUTOINT, DYNAMIC),
], ids=["autoint", "autoint sgd", "dlrm", "stateful", "dynamic tables"])
def test_the_captured_step_trains_what_the_pipeline_trains(own, code, sets):
    """One operation at a time: dropout, statistics and unused weights among them."""
    pipeline = train(own(code, *sets, "train.engine=pipeline"))
    captured = train(own(code, *sets, "train.engine=cuda_graph", "name=captured"))
    assert start_of(captured)["engine"] == "cuda_graph"
    assert losses(captured["run_dir"]) == pytest.approx(losses(pipeline["run_dir"]), rel=1e-5)
    assert captured["auc"] == pytest.approx(pipeline["auc"], abs=1e-4)


@pytest.mark.parametrize(("line", "reason"), [
    ("return x * float(x.sum())", "my_model.py:12: RuntimeError in forward: Tensor.item() cannot be called on meta"),
    ("return x * x[x > 0].sum()", "my_model.py:12: "),
])
def test_a_model_that_looks_at_values_falls_back_to_the_pipeline(own, line, reason):
    start = start_of(train(own(SIMPLE.format(line=line), "train.engine=cuda_graph")))
    assert start["engine"] == "pipeline"
    assert f"my_model:MyModel does not run without values, as a captured step must: {reason}" in start["engine_reason"]


@pytest.mark.parametrize("engines", [("pipeline",) * 3, ("cuda_graph",) * 3])
def test_batchnorm_dropout_and_unused_weights_resume_bit_for_bit(own, engines):
    sets = ("store.checkpoint_every=2", "train.dense_optimizer=adam", "train.dense_learning_rate=0.01")
    whole = train(own(STATEFUL, *sets, "name=whole", f"train.engine={engines[0]}"))
    train(own(STATEFUL, *sets, "train.num_steps=2", f"train.engine={engines[1]}"))
    resumed = train(own(STATEFUL, *sets, f"train.engine={engines[2]}"))
    assert losses(resumed["run_dir"]) == losses(whole["run_dir"])
    assert resumed["log_loss"] == whole["log_loss"]


def test_a_model_that_returns_probabilities_is_named_at_the_end(own, capsys):
    Path("run.toml").write_text(to_toml(own(SIMPLE.format(line="return x.sigmoid()"))))
    assert embark_command(["train", "run.toml"]) == 0
    out = " ".join("".join(capsys.readouterr()).split())
    assert "look at Every logit of my_model.py on held-out samples is between 0 and 1" in out
    assert "Next: return what goes into the last sigmoid" in out


def test_what_the_file_prints_is_no_part_of_the_json_on_stdout(own, capsys):
    Path("run.toml").write_text(to_toml(own("print('loaded')\n" + SIMPLE.format(line="print('called'); return x"))))
    assert embark_command(["train", "run.toml", "--json"]) == 0
    out, err = capsys.readouterr()
    assert [json.loads(line)["event"] for line in out.splitlines()][-1] == "end"
    assert {"loaded", "called"} <= {*err.splitlines()}


def test_a_changed_file_is_refused_unless_accepted(own):
    train(own(SIMPLE.format(line="return x"), "store.checkpoint_every=2", "train.num_steps=2"))
    changed = own(SIMPLE.format(line="return x * 2"))
    with pytest.raises(UserError) as raised:
        train(changed)
    assert "model.code: sha256 " in raised.value.what
    assert raised.value.fix.endswith("--accept-change model.code")
    assert len(losses(train(changed, accept_change=["model.code"])["run_dir"])) == 4


@pytest.mark.parametrize(("code", "expected"), [
    (SIMPLE.format(line="return x @ x"), "my_model.py:12: RuntimeError in forward: mat1 and mat2 shapes cannot be"),
    (SIMPLE.format(line="return pooled['nobody']"), "my_model.py:12: KeyError in forward: 'nobody'"),
    (SIMPLE.format(line="return x.expand(-1, 2)"), "my_model.py:10: forward returned [128, 2] for 128 samples"),
    (SIMPLE.format(line="return None"), "my_model.py:10: forward returned NoneType for 128 samples"),
    (SIMPLE.format(line="return x.detach()"), "my_model.py:10: the logits that forward returned depend on no param"),
    (SIMPLE.format(line="return torch.log(-x.square())"),
     "my_model.py:12: forward makes NaN or infinity of finite inputs and weights (log)"),
    (SIMPLE.replace("nn.Linear(model.num_dense, 1)", "nn.Linear(model.nothing, 1)"), "my_model.py:8: AttributeError"),
    ("import torch\nclass MyModel: pass", "my_model.py: MyModel is not a torch.nn.Module"),
    ("from torch import nn\nclass MyModel(nn.Module):\n    def __init__(self, model):\n        super().__init__()\n"
     "    def forward(self, dense, pooled): return dense", "my_model.py:5: MyModel has no parameter to train"),
    ("import nowhere\nclass MyModel: pass", "my_model.py:1: ModuleNotFoundError: No module named 'nowhere'"),
])
def test_an_error_in_the_file_is_one_line_with_file_and_line(own, code, expected):
    with pytest.raises(UserError) as raised:
        train(own(code))
    assert raised.value.what.startswith(expected), raised.value.what
    assert "\n" not in raised.value.what
    assert raised.value.fix


@pytest.mark.parametrize(("change", "expected"), [
    (("self, model", "self"), "my_model.py: class MyModel: MyModel.__init__() takes 1 positional argument but 2 were"),
    (("dense, pooled", "dense"), "my_model.py:10: MyModel.forward() takes 2 positional arguments but 3 were given"),
    (("def forward", "def forwards"), "my_model.py: MyModel has no method forward(dense, pooled)"),
    (("nn.Linear(model.num_dense, 1)", "nn.LazyLinear(1)"), "my_model.py: layer.weight of MyModel has no shape before"),
    (("return x", "import sys; sys.exit(0)"), "my_model.py:12: SystemExit in forward: 0"),
    (("super().__init__()", "exit(0)"), "my_model.py:7: SystemExit in __init__: 0"),
])
def test_a_class_that_breaks_the_contract_is_reported_with_its_file(change, expected):
    code = SIMPLE.format(line="return x").replace(*change)
    model = ModelSpec(kind="my_model:MyModel", code=code, num_dense=3)
    assert trace_network(model).note.startswith(f"its dense layers are not counted: {expected}")
    with pytest.raises(UserError) as raised:
        logits_of(load_network(model), torch.zeros(4, 3), {})
    assert raised.value.what.startswith(expected)
    assert raised.value.fix


def test_bad_numbers_in_the_data_are_not_blamed_on_the_model(own, alone):
    from embark.trainers.torch.networks.custom_model import CustomNetwork

    network = CustomNetwork(own(SIMPLE.format(line="return x")).model.model_copy(update={
        "code": SIMPLE.format(line="return x")}))
    dense = torch.full((4, 3), torch.nan)
    assert network(dense, torch.zeros(4, 32)).isnan().all()


def test_the_trace_of_dlrm_counts_what_its_layers_say():
    sizes = {"num_dense": 13, "embedding_dim": 32, "bottom_mlp": (128, 64), "top_mlp": (256, 128), "num_tables": 12,
             "rows_per_table": 100}
    traced = trace_network(ModelSpec(kind="my_model:MyModel", code=DLRM, **sizes))
    layers = layers_of(ModelSpec(**sizes))
    assert (traced.note, traced.num_values) == ("", layers.num_values)
    assert traced.num_layers == layers.num_layers + 1  # the dots
    assert traced.flops_per_sample == pytest.approx(layers.flops_per_sample, rel=0.1)
    assert layers.output_width < traced.output_width < 2 * layers.output_width


def test_a_network_that_cannot_be_traced_is_planned_with_a_note():
    looks = SIMPLE.format(line="return x * float(x.sum())")
    model = ModelSpec(kind="my_model:MyModel", code=looks, num_dense=3)
    assert trace_network(model).note.startswith("its dense layers are not counted: my_model.py:12: RuntimeError")
    spec = resolve({"model": {"kind": "my_model:MyModel", "code": looks}})
    here = {"engine": "pipeline", "device": "cpu", "precision": "fp32", "world_size": 1, "device_name": "",
            "device_bytes": 0, "host_bytes": 8 << 30}
    assert predict_local(spec, here)["step_s"] > 0


def test_auto_captures_on_a_gpu_or_falls_back_with_a_reason():
    spec = resolve({"model": {"kind": "my_model:MyModel", "code": DLRM}})
    assert cuda_graph_obstacle(spec, "cuda", has_tables_on_host=False) == ""
    assert select_engine(spec, "cuda", "")[0] == "cuda_graph"
    for engine in ("auto", "cuda_graph"):
        chosen = resolve({"model": {"kind": "my_model:MyModel"}, "train": {"engine": engine}})
        assert select_engine(chosen, "cuda", "it waits") == ("pipeline", "it waits")
    with pytest.raises(SpecError, match="is not supported by the JAX trainer"):
        check_supported(spec)
