"""Two towers on several ranks: negatives of the global batch, so that the losses are those of one; and after a kill."""

import pytest

pytestmark = pytest.mark.slow

SETTINGS = ('model.kind="two_tower"', "data.ragged=false", "model.num_dense=0", """model.tables=[
    { name = "user", rows = 301 }, { name = "seen", shares = "item", multi_hot = 4 }, { name = "item", rows = 100 },
    { name = "tags", rows = 64, multi_hot = 3 }]""",
            *(f"model.two_tower.{setting}" for setting in (
                'item="item"', 'user="user"', 'item_tables=["tags"]', "user_layers=[16]", "item_layers=[24, 16]",
                "num_sampled_negatives=32", "normalize=true", "temperature=0.2", "eval_k=10")))


def test_losses_and_recall_equal_one_rank_s_and_an_undisturbed_run_s(ranks):
    one, two = ranks(1, *SETTINGS, name="one"), ranks(2, *SETTINGS, name="two")
    killed = ranks(2, *SETTINGS, "store.checkpoint_every=5", name="run", hook="integration.ranks.hooks:die_at_step_7")
    assert (one.code, two.code, killed.code > 0) == (0, 0, True), one.output + two.output + killed.output
    assert len(one.losses()) == 12
    assert two.losses() == pytest.approx(one.losses(), rel=2e-5)
    captured = ranks(2, *SETTINGS, "train.engine=cuda_graph", name="captured")
    assert captured.code == 0, captured.output
    assert captured.events("start")[0]["engine"] == "cuda_graph"
    assert captured.losses() == pytest.approx(one.losses(), rel=2e-5)
    for name in ("recall_at_k", "ndcg_at_k", "hit_at_k"):
        assert two.last_eval()[name] == pytest.approx(one.last_eval()[name], abs=0.01)  # near ties may change places
    assert two.last_eval()["num_users"] == one.last_eval()["num_users"] > 20
    resumed = ranks(2, *SETTINGS, "store.checkpoint_every=5", name="run")
    assert resumed.code == 0, resumed.output
    assert [event["step"] for event in resumed.events("resume")] == [5]
    assert {event["step"]: event["loss"] for event in resumed.events("step")} == dict(enumerate(two.losses(), 1))
    assert resumed.last_eval()["ndcg_at_k"] == two.last_eval()["ndcg_at_k"]
