"""The verbs as a person types them, and what comes of a slip."""

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
    assert code == (0 if all(f[""] == "ok" for f in findings) else 1)
    assert any("torchrec" in f["what"] for f in findings)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_the_verbs(capsys, shell):
    assert run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "train" in script
    assert "doctor" in script


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
