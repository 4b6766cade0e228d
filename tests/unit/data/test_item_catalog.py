"""The items of retrieval, as one pass over the training data finds them."""

import numpy as np
import pytest

from embark.data.item_catalog import column_ids, read_item_catalog, with_negatives
from embark.data.loader import Batch
from embark.errors import DataError
from embark.spec import resolve

MODEL = resolve({"model": {
    "kind": "two_tower", "num_dense": 2,
    "tables": [{"name": "user", "rows": 10}, {"name": "tags", "rows": 9, "multi_hot": 2}, {"name": "item", "rows": 20}],
    "two_tower": {"item": "item", "user": "user", "item_tables": ["tags"], "num_item_dense": 1, "item_layers": [64]},
    }}, ["model.two_tower.user_layers=[64]"]).model
USERS = np.array([3, 3, 4, 5, 4, 3], np.int32)
ITEMS = np.array([7, 2, 7, 7, 11, 2], np.int32)
TAGS = [[7, 8], [2], [7, 8], [7, 8], [], [2]]
LABEL = np.array([1, 1, 0, 1, 1, 1], np.float32)


class Rows:
    num_train_samples = len(ITEMS)

    def __init__(self, label=LABEL) -> None:
        self.label = label

    def train_rows(self, epoch: int, start: int, stop: int) -> Batch:
        rows = slice(start, stop)
        tags = TAGS[rows]
        return Batch(
            dense=np.stack([USERS[rows], 10 * ITEMS[rows]], axis=1).astype(np.float32),
            ids=np.concatenate([USERS[rows], np.array([tag for one in tags for tag in one], np.int32), ITEMS[rows]]),
            lengths=np.array([[1] * len(tags), [len(t) for t in tags], [1] * len(tags)], np.int32),
            label=self.label[rows], is_fixed=False)


def test_items_counts_features_and_what_users_have_are_those_of_the_data():
    found = read_item_catalog(Rows(), MODEL)
    assert found.ids.tolist() == [2, 7, 11]
    assert found.counts.tolist() == [2, 2, 1]  # the third row is no positive
    assert found.ids[found.seen_by(3)].tolist() == [2, 7]
    assert found.ids[found.seen_by(4)].tolist() == [11]
    batch = found.batch(np.array([2, 0]))
    assert batch.lengths.tolist() == [[0, 0], [0, 1], [1, 1]]
    assert batch.ids.tolist() == [2, 11, 2]
    assert batch.dense.tolist() == [[0, 110], [0, 20]]  # the first dense feature is the user's
    expected = found.expected_counts(100, 30)
    assert expected[[2, 11, 5]].tolist() == pytest.approx([100 * 2 / 5 + 10, 100 / 5 + 10, 0])


def test_ranks_that_share_the_pass_find_the_same(monkeypatch):
    from embark.data import item_catalog

    monkeypatch.setattr(item_catalog, "_ROWS_AT_ONCE", 2)
    whole, sent = read_item_catalog(Rows(), MODEL), []
    for rank in (0, 1):
        read_item_catalog(Rows(), MODEL, rank=rank, num_ranks=2, gathered=lambda part: sent.append(part) or [part])
    of_two = read_item_catalog(Rows(), MODEL, rank=0, num_ranks=2, gathered=lambda _: sent)
    for name in ("ids", "counts", "seen"):
        assert getattr(of_two, name).tolist() == getattr(whole, name).tolist()
    for name in ("dense", "ids", "lengths"):
        assert getattr(of_two.samples, name).tolist() == getattr(whole.samples, name).tolist()


def test_negatives_depend_on_seed_step_and_position_alone():
    found = read_item_catalog(Rows(), MODEL)
    whole = found.negatives(1, 5, 0, 3000)
    assert np.concatenate([found.negatives(1, 5, 0, 10), found.negatives(1, 5, 10, 3000)]).tolist() == whole.tolist()
    assert not np.array_equal(found.negatives(1, 6, 0, 3000), whole)
    assert not np.array_equal(found.negatives(2, 5, 0, 3000), whole)
    assert np.bincount(whole).tolist() == pytest.approx([1000] * 3, abs=120)


def test_negatives_come_behind_the_samples_of_a_batch():
    found, batch = read_item_catalog(Rows(), MODEL), Rows().train_rows(0, 0, 3)
    together = with_negatives(batch, found.batch(np.array([1])))
    assert column_ids(together, 2).tolist() == [7, 2, 7, 7]
    assert column_ids(together, 0).tolist() == [3, 3, 4, -1]
    assert together.lengths[1].tolist() == [2, 1, 2, 2]
    assert together.label.tolist() == [1, 1, 0, 0]


def test_data_without_a_positive_is_refused():
    with pytest.raises(DataError, match="no positive sample"):
        read_item_catalog(Rows(np.zeros(6, np.float32)), MODEL)
