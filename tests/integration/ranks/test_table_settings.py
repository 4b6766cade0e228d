"""Tables with an optimizer, a type and a sharding of their own, data-parallel ones among them, on several ranks."""

import pytest

pytestmark = pytest.mark.slow

TABLES = """model.tables=[
    { name = "user", rows = 301, optimizer = "adagrad", sharding = "row_wise" },
    { name = "item", rows = 100, multi_hot = 3, pooling = "mean", sharding = "data_parallel" },
    { name = "seen", shares = "item", multi_hot = 5 }, { name = "shop", rows = 7, optimizer = "sgd" },
    { name = "city", rows = 9, sharding = "data_parallel", optimizer = "adagrad", learning_rate = 0.2 },
    { name = "once", rows = 1, sharding = "row_wise" }]"""


def test_losses_equal_one_rank_s_and_those_of_an_undisturbed_run(ranks):
    one, two = ranks(1, TABLES, name="one"), ranks(2, TABLES, name="two")
    assert (one.code, two.code) == (0, 0), one.output + two.output
    assert {t["table"]: t["sharding"] for t in two.events("plan")[0]["tables"]} == {
        "user": "row_wise", "item": "data_parallel", "shop": "table_wise", "city": "data_parallel", "once": "row_wise"}
    assert two.losses() == pytest.approx(one.losses(), rel=2e-5)
    sets = (TABLES, "store.checkpoint_every=5")
    whole = ranks(3, *sets, name="whole")
    killed = ranks(3, *sets, name="run", hook="integration.ranks.hooks:die_at_step_7")
    resumed = ranks(3, *sets, name="run")
    assert (whole.code, killed.code > 0, resumed.code) == (0, True, 0), whole.output + resumed.output
    assert {event["step"]: event["loss"] for event in resumed.events("step")} == dict(enumerate(whole.losses(), 1))


def test_two_ranks_give_the_losses_of_one_with_weighted_ids(ranks):
    tables = """model.tables=[{ name = "user", rows = 301 },
        { name = "item", rows = 100, multi_hot = 3, pooling = "mean", weights_column = "seconds" },
        { name = "shop", rows = 7, sharding = "data_parallel" },
        { name = "once", rows = 1, weights_column = "count", sharding = "row_wise", optimizer = "sgd" }]"""
    one, two = ranks(1, tables, name="one"), ranks(2, tables, name="two")
    assert (one.code, two.code) == (0, 0), one.output + two.output
    assert two.losses() == pytest.approx(one.losses(), rel=2e-5)
