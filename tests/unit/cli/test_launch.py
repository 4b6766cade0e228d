"""`embark launch`, `status` and `cancel` where no cluster is asked."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest
from prepared_rows import RAGGED, make_prepared

from embark.cli.console import Console
from embark.cli.launch import launch_run
from embark.cli.status import cancel as cancel_command
from embark.cli.status import logs as logs_command
from embark.cli.status import status as status_command
from embark.errors import DataError, SpecError, UserError
from embark.launch.backend import RunHandle
from embark.launch.launching import prepare_launch
from embark.launch.run_registry import RunRecord, registry_dir, save_record
from embark.launch.shell import DryRunShell
from embark.render.folder import File
from embark.spec import load_spec

AWS = ["name=dlrm", "place.machine=p5.48xlarge", "place.nodes=2", "store.root=s3://training/runs",
       "place.image=registry.example.com/embark:1"]


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("KUBECONFIG", raising=False)


@pytest.mark.parametrize("target", ["job", "jobset", "trainjob", "pytorchjob"])
def test_a_dry_run_needs_no_kubectl_and_gives_a_program_its_commands(target, capsys):
    spec = load_spec("quickstart", [*AWS, f"place.target={target}"])
    assert launch_run(Console(json=True), spec, yes=False, dry_run=True) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["usd_per_hour"] > 0
    assert "fits 2 x p5.48xlarge" in answer["estimate"]["verdict"]
    applied = [words for words in answer["commands"] if "apply" in words]
    assert ["--dry-run=server" in words for words in applied] == [False, True, False]


@pytest.mark.parametrize("target", ["job", "serve", "vertex"])
def test_a_dry_run_without_an_image_shows_the_commands_and_says_so(target, capsys):
    google = ["place.machine=a3-highgpu-8g", "place.cloud=gcp", "place.account=project", "store.root=gs://training/runs",
              f"place.target={target}"]
    spec = load_spec("quickstart", [*google, *(["serve.artifact=gs://training/models"] if target == "serve" else [])])
    assert launch_run(Console(json=True), spec, yes=False, dry_run=True) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["commands"]
    assert "place.image is not set" in shown.err


def test_a_manifest_with_a_lint_error_is_not_submitted(monkeypatch):
    monkeypatch.setattr("embark.lint.rendered.render", lambda job: [File("kubernetes_job.yaml", "spec: [\n")])
    with pytest.raises(UserError, match="lint errors") as caught:
        launch_run(Console(json=True), load_spec("quickstart", AWS), yes=False, dry_run=True)
    assert "nothing was written or launched" in caught.value.fix


def test_a_budget_on_the_command_line_travels_in_the_spec(monkeypatch):
    from embark.cli import launch as launch_cli

    seen = []
    monkeypatch.setattr(launch_cli, "launch_run", lambda console, spec, **rest: seen.append(spec) or 0)
    assert launch_cli.launch("quickstart", set_=tuple(AWS), budget=49.5) == 0
    assert seen[0].place.budget_usd == 49.5


def test_a_target_that_launch_does_not_support_names_another_way():
    with pytest.raises(UserError, match="sagemaker") as caught:
        launch_run(Console(), load_spec("quickstart", [*AWS, "place.target=sagemaker"]), yes=True, dry_run=False)
    assert "embark render" in caught.value.fix


def test_a_run_that_does_not_fit_is_not_launched():
    settings = ["place.machine=g5.xlarge", "place.nodes=1", "model.rows_per_table=400000000"]
    with pytest.raises(UserError, match="does not fit") as caught:
        launch_run(Console(), load_spec("quickstart", [*AWS, *settings]), yes=True, dry_run=True)
    assert "nothing was launched" in caught.value.fix


def test_a_spec_that_cannot_be_rendered_is_refused_with_all_its_mistakes():
    settings = ["store.root=runs", "train.batch_size=1001"]
    with pytest.raises(SpecError) as caught:
        launch_run(Console(), load_spec("quickstart", [*AWS, *settings]), yes=True, dry_run=False)
    assert {mistake.field for mistake in caught.value.mistakes} == {"store.root", "train.batch_size"}


def test_without_kubectl_nothing_is_stored():
    with pytest.raises(UserError, match="kubectl is not installed"):
        launch_run(Console(quiet=True), load_spec("quickstart", AWS), yes=True, dry_run=False)
    assert not registry_dir().exists()


def test_a_name_that_was_never_launched_is_reported():
    for verb in (
        lambda: status_command("x", console=Console()),
        lambda: logs_command("x", follow=False, console=Console()),
        lambda: cancel_command("x", yes=True, console=Console()),
    ):
        with pytest.raises(UserError, match="x: nothing was launched under that name"):
            verb()


def test_one_place_that_cannot_be_asked_does_not_hide_the_others(tmp_path, capsys):
    where = {"context": "east", "kubeconfig": "", "namespace": "embark", "object": "far", "target": "job",
             "cloud": "aws", "num_nodes": 1, "queue": ""}
    save_record(RunRecord(RunHandle("far", "kubernetes", where), "", time.time(), True))
    save_record(RunRecord(RunHandle("near", "local", {"folder": str(tmp_path / "near")}), "", time.time(), True))
    save_record(RunRecord(RunHandle("new", "of another version", {}), "", time.time(), True))
    (registry_dir() / "bad.json").write_text("{")
    assert status_command("", console=Console(json=True)) == 0
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    rows = {row["name"]: row for row in answer["runs"]}
    assert rows["far"]["state"] == "unknown"
    assert "kubectl is not installed" in rows["far"]["reason"]
    assert rows["near"]["state"] == "gone"
    assert "does not know" in rows["new"]["reason"]
    assert [path.endswith("bad.json") for path in answer["unreadable"]] == [True]


def test_a_launch_that_was_cut_off_before_anything_was_made_says_so(tmp_path, capsys):
    handle = RunHandle("near", "local", {"folder": str(tmp_path / "near")})
    save_record(RunRecord(handle, "", time.time(), is_submitted=False))
    assert status_command("near", console=Console()) == 0
    assert "its launch was interrupted before it was created" in capsys.readouterr().out


def test_a_paid_run_is_not_launched_without_a_terminal_unless_yes_is_given(monkeypatch):
    prepared = SimpleNamespace(estimate=SimpleNamespace(verdict="fits", price="$1 an hour"),
                               handle=RunHandle("dlrm", "vm", {}, "dlrm"))
    monkeypatch.setattr("embark.cli.launch.prepare_launch", lambda *_, **__: prepared)
    with pytest.raises(UserError) as caught:
        launch_run(Console(quiet=True), load_spec("quickstart", AWS), yes=False, dry_run=False)
    assert "--yes" in caught.value.fix


def test_what_prepared_data_decides_is_decided_before_the_launch(tmp_path, monkeypatch):
    made = make_prepared(tmp_path / "data", RAGGED, train=30)
    monkeypatch.chdir(tmp_path)
    shell = DryRunShell(lambda line: None)
    spec = load_spec("quickstart", ["data.kind=prepared", "data.path=data", "model.embedding_dim=16"])
    unset = spec.model_copy(update={"model": type(spec.model)(embedding_dim=16)})
    launched = prepare_launch(unset, shell, print).request.spec
    assert [table.name for table in launched.model.tables] == [feature.name for feature in RAGGED]
    assert (launched.model.num_dense, launched.data.path) == (3, str(made.path))
    missing = unset.model_copy(update={"data": unset.data.model_copy(update={"path": "nowhere"})})
    with pytest.raises(DataError, match="no prepared data"):  # here it would be read, so nothing is launched
        prepare_launch(missing, shell, print)
