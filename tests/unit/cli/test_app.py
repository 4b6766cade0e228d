"""The verbs as a person types them, and what comes of a slip."""

import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from embark.__main__ import run

SMALL = [
    "--set", "model.num_tables=3", "--set", "model.rows_per_table=50", "--set", "train.batch_size=64",
    "--set", "train.num_steps=4", "--set", "data.num_eval_samples=256", "--set", "watch.every=2",
    "--set", "store.checkpoint_at_end=false", "--set", "place.device=cpu", "--set", "watch.tensorboard=false",
]


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_train_trains_and_says_how_close_it_came(capsys, tmp_path):
    assert run(["train", "laptop", *SMALL]) == 0
    printed = capsys.readouterr().out
    assert "AUC" in printed
    assert "samples/s" in printed
    for name in ("spec.toml", "plan.txt", "events.jsonl"):
        assert (tmp_path / "runs" / "laptop" / name).is_file()


def test_train_prints_events_as_json_for_programs(capsys):
    assert run(["train", "laptop", "--json", *SMALL]) == 0
    kinds = [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()]
    assert kinds[0] == "start"
    assert kinds[-1] == "end"
    assert kinds.count("step") == 2


def test_quiet_train_prints_little(capsys):
    assert run(["train", "laptop", "-q", *SMALL]) == 0
    assert 0 < len(capsys.readouterr().out.splitlines()) <= 3


def test_a_finished_run_is_left_alone_unless_fresh(capsys, tmp_path):
    run(["train", "laptop", *SMALL])
    before = (tmp_path / "runs" / "laptop" / "events.jsonl").read_text()
    capsys.readouterr()
    assert run(["train", "laptop", *SMALL]) == 0
    assert "is finished" in capsys.readouterr().out
    assert (tmp_path / "runs" / "laptop" / "events.jsonl").read_text() == before
    assert run(["train", "laptop", "--fresh", *SMALL]) == 0
    assert (tmp_path / "runs" / "laptop-2" / "events.jsonl").is_file()


def test_another_model_never_goes_on_in_a_run_s_directory(capsys, tmp_path):
    run(["train", "laptop", *SMALL])
    before = (tmp_path / "runs" / "laptop" / "spec.toml").read_text()
    assert run(["train", "laptop", *SMALL, "--set", "model.embedding_dim=32"]) == 64
    assert "another model.embedding_dim" in capsys.readouterr().err
    assert (tmp_path / "runs" / "laptop" / "spec.toml").read_text() == before


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["train", "nowhere.toml"], "no such file"),
        (["train", "quikstart"], "quickstart"),
        (["train", "laptop", "--set", "train.batch_sze=3"], "did you mean 'batch_size'?"),
        (["train", "laptop", "--set", "train.batch_size=much"], "valid integer"),
        (["train", "laptop", "--set", "data.kind=columns", "--set", "data.path=gone.csv",
          "--set", "model.num_dense=0"], "gone.csv"),
        (["train", "laptop", "--set", "store.root=/proc/none"], "/proc/none"),
        (["train"], "SPEC"),
        (["trian", "laptop"], "trian"),
        (["train", "laptop", "--frsh"], "--frsh"),
        (["init", "nothing"], "no such preset"),
    ],
)
def test_bad_input_is_a_sentence_and_exit_64_and_no_traceback(capsys, words, what):
    assert run(words) == 64
    captured = capsys.readouterr()
    assert what in captured.err
    assert "Traceback" not in captured.err


def test_an_error_is_json_for_programs(capsys):
    assert run(["train", "quikstart", "--json"]) == 64
    captured = capsys.readouterr()
    assert captured.out == ""
    error = json.loads(captured.err)
    assert error["exit_code"] == 64
    assert "quickstart" in error["fix"]


def test_init_writes_a_spec_and_never_overwrites_one(capsys, tmp_path):
    assert run(["init", "laptop"]) == 0
    assert "embark train laptop.toml" in capsys.readouterr().out
    (tmp_path / "laptop.toml").write_text("mine")
    assert run(["init", "laptop"]) == 64
    assert (tmp_path / "laptop.toml").read_text() == "mine"
    assert run(["init", "laptop", "--force"]) == 0
    assert "[model]" in (tmp_path / "laptop.toml").read_text()


def test_init_writes_where_it_is_told(capsys, tmp_path):
    assert run(["init", "quickstart", "--out", "a.toml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": "a.toml", "preset": "quickstart"}
    assert run(["init", "--out", "-"]) == 0
    assert capsys.readouterr().out == (tmp_path / "a.toml").read_text()
    assert run(["init", "--out", "/proc/none/x.toml"]) == 64


def test_doctor_says_what_matches(capsys):
    code = run(["doctor", "--json"])
    findings = json.loads(capsys.readouterr().out)
    assert code == (1 if any(f["verdict"] == "wrong" for f in findings) else 0)
    assert any("torchrec" in f["name"] for f in findings)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_the_verbs(capsys, shell):
    assert run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "train" in script
    assert "doctor" in script


SAVING = [
    *SMALL, "--set", "store.checkpoint_at_end=true", "--set", "store.checkpoint_every=1", "--set",
    "train.eval_every=2", "--set", "store.keep_checkpoints=9",
]


@pytest.fixture
def saved(capsys, tmp_path):
    """A run with the checkpoints of steps 1 to 4, whose rules would keep only the last."""
    assert run(["train", "laptop", "-q", *SAVING]) == 0
    spec = tmp_path / "runs" / "laptop" / "spec.toml"
    spec.write_text(spec.read_text().replace("keep_checkpoints = 9", "keep_checkpoints = 1"))
    capsys.readouterr()
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
    (saved / "step-000000002" / "plan.txt").write_text("x")
    assert run(["checkpoints", "laptop", "--verify"]) == 1
    captured = capsys.readouterr()
    assert "3 checkpoints complete, 1 checkpoint damaged" in captured.out
    assert "step-000000002/plan.txt" in captured.err
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


def test_checkpoints_of_no_run_at_all_is_a_sentence(capsys):
    assert run(["checkpoints", "laptop"]) == 64
    assert "no such run" in capsys.readouterr().err


def test_version_and_help(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == "0.1.0"
    assert run(["--help"]) == 0
    assert "train" in capsys.readouterr().out


def test_ctrl_c_leaves_a_checkpoint_to_go_on_from(tmp_path):
    words = [*SMALL, "--set", "train.num_steps=100000", "--set", "train.num_epochs=1000"]
    process = subprocess.Popen([sys.executable, "-m", "embark", "train", "laptop", *words], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    events = tmp_path / "runs" / "laptop" / "events.jsonl"
    deadline = time.time() + 90
    while not (events.exists() and '"event": "step"' in events.read_text()) and time.time() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "stopped by SIGINT" in errors
    assert "Traceback" not in errors
    kinds = [json.loads(line)["event"] for line in events.read_text().splitlines()]
    assert kinds[-3:] == ["save", "interrupt", "end"]
    step = json.loads(events.read_text().splitlines()[-1])["step"]
    assert run(["train", "laptop", "-q", *words, "--set", f"train.num_steps={step + 1}"]) == 0
    resumed = next(json.loads(line) for line in events.read_text().splitlines() if '"resume"' in line)
    assert resumed["step"] == step
