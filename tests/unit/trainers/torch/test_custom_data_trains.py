"""A model and its data, both from files of the user's own: trained, resumed and evaluated like any other."""

from __future__ import annotations

from pathlib import Path

import pytest

from embark.data.sample import take_sample
from embark.errors import UserError
from embark.events import read_events
from embark.trainers import evaluate, train

DATA = """
import numpy as np

class Source:
    num_train_samples, num_eval_samples = 4_000, 400

    def __init__(self, data, model):
        self.tables = model.table_list()

    def rows(self, split, positions):
        at = positions + (4_000 if split == "eval" else 0)
        ids = {t.name: at * (7 + i) % t.rows for i, t in enumerate(self.tables)}
        return ids["cat_0"] % 2, np.stack([at % 3, at % 5, at % 7], axis=1) / 7, ids
"""
SETS = ("data.kind=my_data:Source", "data.num_train_samples=1", "store.checkpoint_every=10", "watch.every=5")


def losses(run_dir: str) -> list[float]:
    return [e.values["loss"] for e in read_events(Path(run_dir, "events.jsonl")) if e.kind == "step"]


@pytest.fixture
def own(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_data.py").write_text(DATA)
    return lambda *sets: tiny(*SETS, "train.batch_size=128", "train.learning_rate=0.2", *sets)


def test_a_run_on_custom_data_learns_resumes_and_evaluates(own):
    whole = train(own("name=whole"))
    assert whole["auc"] > 0.8
    train(own("train.num_steps=10"))
    resumed = train(own())
    assert losses(resumed["run_dir"]) == losses(whole["run_dir"])
    Path("my_data.py").unlink()
    found = evaluate(resumed["run_dir"])
    assert (found.auc, found.num_samples) == (whole["auc"], 400)
    assert found.rows == "validation split of my_data:Source"


def test_other_code_or_other_samples_are_refused_on_resume(own):
    train(own("train.num_steps=10"))
    Path("my_data.py").write_text(DATA.replace("at % 3", "at % 2"))
    with pytest.raises(UserError) as raised:
        train(own())
    assert raised.value.fix.endswith("--accept-change data.code --accept-change data")


def test_a_rehearsal_takes_a_sample_of_it(own):
    sample, why = take_sample(own(), num_train=64, num_eval=32)
    assert (sample.num_train, len(sample.batches["validation"].label), why) == (64, 32, "")
