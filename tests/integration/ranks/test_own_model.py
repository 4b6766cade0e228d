"""A model of the user's own on several ranks: the losses of one, also after SIGKILL."""

from pathlib import Path

import pytest

import embark

pytestmark = pytest.mark.slow

AUTOINT = (Path(embark.__file__).parent / "trainers" / "torch" / "starter_model.py").read_text()
STATEFUL = """
import torch
from torch import nn

class MyModel(nn.Module):
    def __init__(self, model):
        super().__init__()
        width = model.num_dense + sum(t.dim for t in model.table_list())
        self.unused = nn.Linear(2, 2)
        self.layers = nn.Sequential(nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, 1))

    def forward(self, dense, pooled):
        return self.layers(torch.cat([dense, *pooled.values()], dim=1))
"""
KIND = "model.kind=my_model:MyModel"


def test_two_ranks_give_the_losses_of_one_and_those_of_a_run_that_was_never_killed(ranks, tmp_path):
    (tmp_path / "my_model.py").write_text(AUTOINT)
    one, two = ranks(1, KIND, name="one"), ranks(2, KIND, name="two")
    assert (one.code, two.code) == (0, 0), one.output + two.output
    assert len(one.losses()) == 12
    assert two.losses() == pytest.approx(one.losses(), rel=2e-5)
    assert two.last_eval()["auc"] == pytest.approx(one.last_eval()["auc"], rel=1e-3)

    (tmp_path / "my_model.py").write_text(STATEFUL)
    sets = (KIND, "store.checkpoint_every=5", "train.dense_optimizer=adam", "train.dense_learning_rate=0.01")
    whole = ranks(2, *sets, name="whole")
    killed = ranks(2, *sets, name="run", hook="integration.ranks.hooks:die_at_step_7")
    assert (whole.code, killed.code > 0) == (0, True), whole.output + killed.output
    resumed = ranks(2, *sets, name="run")
    assert resumed.code == 0, resumed.output
    assert [event["step"] for event in resumed.events("resume")] == [5]
    assert {event["step"]: event["loss"] for event in resumed.events("step")} == dict(enumerate(whole.losses(), 1))
    assert resumed.last_eval()["log_loss"] == whole.last_eval()["log_loss"]
