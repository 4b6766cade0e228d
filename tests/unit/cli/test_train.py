"""`embark train` as typed: what it writes, what it refuses, and how Ctrl-C ends it."""

import json
import os
import re
import signal
import threading

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


def test_train_trains_and_prints_its_auc(capsys, tmp_path):
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
    told = capsys.readouterr().out
    assert "is finished" in told
    assert "Held-out AUC" in told
    assert (tmp_path / "runs" / "laptop" / "events.jsonl").read_text() == before
    assert run(["train", "laptop", "--fresh", *SMALL]) == 0
    assert (tmp_path / "runs" / "laptop-2" / "events.jsonl").is_file()


@pytest.mark.parametrize("decay", ["none", "linear"])
def test_a_finished_run_names_the_flags_that_continue_it(capsys, tmp_path, monkeypatch, decay):
    words = ["train", "laptop", *SMALL, "--set", "store.checkpoint_at_end=true", "--set", f"train.decay={decay}"]
    assert run(words) == 0
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr("embark.trainers.open_backend", lambda spec: pytest.fail("loads torch"))
        assert run(words) == 0
    said = re.search(r"with (--set .*) it continues", " ".join(capsys.readouterr().out.split()))
    assert ("--accept-change" in said[1]) == (decay != "none")
    assert run([*words, *said[1].split()]) == 0
    events = [json.loads(line) for line in (tmp_path / "runs/laptop/events.jsonl").read_text().splitlines()]
    assert [event["first_step"] for event in events if event["event"] == "start"] == [0, 4]
    assert events[-1]["step"] == 8


def test_a_finished_run_of_another_model_is_refused_without_torch(capsys, monkeypatch):
    assert run(["train", "laptop", *SMALL]) == 0
    monkeypatch.setattr("embark.trainers.open_backend", lambda spec: pytest.fail("loads torch"))
    assert run(["train", "laptop", *SMALL, "--set", "model.embedding_dim=32"]) == 64
    assert "model.embedding_dim: " in capsys.readouterr().err


def test_another_model_never_resumes_in_a_run_s_directory(capsys, tmp_path):
    run(["train", "laptop", *SMALL])
    before = (tmp_path / "runs" / "laptop" / "spec.toml").read_text()
    assert run(["train", "laptop", *SMALL, "--set", "model.embedding_dim=32"]) == 64
    assert "model.embedding_dim: " in capsys.readouterr().err
    assert (tmp_path / "runs" / "laptop" / "spec.toml").read_text() == before


def test_a_misspelt_machine_is_refused_before_anything_is_loaded(capsys, tmp_path):
    assert run(["train", "laptop", *SMALL, "--set", "place.machine=p5.48xlargee"]) == 64
    told = capsys.readouterr().err
    assert "place.machine = p5.48xlargee" in told
    assert "did you mean 'p5.48xlarge'" in told
    assert not (tmp_path / "runs").exists()


def test_ctrl_c_leaves_a_checkpoint_to_resume_from(capsys, tmp_path):
    words = [*SMALL, "--set", "train.num_steps=100000", "--set", "train.num_epochs=1000"]
    events = tmp_path / "runs" / "laptop" / "events.jsonl"
    is_over = threading.Event()

    def press_after_the_first_step() -> None:
        while not is_over.wait(0.01):
            if events.exists() and '"event": "step"' in events.read_text():
                os.kill(os.getpid(), signal.SIGINT)
                return

    person = threading.Thread(target=press_after_the_first_step)
    person.start()
    code = run(["train", "laptop", *words])
    is_over.set()
    person.join()
    told = capsys.readouterr()
    assert code == 130, told.err
    assert told.out.count("Interrupted by SIGINT at step") == 1
    assert told.out.count("Run the same command to resume") == 1
    assert not told.err
    kinds = [json.loads(line)["event"] for line in events.read_text().splitlines()]
    assert kinds[-3:] == ["save", "interrupt", "end"]
    step = json.loads(events.read_text().splitlines()[-1])["step"]
    assert run(["train", "laptop", "-q", *words, "--set", f"train.num_steps={step + 1}"]) == 0
    resumed = next(json.loads(line) for line in events.read_text().splitlines() if '"resume"' in line)
    assert resumed["step"] == step
