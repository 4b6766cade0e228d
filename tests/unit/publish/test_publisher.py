"""Versions are published when they pass the gate; one that is refused is kept, explained and never served by itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from exported_runs import EditedRun

from embark.__main__ import run as embark
from embark.errors import DataError, UserError
from embark.export.artifact import current, current_version, open_artifact, open_versions
from embark.export.export_run import export_run, read_contents
from embark.export.rollback import list_versions, rollback
from embark.export.write_version import write_version
from embark.publish import publisher
from embark.store.checkpoint_inspect import find_trained

BOUNDS = {"max_calibration_error": 9.0, "max_auc_drop": 0.2}  # of weights that were drawn


class Publishing(EditedRun):
    """A run that is published to a folder."""

    def __init__(self, folder, **bounds) -> None:
        self.to = str(folder / "at")
        super().__init__(folder, rows=4_000, publish={"to": self.to, **BOUNDS, **bounds})
        self.weights = {name: values / 20 for name, values in self.weights.items()}

    def publish(self, num_rows: int = 20):
        """The next checkpoint, which differs a little."""
        self.save(num_rows, scale=0.001)
        return publisher.publish(self.uri)

    @property
    def uri(self) -> str:
        return f"{self.spec.store.root}/{self.spec.name}"

    def spoil(self) -> None:
        """Predict far too much from now on."""
        name = max(name for name in self.weights if name.startswith("model.dense.top") and name.endswith("bias"))
        self.weights[name] = self.weights[name] + np.float32(4)


def test_a_passed_version_is_current_and_a_refused_one_is_kept(tmp_path, capsys):
    run = Publishing(tmp_path)
    first, second = run.publish(), run.publish()
    assert (first.version, first.parent, first.is_current, first.refused) == (1, None, True, "")
    assert (second.version, second.parent, second.is_current) == (2, 1, True)
    run.spoil()
    run.save(scale=0.001)
    assert embark(["publish", run.uri, "--dry-run"]) == 1
    assert "refused: all rows: " in capsys.readouterr().out
    assert len(list_versions(run.to).versions) == 2  # nothing was written
    refused = publisher.publish(run.uri)
    assert (refused.version, refused.is_current) == (3, False)
    assert "the log loss is" in refused.refused
    assert current_version(open_versions(run.to)) == 2
    record = json.loads((tmp_path / "at" / "version-000000003" / "gate.json").read_text())
    assert (record["passed"], record["why"]) == (False, refused.refused)
    assert list_versions(run.to).versions[2].refused == refused.refused
    assert embark(["publish", run.uri]) == 1
    assert "is version 3 already, refused: " in capsys.readouterr().out
    run.weights = {name: values + 0 for name, values in find_weights(run, 2).items()}
    good = run.publish()
    assert (good.version, good.parent, good.is_current) == (4, 2, True)
    assert embark(["publish", run.uri, "--dry-run"]) == 0
    rollback(run.to, 3)  # by hand it can be served
    assert open_artifact(run.to).version == 3


def test_bounds_can_be_set_when_a_run_is_published_and_nothing_else(tmp_path, capsys):
    run = Publishing(tmp_path)
    run.publish()
    run.spoil()
    run.save(scale=0.001)
    assert embark(["publish", run.uri, "--dry-run"]) == 1
    loose = [word for name in ("max_auc_drop", "max_loss_increase", "max_calibration_error", "max_auc_shift")
             for word in ("--set", f"publish.{name}=100")]
    assert embark(["publish", run.uri, "--dry-run", *loose]) == 0
    assert embark(["publish", run.uri, "--set", f"publish.to={tmp_path / 'other'}", *loose]) == 0
    assert current_version(open_versions(str(tmp_path / "other"))) == 1
    capsys.readouterr()
    assert embark(["publish", run.uri, "--set", "train.seed=3"]) == 64
    assert "only fields of [publish] can be set now" in capsys.readouterr().err


def find_weights(run: Publishing, step: int):
    from embark.store.checkpoint_arrays import CheckpointArrays

    trained = find_trained(run.uri, step)
    arrays = CheckpointArrays(trained.run_dir.checkpoints.store, trained.checkpoint.name)
    return {name: arrays.tensor(name, entry.size) for name, entry in arrays.entries.items()}


def test_a_first_version_that_is_refused_is_not_served(tmp_path):
    run = Publishing(tmp_path, max_calibration_error=0.0001)
    assert "the mean prediction is" in run.publish().refused
    assert current_version(open_versions(run.to)) == 0
    with pytest.raises(UserError, match="has no current version"):
        open_artifact(run.to)


def test_a_killed_publisher_goes_on_with_the_version_it_had_written(tmp_path, monkeypatch):
    run = Publishing(tmp_path)
    run.publish()
    run.save(scale=0.001)
    for function in ("_judged", "set_current", "write_gate"):
        with monkeypatch.context() as patch:
            patch.setattr(publisher, function, killed)
            with pytest.raises(KeyboardInterrupt):
                publisher.publish(run.uri)
        assert open_artifact(run.to).version == (2 if function == "write_gate" else 1)
    result = publisher.publish(run.uri)
    assert (result.version, result.is_current, result.is_new) == (2, True, True)
    rollback(run.to, 1)
    assert not publisher.publish(run.uri).is_new  # which a publisher that starts again does not undo
    assert current_version(open_versions(run.to)) == 1


def killed(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("function", ["_judged", "set_current", "write_gate"])
def test_a_killed_publisher_does_not_undo_a_rollback(tmp_path, monkeypatch, function):
    run = Publishing(tmp_path)
    run.publish()
    run.publish()
    run.save(scale=0.001)
    with monkeypatch.context() as patch:
        patch.setattr(publisher, function, killed)
        with pytest.raises(KeyboardInterrupt):
            publisher.publish(run.uri)
    versions = open_versions(run.to)
    assert current_version(versions) == (3 if function == "write_gate" else 2)
    rollback(run.to)
    rollback(run.to, 1)
    result = publisher.publish(run.uri)
    assert (result.version, result.is_current, result.is_new, result.refused) == (3, False, True, "")
    assert "version 1 was made current by `embark rollback`" in result.not_current
    assert current_version(versions) == 1
    assert not publisher.publish(run.uri).is_new


def during_judgement(monkeypatch, act) -> None:
    """Act once between the verdict and the switch."""
    judged, acts = publisher._judged, [act]

    def judge(*args: object) -> object:
        found = judged(*args)
        while acts:
            acts.pop()()
        return found

    monkeypatch.setattr(publisher, "_judged", judge)


def test_a_rollback_during_a_publish_stands(tmp_path, monkeypatch, capsys):
    run = Publishing(tmp_path)
    run.publish()
    run.publish()
    run.save(scale=0.001)
    during_judgement(monkeypatch, lambda: rollback(run.to, 1))
    assert embark(["publish", run.uri]) == 1
    printed = capsys.readouterr().out
    assert "is not made current: version 1 was made current by `embark rollback` since this one was written" in printed
    assert f"embark rollback {run.to} 3" in printed
    record = json.loads((tmp_path / "at" / "version-000000003" / "gate.json").read_text())
    assert (record["passed"], record["not_current"][:9]) == (True, "version 1")
    assert current_version(open_versions(run.to)) == 1
    assert embark(["publish", run.uri]) == 1
    assert "is version 3 already, which is not current: version 1 was made current" in capsys.readouterr().out
    rollback(run.to, 3)
    assert embark(["publish", run.uri]) == 0


def test_an_older_step_does_not_replace_what_another_publisher_published(tmp_path, monkeypatch):
    run = Publishing(tmp_path)
    run.publish()
    run.save(scale=0.001)
    during_judgement(monkeypatch, lambda: run.publish())  # step 3, while step 2 is judged
    older = publisher.publish(run.uri)
    assert (older.step, older.is_current, older.refused) == (2, False, "")
    assert older.not_current == "version 3 is current, which is of step 3 of the run"
    assert open_artifact(run.to).info.step == 3


def test_a_newer_step_is_judged_again_after_an_older_one(tmp_path, monkeypatch):
    run = Publishing(tmp_path)
    run.publish()
    uri, newest = run.save(scale=0.001), find_trained
    run.save(scale=0.001)

    def publish_older() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(publisher, "find_trained", lambda run, sets=(): newest(run, 2, sets))
            assert publisher.publish(uri).is_current

    during_judgement(monkeypatch, publish_older)
    result = publisher.publish(uri)
    assert (result.step, result.is_current, result.version) == (3, True, 2)
    record = json.loads((tmp_path / "at" / "version-000000002" / "gate.json").read_text())
    assert record["passed"]
    assert current(open_versions(run.to)).previous == 3


def test_a_run_trained_anew_under_its_name_is_published(tmp_path, monkeypatch, capsys):
    run = Publishing(tmp_path)
    first, second = run.publish(), run.publish()
    for step in (first.step, second.step):
        run_dir = find_trained(run.uri).run_dir
        run_dir.checkpoints.remove(step)
    again = Publishing(tmp_path)  # other weights, the same steps
    again.save(scale=0.1)
    result = again.publish()
    assert (result.step, result.version, result.is_new, result.is_current) == (second.step, 3, True, True)
    assert result.identity not in (first.identity, second.identity)
    assert embark(["publish", run.uri]) == 0
    assert "step 2 is version 3 already, which is current" in capsys.readouterr().out


def test_a_version_that_was_rolled_back_is_not_published_again(tmp_path, capsys):
    run = Publishing(tmp_path)
    run.publish(), run.publish()
    rollback(run.to, 1)
    assert embark(["publish", run.uri]) == 0
    said = capsys.readouterr().out
    assert "is version 2 already, which is not current" in said
    assert f"embark rollback {run.to} 2" in said
    (tmp_path / "at" / "current.json").unlink()
    assert embark(["publish", run.uri]) == 0
    assert f"embark rollback {run.to} 2" in capsys.readouterr().out
    with pytest.raises(UserError, match="has no current version") as error:
        open_artifact(run.to)
    assert error.value.fix == f"`embark rollback {run.to} VERSION` makes one current; its versions: 1, 2"


@pytest.mark.parametrize(("version", "is_there"), [(1, False), (2, False), (2, True)])
def test_files_that_the_current_version_lacks_are_named(tmp_path, version, is_there):
    run = Publishing(tmp_path)
    run.publish(), run.publish()
    assert not publisher.publish(run.uri).is_new
    folder = tmp_path / "at" / f"version-{version:09}"
    path = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    path.write_bytes(b"") if is_there else path.unlink()
    with pytest.raises(DataError) as of_rollback:
        rollback(run.to, 2)
    with pytest.raises(DataError, match=f"{version} is damaged: {path.name} has 0 bytes instead of [1-9]") as error:
        publisher.publish(run.uri)
    assert of_rollback.value.what == error.value.what
    command = error.value.fix.split("`")[1].split()
    assert embark(command[1:]) == 0
    assert open_artifact(run.to).version == 3


@pytest.mark.parametrize("damage", ["no commit record", "a number that no version has"])
def test_a_publisher_goes_on_where_the_current_version_is_gone(tmp_path, damage):
    run = Publishing(tmp_path)
    run.publish(), run.publish()
    if damage == "no commit record":
        (tmp_path / "at" / "version-000000002" / "commit.json").unlink()
    else:
        (tmp_path / "at" / "current.json").write_text('{"version": 77, "identity": "ab"}')
    result = run.publish()
    assert (result.version, result.is_current, result.parent) == (3, True, None)
    assert "cannot be read, and is not compared" in result.verdict.notes[0]
    assert open_artifact(run.to).version == 3


def test_two_projects_with_one_uri_do_not_share_verdicts(tmp_path, monkeypatch):
    for project, seed in (("one", 0.001), ("two", 0.002)):
        (tmp_path / project).mkdir()
        monkeypatch.chdir(tmp_path / project)
        run = Publishing(Path("."))
        run.spec = run.spec.model_copy(update={"publish": run.spec.publish.model_copy(
            update={"to": str(tmp_path / "at")})})
        run.save(scale=seed)
        assert publisher.publish("runs/edited").is_new
        assert not publisher.publish("runs/edited").is_new
    assert [one.run for one in list_versions(str(tmp_path / "at")).versions] == ["runs/edited"] * 2


def test_old_versions_go_except_parents_of_deltas_and_exports(tmp_path):
    run = Publishing(tmp_path, keep_versions=2, gate=False)
    export_run(run.save(scale=0.001), run.to)
    write_version(read_contents(find_trained(run.save(scale=0.001))), run.to, candidate=True)
    for _ in range(4):
        run.publish()
    numbers = [one.version for one in list_versions(run.to).versions]
    assert numbers == [1, 3, 4, 5, 6]  # 2 is a delta of none
    for number in numbers:
        open_artifact(run.to, number)


def test_watch_publishes_new_checkpoints_and_reports_an_error_once(tmp_path, monkeypatch):
    run, results, errors = Publishing(tmp_path, gate=False, every_minutes=1e-9), [], []
    steps = iter([run.save, lambda: None, lambda: (run.save(), run.save()), lambda: None, lambda: None])
    publish = publisher.publish
    broken = iter([False, True, True, False, False, False])

    def publish_or_fail(*args: object, **settings: object) -> object:
        if next(broken):
            raise DataError("the store does not answer")
        return publish(*args, **settings)

    monkeypatch.setattr(publisher, "publish", publish_or_fail)
    monkeypatch.setattr(publisher.time, "sleep", lambda _: None)

    def is_stopped() -> bool:
        act = next(steps, None)
        if act:
            act()
        return act is None

    publisher.watch(run.uri, on_result=results.append, on_error=errors.append, is_stopped=is_stopped)
    assert [(one.version, one.step) for one in results] == [(1, 1), (2, 3)]
    assert [one.what for one in errors] == ["the store does not answer"]


def test_a_column_that_the_model_does_not_have_is_no_slice(tmp_path):
    with pytest.raises(UserError, match=r"publish\.slices: country: the model has no such feature"):
        Publishing(tmp_path, slices=["country"]).publish()


def test_a_publisher_has_two_versions_on_its_disk_however_long_it_runs(tmp_path, monkeypatch):
    """Versions in an object store are fetched to be judged; a pod that kept them all would be evicted."""
    monkeypatch.setenv("EMBARK_CACHE", str(tmp_path / "cache"))
    run = Publishing(tmp_path, to=f"memory://{tmp_path.name}-published")
    num_on_disk = []
    for _ in range(5):
        for values in run.weights.values():
            values[:] *= np.float32(0.999)  # every row differs, so that each version is a full one
        assert run.publish(num_rows=4_000).is_current
        num_on_disk.append(len(list((tmp_path / "cache" / "exported").glob("*/*/version-*"))))
    assert max(num_on_disk) == 2
