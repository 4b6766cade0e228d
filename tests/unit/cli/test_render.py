"""`embark render` as a person and a program see it."""

from __future__ import annotations

import json

import pytest

from embark.cli.console import Console
from embark.cli.render import render
from embark.errors import SpecError, UserError
from embark.render.folder import File

AWS = ["place.machine=p5.48xlarge", "place.nodes=2", "store.root=s3://bucket/runs"]


def rendered(folder, *sets, diff=False, force=False, json_=False):
    return render("quickstart", set_=(*AWS, *sets), out=folder, diff=diff, force=force, console=Console(json=json_))


def rendered_again(folder, *sets, diff=False, force=False):
    return render(str(folder / "run.toml"), set_=sets, diff=diff, force=force, console=Console())


def test_files_are_written_and_the_second_time_nothing_differs(tmp_path, capsys):
    assert rendered(tmp_path / "out") == 0
    assert "linted" in capsys.readouterr().out
    assert (tmp_path / "out/kubernetes_job.yaml").exists()
    assert rendered(tmp_path / "out", diff=True) == 0
    assert "is up to date" in capsys.readouterr().out


def test_diff_shows_every_number_that_follows_the_nodes_and_writes_nothing(tmp_path, capsys):
    rendered(tmp_path / "out")
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    capsys.readouterr()
    assert rendered_again(tmp_path / "out", "place.nodes=4", diff=True) == 1
    shown = capsys.readouterr().out
    for line in ("-nodes = 2", "+nodes = 4", "-  completions: 2", "+  completions: 4", "-  parallelism: 2",
                 "+  parallelism: 4"):
        assert line in shown
    assert "--nnodes=4" in shown
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before


def test_an_edited_file_is_stored_reported_and_written_only_by_force(tmp_path, capsys):
    rendered(tmp_path / "out")
    mine = tmp_path / "out/kubernetes_job.yaml"
    mine.write_text(mine.read_text() + "# mine\n")
    capsys.readouterr()
    assert rendered_again(tmp_path / "out", "place.nodes=4") == 1
    assert "edited by hand: kubernetes_job.yaml" in " ".join(capsys.readouterr().out.split())
    assert mine.read_text().endswith("# mine\n")
    assert rendered_again(tmp_path / "out", force=True) == 0
    assert "# mine" not in mine.read_text()


def test_for_programs_it_is_json(tmp_path, capsys):
    assert rendered(tmp_path / "out", json_=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert {(file["path"], file["state"]) for file in report["files"]} > {("Dockerfile", "new")}
    assert report["skipped"] == []


@pytest.mark.parametrize(("sets", "says"), [
    (["place.machine="], "none is named"), (["place.machine=p5.48xlrge"], "did you mean"),
    (["place.cloud=gcp"], "belongs to aws"), (["train.batch_size=1000"], "does not divide over 16 ranks"),
    (["store.root=runs"], "its own part of every checkpoint"),
])
def test_what_cannot_be_rendered_is_refused_with_its_fix(tmp_path, sets, says):
    with pytest.raises(SpecError, match=says):
        rendered(tmp_path / "out", *sets)
    assert not (tmp_path / "out").exists()


def test_a_file_with_a_lint_error_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr("embark.lint.rendered.render", lambda job: [File("job.yaml", "kind: Job\nspec: [\n")])
    with pytest.raises(UserError, match=r"job\.yaml:3: EMB001"):
        rendered(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_in_the_folders_place_is_refused(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(UserError, match="is not a folder"):
        rendered(tmp_path / "out")
