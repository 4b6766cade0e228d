"""Logs of users and items as sequences: prepared and in memory they are the same, whatever the order of the rows."""

import json
import multiprocessing
import os
import random
import signal
from collections import Counter, defaultdict
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from embark.data import open_source, resolve_from_data
from embark.data.evaluation_rows import open_rows
from embark.data.export.id_values import write_id_maps
from embark.data.export.row_splits import write_splits
from embark.data.loader import Batch
from embark.data.prepare import sequences
from embark.data.prepare.prepare import prepare_from_spec, preview
from embark.data.prepared.manifest import SEQUENCES
from embark.errors import DataError, UserError
from embark.features.arrow.cells import hash_bytes
from embark.spec import RunSpec, load_spec, resolve


def rows_of(seed: int, num_users: int = 40, num_items: int = 30) -> list[tuple[str, str, int]]:
    """Return rows in no order, with repeats; some users are too short to be held out."""
    draw, rows = random.Random(seed), list[tuple[str, str, int]]()
    for user in range(num_users):
        time = 1_700_000_000 + draw.randrange(100_000)
        for _ in range(draw.choice([1, 2, 3, 5, 9, 25])):
            time += draw.randrange(1, 5_000)
            rows.append((f"u{user}", f"item-{int(draw.paretovariate(0.8)) % num_items}", time))
    draw.shuffle(rows)
    return rows


def write(path: Path, rows, header: str = "user,item,at") -> Path:
    path.write_text(header + "\n" + "".join(",".join(map(str, row)) + "\n" for row in rows))
    return path


def spec_of(folder: Path, *sets: str, **data) -> RunSpec:
    return resolve({"model": {"kind": "sasrec", "embedding_dim": 8, "sequence": {"times": "at"}},
                    "data": {"kind": "prepared", "path": str(folder / "data"), "time_column": "at",
                             "prepare": {"input": str(folder / "log.csv")},
                             "interactions": {"max_length": 6, "num_negatives": 4, "num_eval_negatives": 5}, **data}},
                   sets)


def in_memory(spec: RunSpec, path: Path, **data) -> RunSpec:
    """Return the spec that reads the same log into memory, with the same tables."""
    changed = spec.data.model_copy(update={"kind": "interactions", "path": str(path), **data})
    return spec.model_copy(update={"data": changed})


def samples(batch: Batch) -> list[tuple[tuple[int, ...], ...]]:
    """Return the values of each feature, sample by sample."""
    starts = batch.starts()
    return [tuple(tuple(batch.ids[start : start + length].tolist())
                  for start, length in zip(starts[:, i], batch.lengths[:, i], strict=True))
            for i in range(len(batch.label))]


def histories(rows) -> dict[str, list[str]]:
    found = defaultdict(list)
    for user, item, _ in sorted(rows, key=lambda row: row[2]):
        found[user].append(item)
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("negatives", ["uniform", "frequency", "in_batch"])
def test_a_prepared_log_gives_the_samples_of_one_in_memory(tmp_path, seed, negatives):
    log = write(tmp_path / "log.csv", rows_of(seed))
    how = f"data.interactions.negatives={negatives}"
    for split in ("validation", "test"):
        spec = spec_of(tmp_path, how, f"data.eval_split={split}")
        prepare_from_spec(spec)
        spec = resolve_from_data(spec)
        prepared, memory = open_source(spec), open_source(in_memory(spec, log))
        assert np.array_equal(prepared.catalog, memory.catalog)
        assert np.array_equal(prepared.counts, memory.counts)
        assert prepared.num_train_samples == memory.num_train_samples > 10
        assert prepared.num_eval_samples == memory.num_eval_samples > 10

        def rest(sample):
            return sample[0], sample[2]

        for epoch in range(2):
            ours, theirs = (samples(one.train_rows(epoch, 0, one.num_train_samples)) for one in (prepared, memory))
            assert sorted(map(rest, ours)) == sorted(map(rest, theirs))
            assert ours != sorted(ours)
        ours, theirs = (samples(one.eval_rows(0, one.num_eval_samples)) for one in (prepared, memory))
        assert sorted(map(rest, ours)) == sorted(map(rest, theirs))
        seen = [sorted(map(bytes, np.split(items, np.cumsum(lengths)[:-1]))) for items, lengths in (
            one.eval_seen(0, one.num_eval_samples) for one in (prepared, memory))]
        assert seen[0] == seen[1]


def test_users_who_are_all_trained_on_have_the_same_negatives_too(tmp_path):
    rows = [row for row in rows_of(3) if len(histories(rows_of(3))[row[0]]) > 3]
    log = write(tmp_path / "log.csv", rows)
    spec = spec_of(tmp_path)
    prepare_from_spec(spec)
    spec = resolve_from_data(spec)
    found = [sorted(samples(one.train_rows(1, 0, one.num_train_samples)))
             for one in (open_source(spec), open_source(in_memory(spec, log)))]
    assert found[0] == found[1]


def test_sequences_are_the_log_sorted_by_user_and_time(tmp_path):
    rows = rows_of(7)
    log = write(tmp_path / "log.csv", rows)
    spec = spec_of(tmp_path, "data.eval_split=test")
    prepare_from_spec(spec)
    spec = resolve_from_data(spec)
    source = open_source(in_memory(spec, log))
    words = dict(zip(source.maps.arrays["ids/item.ids.npy"].tolist(), range(10**6), strict=False))
    names = {name: int(hash_bytes(pa.array([name.encode()]))[0]) for _, name, _ in rows}
    keys = source.maps.arrays["ids/item.keys.npy"]
    item_of = {identity: name for name, key in names.items() for identity, at in words.items() if keys[at] == key}
    expected = sorted(tuple(items[-7:]) for items in histories(rows).values() if len(items) >= 3)
    opened = open_source(spec)
    assert sorted(tuple(item_of[identity] for identity in sample[0])
                  for sample in samples(opened.eval_rows(0, opened.num_eval_samples))) == expected
    items, lengths = opened.eval_seen(0, opened.num_eval_samples)
    assert sorted(tuple(item_of[identity] for identity in some.tolist())
                  for some in np.split(items, np.cumsum(lengths)[:-1])) == \
        sorted(tuple(items[:-1]) for items in histories(rows).values() if len(items) >= 3)


def test_the_same_log_gives_the_same_bytes_by_any_workers_and_memory(tmp_path, monkeypatch):
    write(tmp_path / "log.csv", rows_of(1, num_users=400))
    found = []
    monkeypatch.setattr(sequences, "GROUP_ROWS", 500)
    for number, sets in enumerate((["num_workers=1"], ["num_workers=2", "memory_gb=4"])):
        spec = spec_of(tmp_path, f"data.path={tmp_path}/data-{number}", *(f"data.prepare.{one}" for one in sets))
        found.append(prepare_from_spec(spec).manifest)
        assert len(found[-1].parts["train"]) > 3
    assert found[0].fingerprint() == found[1].fingerprint()


def _prepare_and_die(spec: RunSpec, num_records: int) -> None:
    from embark.data.prepare.tasks import Journal

    write_record, done = Journal.write, []

    def dying(self, name, record):
        done.append(write_record(self, name, record))
        if len(done) == num_records:
            os.kill(os.getpid(), signal.SIGKILL)
        return record

    Journal.write = dying
    sequences.GROUP_ROWS = 500
    prepare_from_spec(spec)


@pytest.mark.parametrize("num_records", [1, 2, 4])
def test_a_killed_preparation_goes_on_and_gives_the_same_bytes(tmp_path, monkeypatch, num_records):
    monkeypatch.setattr(sequences, "GROUP_ROWS", 500)
    write(tmp_path / "log.csv", rows_of(2, num_users=300))
    whole = prepare_from_spec(spec_of(tmp_path, f"data.path={tmp_path}/whole")).manifest
    process = multiprocessing.get_context("fork").Process(
        target=_prepare_and_die, args=(spec_of(tmp_path), num_records))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert prepare_from_spec(spec_of(tmp_path)).manifest.fingerprint() == whole.fingerprint()
    assert prepare_from_spec(spec_of(tmp_path)).was_complete


def test_malformed_rows_are_counted_and_quoted_and_the_rest_is_kept(tmp_path):
    rows = rows_of(5)
    bad = [("", "item-1", 1_700_000_000), ("u1", "", 1_700_000_000), ("u1", "item-2", "yesterday"),
           ("u1", "item-3", "")]
    write(tmp_path / "log.csv", [*rows[:50], *bad, *rows[50:]])
    with pytest.raises(DataError, match=r"4 of .* rows cannot be read"):
        prepare_from_spec(spec_of(tmp_path))
    manifest = prepare_from_spec(spec_of(tmp_path, "data.prepare.max_bad_share=0.2"), fresh=True).manifest
    assert manifest.bad_rows["num"] == 4
    whys = [one["why"] for one in manifest.bad_rows["examples"]]
    assert [one["line"] for one in manifest.bad_rows["examples"]] == [52, 53, 54, 55]
    assert "column 'user' is empty" in whys[0]
    assert "'yesterday'" in whys[2]
    assert manifest.settings[SEQUENCES]["interactions"] == len(rows)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_json_lines_and_parquet_give_the_users_of_csv(tmp_path, kind):
    rows = rows_of(6)
    write(tmp_path / "log.csv", rows)
    csv = prepare_from_spec(spec_of(tmp_path)).manifest
    path = tmp_path / f"log.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps({"user": u, "item": i, "at": t}) + "\n" for u, i, t in rows))
    else:
        users, items, times = zip(*rows, strict=True)
        parquet.write_table(pa.table({"user": users, "item": items, "at": times}), path)
    other = prepare_from_spec(spec_of(tmp_path, f"data.prepare.input={path}", f"data.path={tmp_path}/other")).manifest
    assert [part.sha256 for part in other.all_parts()] == [part.sha256 for part in csv.all_parts()]


def test_a_split_by_time_holds_out_the_first_item_of_each_period(tmp_path):
    rows = [("a", f"i{n}", 1_000_000_000 + n) for n in range(8)] + [("b", f"i{n}", 1_000_000_000 + n) for n in range(3)]
    rows += [("c", f"i{n}", 1_000_000_005 + n) for n in range(3)]  # has nothing to learn from before validation
    write(tmp_path / "log.csv", [*rows, ("d", "other", 1_000_000_000)])
    moments = ["data.prepare.split=time", "data.prepare.validation_from=2001-09-09T01:46:44Z",
               "data.prepare.test_from=2001-09-09T01:46:46Z"]
    found = {}
    for split in ("validation", "test"):
        spec = spec_of(tmp_path, *moments, f"data.eval_split={split}")
        manifest = prepare_from_spec(spec).manifest
        source = open_source(resolve_from_data(spec))
        found[split] = [len(sample[0]) for sample in samples(source.eval_rows(0, source.num_eval_samples))]
    assert sorted(len(sample[0]) for sample in samples(source.train_rows(0, 0, 2))) == [3, 4]
    assert found == {"validation": [5], "test": [7, 2]} or found == {"validation": [5], "test": [2, 7]}
    assert manifest.rows_by_split == {"train": 2, "validation": 1, "test": 2}


def test_items_that_are_rare_are_left_out_of_both_sources(tmp_path):
    rows = [*rows_of(8), ("u1", "seldom", 1_700_000_500), ("u2", "never-again", 1_700_000_600)]
    log = write(tmp_path / "log.csv", rows)
    spec = spec_of(tmp_path, "data.prepare.min_count=2")
    about = prepare_from_spec(spec).manifest.settings[SEQUENCES]
    assert about["left_out"] >= 2
    spec = resolve_from_data(spec)
    prepared, memory = open_source(spec), open_source(in_memory(spec, log))
    assert prepared.counts.min() >= 2
    assert np.array_equal(prepared.counts, memory.counts)


def test_samples_do_not_depend_on_the_table_having_more_rows_than_items(tmp_path):
    write(tmp_path / "log.csv", rows_of(9))
    prepare_from_spec(spec_of(tmp_path))
    spec = resolve_from_data(spec_of(tmp_path))
    tables = [table.model_copy(update={"rows": table.rows * 10}) if table.lookup else table
              for table in spec.model.tables]
    wide = spec.model_copy(update={"model": spec.model.model_copy(update={"tables": tuple(tables)})})
    exact, wide = (open_source(resolve_from_data(one)) for one in (spec, wide))
    assert np.array_equal(exact.train_rows(1, 0, 20).ids, wide.train_rows(1, 0, 20).ids)
    assert np.array_equal(exact.eval_rows(0, 20).ids, wide.eval_rows(0, 20).ids)


def test_any_slices_of_an_epoch_are_the_epoch(tmp_path, monkeypatch):
    monkeypatch.setattr(sequences, "SEQUENCE_BLOCK_ROWS", 8)
    monkeypatch.setattr(sequences, "GROUP_ROWS", 100)
    write(tmp_path / "log.csv", rows_of(10, num_users=90))
    prepare_from_spec(spec_of(tmp_path))
    source = open_source(resolve_from_data(spec_of(tmp_path)))
    num = source.num_train_samples
    whole = samples(source.train_rows(3, 0, num))
    pieces = [source.train_rows(3, start, min(num, start + 7)) for start in range(0, num, 7)]
    assert [one for piece in pieces for one in samples(piece)] == whole
    assert sorted(one[0] for one in whole) == sorted(one[0] for one in samples(source.train_rows(4, 0, num)))
    num = source.num_eval_samples
    whole = samples(source.eval_rows(0, num))
    pieces = [source.eval_rows(start, min(num, start + 5)) for start in range(0, num, 5)]
    assert [one for piece in pieces for one in samples(piece)] == whole
    assert source.eval_rows(3, 3).label.shape == (0,)


def test_frequent_items_are_negatives_more_often_if_asked(tmp_path):
    from embark.data.next_item import FrequencySampler

    counts = np.array([1, 50, 3, 1, 1000, 7])
    fractions = (np.arange(1062 * 8) + 0.5) / (1062 * 8)
    assert np.bincount(FrequencySampler(counts).draw(fractions)).tolist() == (counts * 8).tolist()


def test_a_log_is_recognized_by_its_columns(tmp_path):
    write(tmp_path / "log.csv", [("4.5", *row) for row in rows_of(11)], "stars,reviewerID,asin,unixTime")
    spec = resolve({"model": {"kind": "sasrec"}, "data": {
        "kind": "prepared", "path": str(tmp_path / "data"), "prepare": {"input": str(tmp_path / "log.csv")}}})
    shown = preview(spec)
    roles = {row["column"]: row["taken_for"] for row in shown.schema.describe()}
    assert 'user = "reviewerID"\nitem = "asin"' in shown.toml
    assert 'time_column = "unixTime"' in shown.toml
    assert roles["stars"] == "ignored"
    path = tmp_path / "shown.toml"
    where = f'[data]\nkind = "prepared"\npath = "{tmp_path}/data"'
    path.write_text(f'name = "a"\n{shown.toml}'.replace("[data]", where))
    assert prepare_from_spec(load_spec(str(path))).manifest.num_rows("train") > 0


def test_settings_that_a_log_cannot_have_are_refused(tmp_path):
    for wrong in ("data.prepare.ids=hash", "data.prepare.split=file"):
        with pytest.raises(UserError, match="does not apply to a log"):
            spec_of(tmp_path, wrong, *(['data.prepare.validation_files=["a"]'] if "file" in wrong else []))
    write(tmp_path / "log.csv", [("u1", "a", 1_700_000_000), ("u2", "b", 1_700_000_001)])
    with pytest.raises(DataError, match="two items to train on"):
        prepare_from_spec(spec_of(tmp_path))


def items_by_row(folder: Path, names) -> dict[int, str]:
    """Return the item of each row of the table."""
    keys, ids = (np.load(folder / f"ids/item.{kind}.npy") for kind in ("keys", "ids"))
    rows = dict(zip(keys.tolist(), ids.tolist(), strict=True))
    hashed = {name: int(key) for name in names for key in [hash_bytes(pa.array([name.encode()]))[0]]}
    return {rows[key]: name for name, key in hashed.items() if key in rows}


def later_rows(folder: Path, *sets: str) -> tuple[RunSpec, list[tuple[str, str, int]]]:
    """Prepare a log, and write one of later rows: other users, some items that are new and some no more, times as
    words, the columns in another order."""
    write(folder / "log.csv", rows_of(13))
    prepare_from_spec(spec_of(folder))
    rows = [(f"later-{user}", item.replace("item-1", "new-1"), at) for user, item, at in rows_of(14)]
    (folder / "later.csv").write_text("at,item,user\n" + "".join(
        f"{datetime.fromtimestamp(at, UTC):%d.%m.%Y %H:%M:%S},{item},{user}\n" for user, item, at in rows))
    return spec_of(folder, f"data.prepare.input={folder / 'later.csv'}", f"data.path={folder / 'later'}",
                   f"data.prepare.id_map_from={folder / 'data'}", *sets), rows


def test_new_rows_of_a_log_keep_the_rows_of_its_items(tmp_path):
    spec, rows = later_rows(tmp_path, "data.eval_split=test")
    assert "as in" in preview(spec).ids
    manifest = prepare_from_spec(spec).manifest
    names = {row[1] for row in [*rows, *rows_of(13)]}
    before, now = (items_by_row(tmp_path / folder, names) for folder in ("data", "later"))
    assert before.items() < now.items()
    assert sorted(now) == list(range(1, len(now) + 1))
    about = manifest.settings["id_maps"]["item"]
    assert (about["known"], about["new"], about["rows"]) == (len(before), len(now) - len(before), len(now) + 1)
    source = open_source(resolve_from_data(spec))
    assert {now[row] for row in source.catalog.tolist()} == {row[1] for row in rows} != set(now.values())
    counts = Counter(row[1] for row in rows)
    assert source.counts.tolist() == [counts[now[row]] for row in source.catalog.tolist()]
    found = [tuple(now[row] for row in sample[0]) for sample in samples(source.eval_rows(0, source.num_eval_samples))]
    assert sorted(found) == sorted(tuple(items[-7:]) for items in histories(rows).values() if len(items) >= 3)
    drawn = {row for sample in samples(source.train_rows(0, 0, source.num_train_samples)) for row in sample[1]}
    assert drawn <= set(source.catalog.tolist())
    assert prepare_from_spec(spec).was_complete


def test_columns_that_a_later_log_does_not_name_are_those_of_the_earlier(tmp_path):
    write(tmp_path / "log.csv", rows_of(15), "who,what,at")
    names = "data.interactions={user='who', item='what'}"
    prepare_from_spec(spec_of(tmp_path, names))
    rows = [(item, user, "x", at) for user, item, at in rows_of(16)]
    write(tmp_path / "later.csv", rows, "what,who,item,at")
    spec = resolve({"model": {"kind": "sasrec"}, "data": {
        "kind": "prepared", "path": str(tmp_path / "later"),
        "prepare": {"input": str(tmp_path / "later.csv"), "id_map_from": str(tmp_path / "data")}}})
    manifest = prepare_from_spec(spec).manifest
    assert [column["name"] for column in manifest.settings["schema"]["sparse"]] == ["who", "what"]
    assert manifest.settings["schema"]["time_column"] == "at"


def test_items_that_are_numbers_in_one_log_stay_words_of_the_other(tmp_path):
    rows = [(f"u{number % 9}", f"i{number % 7}" if number % 2 else number % 5, 1_700_000_000 + number)
            for number in range(90)]
    write(tmp_path / "log.csv", rows)
    prepare_from_spec(spec_of(tmp_path))
    write(tmp_path / "later.csv", [(user, number % 5, at) for number, (user, _, at) in enumerate(rows)])
    manifest = prepare_from_spec(spec_of(
        tmp_path, f"data.prepare.input={tmp_path}/later.csv", f"data.path={tmp_path}/later",
        f"data.prepare.id_map_from={tmp_path}/data")).manifest
    assert manifest.settings["id_maps"]["item"]["new"] == 0
    assert manifest.settings["schema"]["sparse"][1]["kind"] == "text"


def test_ids_that_a_log_cannot_continue_are_refused(tmp_path):
    spec, _ = later_rows(tmp_path)
    tables = "model.tables=[{name='item', rows=5, pooling='none', max_length=9}, " \
             "{name='n', shares='item', pooling='none', max_length=4}]"
    with pytest.raises(DataError, match=r"item: \d+ rows there, 5 in \[model\]"):
        prepare_from_spec(spec_of(tmp_path, f"data.prepare.id_map_from={tmp_path}/data", "model.sequence.times=",
                                  "model.sequence.history=item", "model.sequence.negatives=n", tables,
                                  "model.num_dense=0"))
    with pytest.raises(DataError, match="tables: item there, user here"):
        prepare_from_spec(spec_of(tmp_path, f"data.prepare.id_map_from={tmp_path}/data",
                                  "data.interactions={user='item', item='user'}"))
    table = {"kind": "prepared", "path": str(tmp_path / "table"), "label": "label",
             "prepare": {"input": str(tmp_path / "rows.csv"), "sparse_columns": ["user", "item"]}}
    write(tmp_path / "rows.csv", [(user, item, at % 2) for user, item, at in rows_of(13)], "user,item,label")
    with pytest.raises(DataError, match="rows of a log, and these are of a table"):
        prepare_from_spec(resolve({"data": table}, [f"data.prepare.id_map_from={tmp_path}/data"]))
    prepare_from_spec(resolve({"data": table}))
    with pytest.raises(DataError, match="rows of a table, and these are of a log"):
        prepare_from_spec(spec.changed(data=spec.data.changed(
            prepare=spec.data.prepare.changed(id_map_from=str(tmp_path / "table")))))


def test_a_log_as_it_is_can_be_evaluated_on(tmp_path):
    _, rows = later_rows(tmp_path)
    own = resolve_from_data(spec_of(tmp_path))
    fingerprint = open_source(own).fingerprint()
    known = items_by_row(tmp_path / "data", {row[1] for row in [*rows, *rows_of(13)]})
    with open_rows(own, fingerprint, str(tmp_path / "later.csv")) as found:
        batch = found.source.eval_rows(0, found.source.num_eval_samples)
        assert found.description == f"all rows of {tmp_path}/later.csv"
    kept = [row for row in rows if row[1] in known.values()]
    assert len(kept) < len(rows)
    assert sorted(tuple(known[row] for row in sample[0]) for sample in samples(batch)) == sorted(
        tuple(items[-7:]) for items in histories(kept).values() if len(items) >= 3)


def test_the_items_of_a_prepared_log_are_written_and_its_splits_are_not(tmp_path):
    write(tmp_path / "log.csv", rows_of(17))
    prepare_from_spec(spec_of(tmp_path))
    write_id_maps(str(tmp_path / "data"), tmp_path / "maps")
    found = parquet.read_table(tmp_path / "maps" / "item.parquet").to_pylist()
    names = items_by_row(tmp_path / "data", {row[1] for row in rows_of(17)})
    assert {row["id"]: row["value"] for row in found} == {0: None, **names}
    with pytest.raises(DataError, match="not by row"):
        write_splits(str(tmp_path / "data"), tmp_path / "splits.parquet")


@pytest.mark.parametrize("name", ["ids", "counts"])
@pytest.mark.parametrize("damage", [b"", b"no array", np.zeros(3), np.arange(-3, 27), np.full(30, 0), np.array(["a"])])
def test_damaged_items_are_refused(tmp_path, name, damage):
    write(tmp_path / "log.csv", rows_of(12))
    prepare_from_spec(spec_of(tmp_path))
    path = tmp_path / "data" / "ids" / f"item.{name}.npy"
    if isinstance(damage, bytes):
        path.write_bytes(damage)
    else:
        np.save(path, damage)
    with pytest.raises(DataError, match=r"item|ids"):
        open_source(resolve_from_data(spec_of(tmp_path)))
