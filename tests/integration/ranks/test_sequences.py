"""Sequences on two ranks: the losses of one, in training and in an evaluation."""

import pytest

from embark.data.prepare.prepare import prepare_from_spec
from embark.spec import resolve

pytestmark = pytest.mark.slow

LOG = "".join(f"{user} {1 + (7 * user + step) % 39}\n" for user in range(256) for step in range(3 + user % 11))
SETS = ("model.kind=hstu", "model.num_dense=0", 'model.tables=[{ name = "item", rows = 40, pooling = "none", '
        'max_length = 8 }, { name = "negatives", shares = "item", pooling = "none", max_length = 10 }]',
        "model.sequence.history=item", "model.sequence.negatives=negatives", "model.dropout=0.2",
        "data.kind=interactions", 'data.interactions.column_names=["user", "item"]')


def test_two_ranks_give_the_losses_and_ranks_of_one(ranks, tmp_path):
    path = tmp_path / "log.txt"
    path.write_text(LOG)
    sets = (*SETS, f"data.path={path}")
    alone, two = ranks(1, *sets, name="alone"), ranks(2, *sets, name="two")
    by_rows = ranks(2, *sets, "train.sharding=row_wise", name="rows")
    assert alone.losses()
    for other in (two, by_rows):
        assert other.losses() == pytest.approx(alone.losses(), rel=1e-4)
        for name in ("hit_at_k", "ndcg_at_k", "log_loss"):
            assert other.last_eval()[name] == pytest.approx(alone.last_eval()[name], rel=2e-2)
        for name, found in other.last_eval()["rankings"].items():
            assert found == pytest.approx(alone.last_eval()["rankings"][name], rel=2e-2)


def test_two_ranks_share_the_negatives_of_both(ranks, tmp_path):
    path = tmp_path / "log.txt"
    path.write_text(LOG)
    sets = (*SETS, f"data.path={path}", "model.sequence.share_negatives=true", "model.kind=sasrec")
    alone, two = ranks(1, *sets, name="alone"), ranks(2, *sets, "train.sharding=row_wise", name="two")
    assert alone.losses()
    assert two.losses() == pytest.approx(alone.losses(), rel=1e-4)


def test_a_prepared_log_gives_two_ranks_the_losses_of_one(ranks, tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("user,item,at\n" + "".join(f"u{line.split()[0]},i{line.split()[1]},{1_700_000_000 + at}\n"
                                               for at, line in enumerate(LOG.splitlines())))
    sets = (*SETS[:-2], "data.kind=prepared", f"data.path={tmp_path}/data")
    prepare_from_spec(resolve({}, [*sets, f"data.prepare.input={path}"]))
    alone, two = ranks(1, *sets, name="alone"), ranks(2, *sets, name="two")
    assert alone.losses()
    assert two.losses() == pytest.approx(alone.losses(), rel=1e-4)
