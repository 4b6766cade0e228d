"""Features that share a table: the same value has the same id in each, however ids are made."""

from __future__ import annotations

import csv
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from embark import write_id_maps
from embark.data import open_source, resolve_from_data
from embark.data.prepare.prepare import prepare_from_spec
from embark.errors import DataError
from embark.spec import resolve

TABLES = [{"name": "item", "rows": 60}, {"name": "seen", "shares": "item", "multi_hot": 3},
          {"name": "shop", "rows": 60}]
APART = [TABLES[0], {"name": "seen", "rows": 60, "multi_hot": 3}, TABLES[2]]


@pytest.fixture
def rows(tmp_path) -> list[list[str]]:
    """`seen` has words that `item` has not, and words that both have are frequent in one and rare in the other."""
    draw = random.Random(3)
    made = [["01"[draw.randrange(2)], f"w{draw.randrange(20) ** 2 // 20}",
             "|".join(f"w{25 - draw.randrange(20) ** 2 // 20}" for _ in range(draw.randrange(1, 4))),
             f"w{draw.randrange(5)}"] for _ in range(400)]
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["label", "item", "seen", "shop"], *made])
    (tmp_path / "held.csv").write_text("label,item,seen,shop\n1,w1,w1,w1\n")
    return made


def spec_of(folder: Path, tables: list[dict], ids: str = "frequency", path: str = "prepared", **prepare):
    return resolve({"model": {"embedding_dim": 4, "num_dense": 0, "tables": tables}, "data": {
        "kind": "prepared", "path": str(folder / path), "shuffle": "none",
        "prepare": {"input": [str(folder / "rows.csv"), str(folder / "held.csv")],
                    "ids": ids, "list_columns": ["seen"], "list_delimiter": "|",
                    "split": "file", "validation_files": ["held.csv"], **prepare}}, "train": {"batch_size": 8}})


def ids_of(spec) -> list[np.ndarray]:
    """Of `item`, `seen` and `shop`, row after row."""
    source = open_source(resolve_from_data(spec))
    batch = source.train_rows(0, 0, source.num_train_samples)
    return np.split(batch.ids, np.cumsum(batch.lengths.sum(axis=1))[:-1])


@pytest.mark.parametrize("ids", ["frequency", "hash"])
def test_a_value_has_one_id_in_all_features_of_a_table(tmp_path, rows, ids):
    spec = spec_of(tmp_path, TABLES, ids)
    prepare_from_spec(spec, tmp_path / "prepared")
    item, seen, shop = ids_of(spec)
    words = [[row[1] for row in rows], [word for row in rows for word in row[2].split("|")], [row[3] for row in rows]]
    pairs = [*zip(words[0], item.tolist(), strict=True), *zip(words[1], seen.tolist(), strict=True)]
    by_word = dict(pairs)
    assert all(by_word[word] == number for word, number in pairs)
    if ids == "frequency":
        counts = Counter([*words[0], *words[1]])
        assert sorted(by_word.values()) == list(range(1, len(by_word) + 1))
        by_id = [counts[word] for word in sorted(by_word, key=by_word.__getitem__)]
        assert by_id == sorted(counts.values(), reverse=True)
        assert set(shop.tolist()) == {1, 2, 3, 4, 5}  # its own numbers


def test_later_rows_continue_the_shared_ids(tmp_path, rows):
    first = spec_of(tmp_path, TABLES)
    prepare_from_spec(first, tmp_path / "prepared")
    with (tmp_path / "rows.csv").open("a", newline="") as file:
        csv.writer(file).writerows([["1", "new", "w3|new|newer", "w1"]] * 9)
    later = spec_of(tmp_path, TABLES, path="later", id_map_from=str(tmp_path / "prepared"))
    prepare_from_spec(later, tmp_path / "later")
    before, after = ids_of(first), ids_of(later)
    assert np.array_equal(after[0][:400], before[0])
    new = int(after[0][-1])
    assert after[1][-3:].tolist()[1:] == [new, new - 1 if after[1][-1] < new else new + 1]
    with pytest.raises(DataError, match="features that share a table: seen that of item there, none here"):
        prepare_from_spec(spec_of(tmp_path, APART, path="other", id_map_from=str(tmp_path / "prepared")),
                          tmp_path / "other")


@pytest.mark.parametrize("ids", ["frequency", "hash"])
def test_data_that_was_prepared_apart_cannot_train_a_shared_table(tmp_path, rows, ids):
    apart = [APART[0], {**APART[1], "rows": 59}, APART[2]] if ids == "hash" else APART
    prepare_from_spec(spec_of(tmp_path, apart, ids), tmp_path / "prepared")
    with pytest.raises(DataError, match=r"seen: shares table item, and the data has other ids for the same values"):
        resolve_from_data(spec_of(tmp_path, TABLES, ids))


def test_columns_of_other_kinds_cannot_share_a_table(tmp_path, rows):
    lines = (tmp_path / "rows.csv").read_text().splitlines()
    numbers = [lines[0], *(line.replace(",w", ",", 1) for line in lines[1:])]  # items are numbers, seen are words
    (tmp_path / "rows.csv").write_text("\n".join(numbers) + "\n")
    with pytest.raises(DataError, match="seen shares table item, and column 'seen' holds words, column 'item' integ"):
        prepare_from_spec(spec_of(tmp_path, TABLES), tmp_path / "prepared")


def test_values_of_a_shared_table_are_found_in_each_of_its_columns(tmp_path, rows):
    prepare_from_spec(spec_of(tmp_path, TABLES), tmp_path / "prepared")
    result = write_id_maps(str(tmp_path / "prepared"), tmp_path / "ids")
    words = {row[1] for row in rows} | {word for row in rows for word in row[2].split("|")}
    assert {row[1] for row in rows} != words
    for one in result.tables:
        values = set(pq.read_table(one.path)["value"].drop_null().to_pylist())
        assert one.note == ""
        assert values == ({row[3] for row in rows} if one.table == "shop" else words)
