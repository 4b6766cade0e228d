"""`embark checkpoints` lists, verifies, compares and prunes; a mistake removes nothing."""

import io
import json
import shutil

import pytest

from embark.__main__ import run

RUN = ["train", "laptop", "-q"]
for setting in ("model.num_tables=3", "model.rows_per_table=50", "train.batch_size=64", "train.num_steps=4",
                "train.eval_every=2", "data.num_eval_samples=256", "watch.tensorboard=false", "place.device=cpu",
                "store.checkpoint_every=1", "store.keep_checkpoints=9"):
    RUN += ["--set", setting]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with the checkpoints of steps 1 to 4, whose rules would keep only the last."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run(RUN) == 0
    spec = folder / "runs" / "laptop" / "spec.toml"
    spec.write_text(spec.read_text().replace("keep_checkpoints = 9", "keep_checkpoints = 1"))
    return folder / "runs"


@pytest.fixture
def saved(trained, tmp_path, monkeypatch):
    """The checkpoints of a copy of that run."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, tmp_path / "runs")
    return tmp_path / "runs" / "laptop" / "checkpoints"


def test_checkpoints_lists_verifies_compares_and_prunes(capsys, saved, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert run(["checkpoints", "laptop"]) == 0
    listed = capsys.readouterr().out
    assert "newest" in listed
    assert "(step 2)" in listed
    assert run(["checkpoints", "laptop", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [c["step"] for c in listed["checkpoints"]] == [1, 2, 3, 4]
    assert [c["kept"] for c in listed["checkpoints"]] == [[], [], [], ["newest"]]
    assert run(["checkpoints", "runs/laptop", "--verify"]) == 0
    assert "4 checkpoints complete, none damaged" in capsys.readouterr().out
    assert run(["checkpoints", "laptop", "--diff", "1", "4", "--json"]) == 0
    difference = json.loads(capsys.readouterr().out)
    assert (difference["a"], difference["b"], difference["spec"]) == (1, 4, [])
    tables = [t for t in difference["tensors"] if t["name"].startswith("model.tables")]
    assert len(tables) == 3
    assert all(t["max_abs"] > 0 for t in tables)
    assert run(["checkpoints", "laptop", "--diff", "1", "4"]) == 0
    assert "max abs" in capsys.readouterr().out
    assert run(["checkpoints", "laptop", "--prune", "--dry-run"]) == 0
    assert "3 checkpoints would be removed" in capsys.readouterr().out
    assert len(list(saved.iterdir())) == 4
    assert run(["checkpoints", "laptop", "--prune", "--yes", "--json"]) == 0
    pruned = json.loads(capsys.readouterr().out)
    assert [one["step"] for one in pruned["checkpoints"] if one["is_removed"]] == [1, 2, 3]
    assert [path.name for path in saved.iterdir()] == ["step-000000004"]
    assert run(["checkpoints", "laptop", "--prune", "--yes"]) == 0
    assert "nothing to remove" in capsys.readouterr().out


def test_checkpoints_names_what_is_damaged_and_exits_1(capsys, saved):
    (saved / "step-000000003" / "plan.txt").write_text("x")
    assert run(["checkpoints", "laptop", "--verify"]) == 0
    assert "step-000000003/plan.txt" in capsys.readouterr().err
    (saved / "step-000000002" / "index.json").write_text("x")
    assert run(["checkpoints", "laptop", "--verify"]) == 1
    captured = capsys.readouterr()
    assert "3 checkpoints complete, 1 checkpoint damaged" in captured.out
    assert "step-000000002/index.json" in captured.err
    assert run(["checkpoints", "laptop", "--verify", "--json"]) == 1
    listed = {c["step"]: c for c in json.loads(capsys.readouterr().out)["checkpoints"]}
    assert listed[2]["state"] == "damaged"
    assert listed[3]["state"] == "committed"


@pytest.mark.parametrize("answer", ["y\n", "\n", ""])
def test_prune_asks_a_person_and_takes_only_yes_for_yes(capsys, monkeypatch, saved, answer):
    reader = io.StringIO(answer)
    monkeypatch.setattr(reader, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdin", reader)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert run(["checkpoints", "laptop", "--prune"]) == 0
    assert "Remove 3 checkpoints" in capsys.readouterr().err
    assert len(list(saved.iterdir())) == (1 if answer == "y\n" else 4)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["laptop", "--prune"], "--yes"),
        (["laptop", "--prune", "--json"], "--yes"),
        (["laptop", "--diff", "1", "7"], "committed steps: 1, 2, 3, 4"),
        (["laptop", "--diff", "1"], "--diff"),
        (["laptop", "--diff", "one", "two"], "--diff"),
        (["laptop", "--verify", "--prune"], "one at a time"),
        (["laptop", "--yes"], "--prune"),
        (["lptop"], "did you mean 'laptop'"),
        (["runs"], "not a run's directory"),
        (["nothing://x/y"], "nothing://"),
    ],
)
def test_checkpoints_refuses_with_a_sentence_and_removes_nothing(capsys, saved, words, what):
    assert run(["checkpoints", *words]) == 64
    captured = capsys.readouterr()
    assert what in captured.err
    assert "Traceback" not in captured.err
    assert len(list(saved.iterdir())) == 4


def test_checkpoints_of_no_run_is_a_sentence(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["checkpoints", "laptop"]) == 64
    assert "no such run" in capsys.readouterr().err
