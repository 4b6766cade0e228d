"""The public Python API: every name resolves and is typed, and returns what the commands print."""

from __future__ import annotations

import ast
import inspect
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import embark
from embark.__main__ import run
from embark.errors import MissingPackage, UserError
from embark.events.events import Event, to_jsonable
from embark.events.results import TrainResult
from embark.lint import rendered
from embark.render.folder import File
from embark.run.evaluate_run import EvaluationResult
from embark.run.feature_metrics import Estimate, FeatureImportance, ImportanceResult
from embark.spec import to_toml
from embark.tuning.tune import TrialResult, TuneResult

GUIDE = Path(__file__).parents[2] / "docs" / "start" / "python-api.md"


@pytest.mark.parametrize("name", embark.__all__)
def test_every_public_name_resolves_is_documented_and_typed(name):
    value = getattr(embark, name)
    assert value.__doc__
    assert f"`{name}" in GUIDE.read_text()
    if inspect.isfunction(value):
        signature = inspect.signature(value)
        annotations = [signature.return_annotation, *(one.annotation for one in signature.parameters.values())]
        assert inspect.Signature.empty not in annotations


def test_no_public_name_is_a_package_s_own():
    """`import embark.plan` would replace a function of that name."""
    packages = {path.parent.name for path in Path(embark.__file__).parent.glob("*/__init__.py")}
    assert not packages & set(embark.__all__)
    assert set(embark.__all__) <= set(dir(embark))
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = embark.nothing_like_it


def test_a_plan_is_what_the_command_prints(capsys):
    spec = embark.load_spec("criteo-1tb", ["place.machine=p4d.24xlarge"])
    assert run(["plan", "criteo-1tb", "--set", "place.machine=p4d.24xlarge", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(to_jsonable(embark.plan_run(spec).to_dict())))


def test_a_plan_is_a_table_of_machines():
    spec = embark.load_spec("laptop")
    across = embark.plan_run(spec, embark.PlanRequest(across=True)).to_pandas()
    assert across["total_usd"].is_monotonic_increasing
    assert len(across) > 5
    rows = embark.plan_run(embark.load_spec("laptop", ["place.machine=a2-highgpu-1g"])).to_rows()
    assert [row["machine"] for row in rows if row["how"] == "as asked"] == ["a2-highgpu-1g"]
    serving = embark.plan_serving(spec, embark.ServeRequest(qps=200, p99_ms=60))
    assert list(serving.to_pandas()["machine"]) == [one.machine for one in serving.offers]
    assert embark.plan_here(spec).to_pandas()["device"].tolist() == ["cpu"]


def test_features_tasks_and_trials_are_rows():
    loss, auc = Estimate(0.2, 0.1, 0.3), Estimate(0.0, -0.1, 0.1)
    found = ImportanceResult("runs/a", 9, "", "", "rows", 100, 0.5, 0.7, (
        FeatureImportance("city", "sparse", "city", loss, auc),), "permuted")
    assert found.to_rows() == [{
        "feature": "city", "kind": "sparse", "table": "city", "log_loss_increase": 0.2, "log_loss_increase_low": 0.1,
        "log_loss_increase_high": 0.3, "auc_drop": 0.0, "auc_drop_low": -0.1, "auc_drop_high": 0.1,
        "differs_from_0": True}]
    assert found.to_dict() == to_jsonable(found)
    whole = EvaluationResult("runs/a", 9, "", "test", "rows", "CPU", 100, 0.7, 0.9, 0.5, math.nan)
    assert whole.to_rows()[0]["auc"] == 0.7
    assert whole.to_dict()["calibration"] is None
    tasks = replace(whole, tasks={"click": {"auc": 0.7}, "stars": {"mse": 2.0}}).to_pandas()
    assert tasks["task"].tolist() == ["click", "stars"]
    assert tasks["mse"].isna().tolist() == [True, False]
    assert replace(whole, ranking={"recall_at_k": 0.3, "k": 20, "num_users": 7}).to_rows()[0]["recall_at_k"] == 0.3
    trials = tuple(TrialResult(number, "complete", 0.7, {"train.learning_rate": 0.1 * number}, "runs/t", 3.0, None)
                   for number in range(2))
    tuned = TuneResult("runs/t", "auc", {}, trials, 2, "trials", 1, 0.7, 0.7, "best.toml", 6.0, None)
    assert tuned.to_pandas()["train.learning_rate"].tolist() == [0.0, 0.1]


def test_runs_are_compared_by_name(tmp_path):
    runs = [embark.load_spec("laptop", [f"name={name}", f"store.root={tmp_path}"]) for name in "ab"]
    for number, spec in enumerate(runs):
        folder = tmp_path / spec.name
        folder.mkdir()
        (folder / "spec.toml").write_text(to_toml(spec))
        events = [Event("start", {"name": spec.name, "num_steps": 2}),
                  Event("eval", {"step": 2, "auc": (7 + number) / 10})]
        (folder / "events.jsonl").write_text("".join(f"{event.to_json()}\n" for event in events))
    found = embark.compare_runs([f"{tmp_path}/a", f"{tmp_path}/b"])
    assert found.to_pandas().set_index("run")["eval_auc"].to_dict() == {"a": 0.7, "b": 0.8}


def test_a_data_frame_without_pandas_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingPackage, match=r"embark-rec\[notebook\]"):
        TrainResult().to_pandas()


def test_the_result_of_training_is_shown_without_its_lists():
    assert repr(TrainResult(auc=0.7, score_counts=[0] * 30)) == "TrainResult({'auc': 0.7})"


def test_a_path_in_place_of_a_spec_is_refused_with_the_call_that_trains_it():
    with pytest.raises(UserError, match="takes a spec") as caught:
        embark.train("churn.toml")
    assert caught.value.fix == "embark.train(embark.load_spec('churn.toml'))"


def test_rendered_files_are_linted(monkeypatch):
    spec = embark.load_spec("quickstart", ["place.machine=p5.48xlarge", "store.root=s3://bucket/runs"])
    assert "kubernetes_job.yaml" in {file.path for file in embark.render_files(spec)}
    monkeypatch.setattr(rendered, "render", lambda job: [File("job.yaml", "kind: Job\nspec: [\n")])
    with pytest.raises(UserError, match=r"job\.yaml:3: EMB001"):
        embark.render_files(spec)


def test_data_of_another_kind_is_not_prepared(tmp_path):
    spec = embark.load_spec("laptop", ["data.prepare.input=clicks.csv"])
    with pytest.raises(UserError, match=r"data\.kind is 'synthetic'") as caught:
        embark.prepare_data(spec, tmp_path / "out")
    assert 'data.kind = "prepared"' in caught.value.fix
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("as_given", [str, Path, lambda path: [str(path)], lambda path: [path]])
def test_one_path_or_several_are_linted_fixed_and_diagnosed(tmp_path, as_given):
    manifest, log = tmp_path / "bad.yaml", tmp_path / "train.log"
    manifest.write_text("kind: Job\nkind: Job\n")
    log.write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n")
    for fix in (False, True):
        assert "EMB003" in {one.code for one in embark.lint_files(as_given(manifest), fix=fix).findings}
    assert [one.code for one in embark.diagnose_run(as_given(log)).diagnoses] == ["EMD101"]


def test_the_guide_s_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    for code in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL):
        exec(compile(code, str(GUIDE), "exec"), names)
    shown = capsys.readouterr().out
    assert "committed" in shown
    assert "held out" not in shown  # a script shows no progress unless it asks
    curves = names["result"].to_pandas()
    assert curves["step"].iloc[-1] == names["result"].to_dict()["step"] == 20
    assert curves["eval_auc"].notna().sum() == 1
    assert embark.train(names["spec"], progress=True).to_pandas().equals(curves)
    assert "is finished: 20 steps" in capsys.readouterr().out


def test_the_stub_names_the_same_functions():
    stub = Path(embark.__file__).with_suffix(".pyi").read_text()
    names = ast.literal_eval(re.search(r"__all__ = (\[.*?\])", stub, re.DOTALL)[1])
    assert set(names) == set(embark.__all__)
    imported = {(alias.asname or alias.name): f"{node.module}:{alias.name}"
                for node in ast.walk(ast.parse(stub)) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert imported == {name: f"embark.{location}" for name, location in embark._LOCATIONS.items()}
