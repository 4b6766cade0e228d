"""A custom model on several ranks: the losses of one, also after SIGKILL."""

import pytest
from custom_models import AUTOINT, KIND, STATEFUL

pytestmark = pytest.mark.slow

def test_losses_equal_one_rank_s_and_those_of_an_undisturbed_run(ranks, tmp_path):
    (tmp_path / "my_model.py").write_text(AUTOINT)
    one = ranks(1, KIND, name="one")
    assert (one.code, len(one.losses())) == (0, 12), one.output
    for engine in ("pipeline", "cuda_graph"):
        two = ranks(2, KIND, f"train.engine={engine}", name=engine)
        assert two.code == 0, two.output
        assert two.events("start")[0]["engine"] == engine
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
