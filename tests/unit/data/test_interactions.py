"""Interaction logs: which items of a user are trained on, which are held out, and negatives that nobody chose."""

import numpy as np
import pytest

from embark.data import open_source
from embark.data.loader import Batch
from embark.errors import DataError
from embark.spec import RunSpec, resolve

LOG = "2 7\n1 3\n1 4\n2 8\n1 5\n1 6\n1 9\n2 1\n3 2\n3 3\n2 2\n"  # in time order: 1: 3 4 5 6 9, 2: 7 8 1 2, 3: 2 3


def spec(path, *sets, **data) -> RunSpec:
    return resolve({
        "model": {"kind": "sasrec", "num_dense": 0, "embedding_dim": 8, "tables": [
            {"name": "item", "rows": 60, "pooling": "none", "max_length": 3},
            {"name": "negatives", "shares": "item", "pooling": "none", "max_length": 5}],
            "sequence": {"history": "item", "negatives": "negatives"}},
        "data": {"kind": "interactions", "path": str(path),
                 "interactions": {"column_names": ["user", "item"], "num_eval_negatives": 7}, **data},
    }, sets)


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "log.txt"
    path.write_text(LOG)
    return path


def histories(batch: Batch) -> list[list[int]]:
    ends = np.cumsum(batch.lengths[0])
    return [batch.ids[end - length : end].tolist() for end, length in zip(ends, batch.lengths[0], strict=True)]


def test_the_last_item_is_for_testing_and_the_one_before_for_validation(log):
    source = open_source(spec(log))
    trained = sorted(histories(source.train_rows(0, 0, source.num_train_samples)))
    assert trained == [[2, 3], [3, 4, 5], [7, 8]]  # user 3 has too few items to hold any out
    assert histories(source.eval_rows(0, source.num_eval_samples)) == [[4, 5, 6], [7, 8, 1]]
    test = open_source(spec(log, eval_split="test"))
    assert histories(test.eval_rows(0, 2)) == [[5, 6, 9], [8, 1, 2]]


def test_evaluation_knows_all_items_before_the_held_out_one(log):
    source = open_source(spec(log, eval_split="test"))
    items, lengths = source.eval_seen(0, 2)
    assert (items.tolist(), lengths.tolist()) == ([3, 4, 5, 6, 7, 8, 1], [4, 3])
    items, lengths = open_source(spec(log)).eval_seen(1, 2)
    assert (items.tolist(), lengths.tolist()) == ([7, 8], [2])
    assert source.catalog.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_negatives_are_unchosen_items_drawn_by_user_and_epoch_alone(log):
    source = open_source(spec(log))
    some, again, later = (source.train_rows(epoch, 0, 3) for epoch in (0, 0, 1))
    assert np.array_equal(some.ids, again.ids)
    assert not np.array_equal(np.sort(some.ids), np.sort(later.ids))
    parts = [source.train_rows(0, start, start + 1) for start in range(3)]
    assert np.array_equal(np.concatenate([part.ids[part.lengths[0].sum() :] for part in parts]),
                          some.ids[some.lengths[0].sum() :])
    held_out = source.eval_rows(0, 2)
    drawn = held_out.ids[held_out.lengths[0].sum() :].reshape(2, 7)
    assert not np.isin(drawn[0], [3, 4, 5, 6, 9]).any()
    assert not np.isin(drawn[1], [7, 8, 1, 2]).any()
    assert set(drawn.flat) <= set(range(1, 10))  # the items of the log, not the table's other rows


def test_negatives_do_not_depend_on_rows_that_are_no_item(tmp_path):
    path = tmp_path / "log.txt"
    path.write_text("".join(f"{user} {(user * 7 + step) % 60}\n" for user in range(1, 50) for step in range(6)))
    exact, wide = (open_source(spec(path, "model.tables=[" + ", ".join(_toml(one) for one in (
        {"name": "item", "rows": rows, "pooling": "none", "max_length": 3},
        {"name": "negatives", "shares": "item", "pooling": "none", "max_length": 5})) + "]")) for rows in (60, 6000))
    assert np.array_equal(exact.train_rows(1, 0, 40).ids, wide.train_rows(1, 0, 40).ids)
    assert np.array_equal(exact.eval_rows(0, 40).ids, wide.eval_rows(0, 40).ids)
    assert exact.eval_rows(0, 1).ids.tolist() == [9, 10, 11, 41, 31, 32, 15, 35, 24, 58]


def test_repeats_of_a_user_count_once_and_who_chose_every_item_is_named(log):
    log.write_text(LOG + "4 5\n4 6\n" * 30)
    held_out = open_source(spec(log)).eval_rows(2, 3)
    assert not np.isin(held_out.ids[held_out.lengths[0].sum() :], [5, 6]).any()
    log.write_text(LOG + "".join(f"57 {item}\n" for item in range(1, 10)))
    with pytest.raises(DataError, match="user 57 chose all of the 9 items"):
        open_source(spec(log))


def test_training_does_not_learn_from_its_negatives_what_is_held_out(log):
    source, drawn = open_source(spec(log)), set[int]()
    for epoch in range(40):
        batch = source.train_rows(epoch, 0, 3)
        user = histories(batch).index([7, 8])  # 1 and 2 are held out
        drawn |= set(batch.ids[batch.lengths[0].sum() :].reshape(3, 5)[user].tolist())
    assert drawn & {1, 2}
    assert not drawn & {7, 8}


def test_a_time_column_orders_the_rows_and_reaches_the_model(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("who,what,at\nx,1,300\ny,5,5\nx,2,100\nx,3,200\nx,4,400\n")
    times = {"name": "seconds", "pooling": "none", "max_length": 3, "lookup": False}
    source = open_source(spec(path, f"model.tables=[{_toml(times)}, " + '{ name = "item", rows = 60, pooling = "none", '
                              'max_length = 3 }, { name = "negatives", shares = "item", pooling = "none", max_length = '
                              "5 }]", "model.sequence.times=seconds", eval_split="test", time_column="at",
                              interactions={"user": "who", "item": "what", "num_eval_negatives": 2}))
    batch = source.eval_rows(0, 1)
    assert batch.ids[:3].tolist() == [195, 295, 395]  # seconds since the first row
    assert batch.ids[3:6].tolist() == [3, 1, 4]


@pytest.mark.parametrize(("text", "what"), [
    ("1 99\n", "ids outside 0 to 59: 1, the first is 99"), ("1 x\n", "no user has an item to train on"),
    ("1 2\n2\n", "nothing cuts its rows into fields"),
    ("1 2\n" * 9 + "2\n", "its fields are 1 instead of 2"),
    ("1 2\n", "no user has an item to train on"),
])
def test_a_log_that_cannot_be_used_is_refused(tmp_path, text, what):
    path = tmp_path / "log.txt"
    path.write_text(text)
    with pytest.raises(DataError, match=what):
        open_source(spec(path))


def _toml(values: dict[str, object]) -> str:
    shown = {True: "true", False: "false"}
    return "{ " + ", ".join(f"{key} = {shown.get(value, value) if isinstance(value, bool | int) else repr(value)}"
                            for key, value in values.items()) + " }"
