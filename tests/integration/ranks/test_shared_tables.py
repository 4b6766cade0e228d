"""Shared tables and tables with settings of their own, on several ranks: the losses of one, however they are cut, and
after a kill."""

import pytest

pytestmark = pytest.mark.slow

TABLES = """model.tables=[
    { name = "user", rows = 301, learning_rate = 0.3, init_range = 0.2 },
    { name = "seen", shares = "item", multi_hot = 5 },
    { name = "item", rows = 100, pooling = "mean" }, { name = "bought", shares = "item", multi_hot = 3 }]"""


def test_losses_equal_one_rank_s_and_those_of_an_undisturbed_run(ranks):
    one, whole = ranks(1, TABLES, name="one"), ranks(2, TABLES, name="two")
    by_rows = ranks(2, TABLES, "train.sharding=row_wise", "store.checkpoint_every=5", name="run",
                    hook="integration.ranks.hooks:die_at_step_7")
    assert (one.code, whole.code, by_rows.code > 0) == (0, 0, True), one.output + whole.output + by_rows.output
    assert len(one.losses()) == 12
    assert whole.losses() == pytest.approx(one.losses(), rel=2e-5)
    assert [table["table"] for table in whole.events("plan")[0]["tables"]] == ["user", "item"]
    resumed = ranks(2, TABLES, "train.sharding=row_wise", "store.checkpoint_every=5", name="run")
    assert resumed.code == 0, resumed.output
    assert [event["step"] for event in resumed.events("resume")] == [5]
    losses = {event["step"]: event["loss"] for event in resumed.events("step")}
    assert list(losses.values()) == pytest.approx(one.losses(), rel=2e-5)
