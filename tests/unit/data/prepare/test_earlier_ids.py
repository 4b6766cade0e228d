"""New rows with the ids of earlier data: the same value is the same row, and what cannot be kept is refused."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from embark.data.check import check
from embark.data.prepare import prepare as prepare_module
from embark.data.prepare.prepare import prepare_from_spec, preview
from embark.errors import DataError, UserError
from embark.spec import resolve

ITEMS = [f"item-{i}" for i in range(60)]


@pytest.fixture
def folder(tmp_path):
    """January has users 0 to 79 and the first items; February users 40 to 119, its columns in another order."""
    draw = random.Random(1)
    rows = [[(draw.randrange(2), draw.randrange(first, first + 80), draw.choice(ITEMS[first // 4 : first // 4 + 30]),
              round(draw.random() * 50, 2), "|".join(draw.sample(["new", "sale", "top"], 2))) for _ in range(600)]
            for first in (0, 40)]
    (tmp_path / "january.csv").write_text("clicked,user,item,price,tags\n" + "".join(
        f"{c},{u},{i},{p},{t}\n" for c, u, i, p, t in rows[0]))
    (tmp_path / "february.csv").write_text("tags,age,item,user,clicked,price\n" + "".join(
        f"{t},7,{i},{u},{c},{p}\n" for c, u, i, p, t in rows[1]))
    prepared(tmp_path, "january")
    return tmp_path


def spec_of(folder: Path, month: str, out: str = "", *sets: str):
    return resolve({"data": {"kind": "prepared", "path": str(folder / (out or month)), "label": "clicked",
                             "prepare": {"input": str(folder / f"{month}.csv"), "dense_bits": 32}}}, sets)


def prepared(folder: Path, month: str, out: str = "", *sets: str):
    spec = spec_of(folder, month, out, *sets)
    return prepare_from_spec(spec, folder / (out or month)).manifest


def february(folder: Path, *sets: str, out: str = "february"):
    return prepared(folder, "february", out, f"data.prepare.id_map_from={folder / 'january'}", *sets)


def id_map(folder: Path, out: str, table: str) -> dict[int, int]:
    keys, ids = (np.load(folder / out / f"ids/{table}.{kind}.npy") for kind in ("keys", "ids"))
    return dict(zip(keys.tolist(), ids.tolist(), strict=True))


def test_known_values_keep_their_rows_and_new_ones_come_after_them(folder, read_rows):
    january = id_map(folder, "january", "user")
    manifest = february(folder)
    ids = id_map(folder, "february", "user")
    assert ids.items() > january.items()
    assert sorted(ids.values()) == list(range(1, len(ids) + 1))
    assert min(ids[key] for key in ids if key not in january) == len(january) + 1
    about = manifest.settings["id_maps"]["user"]
    assert (about["known"], about["new"], about["rows"]) == (80, 40, 121)
    # In the order of January, whatever the order of the file; integers are their own keys.
    assert [feature.name for feature in manifest.layout.features] == ["user", "item", "tags"]
    assert manifest.layout.dense == tuple(f"price_bin_{number}" for number in range(1, 17))
    lines = [line.split(",") for line in (folder / "february.csv").read_text().splitlines()[1:]]
    rows = [row for split in ("train", "validation") for row in read_rows(folder / "february", manifest, split)]
    assert sorted((ids.get(int(line[3]), 0), int(line[4])) for line in lines) == sorted(
        (of[0][0], label) for label, _, of in rows)


def test_hashed_columns_keep_their_rows_without_being_told_them(folder):
    tables = "model.tables=[{name='user', rows=50}, {name='item', rows=40}]"
    prepared(folder, "january", "hashed", tables)
    manifest = prepared(folder, "february", "february", f"data.prepare.id_map_from={folder / 'hashed'}")
    assert [(f.name, f.rows) for f in manifest.layout.features] == [("user", 50), ("item", 40)]
    assert {about["how"] for about in manifest.settings["id_maps"].values()} == {"hash"}


def test_the_result_is_the_same_in_any_memory_and_found_complete(folder, monkeypatch):
    once, plan_budget = february(folder), prepare_module.plan_budget
    monkeypatch.setattr(prepare_module, "plan_budget", lambda *a, **k: replace(
        plan_budget(*a, **k), max_entries=20, run_rows=50, chunk_bytes=1000))
    assert february(folder, out="little") == once
    for table in ("user", "item", "tags"):
        assert id_map(folder, "little", table) == id_map(folder, "february", table)
    spec = spec_of(folder, "february", "february", f"data.prepare.id_map_from={folder / 'january'}")
    assert prepare_from_spec(spec, folder / "february").was_complete
    with pytest.raises(UserError, match="other settings"):
        february(folder, "data.prepare.max_rows=100")


def test_the_manifest_identifies_the_data_whose_ids_it_continues(folder):
    fingerprint = prepared(folder, "january").fingerprint()
    assert february(folder).settings["id_map_from"] == {"data": fingerprint, "new_ids": "append"}
    assert "id_map_from" not in february(folder).settings["prepare"]
    (folder / "january").rename(folder / "moved")
    spec = spec_of(folder, "february", "february", f"data.prepare.id_map_from={folder / 'moved'}")
    assert prepare_from_spec(spec, folder / "february").was_complete


def test_a_damaged_map_is_refused_by_the_name_of_its_table(folder):
    file = folder / "january/ids/item.ids.npy"
    text = file.read_bytes()
    file.write_bytes(text[:-1] + bytes([text[-1] ^ 1]))
    with pytest.raises(DataError, match="the id map of item is missing or not what the manifest says"):
        february(folder)
    file.unlink()
    with pytest.raises(DataError, match="the id map of item is missing"):
        february(folder)
    assert not (folder / "february/manifest.json").exists()


def test_a_check_of_the_data_finds_damaged_id_maps(folder):
    february(folder)
    assert check(str(folder / "february")).problems == ()
    for file in ("user.keys", "item.ids"):
        path = folder / f"february/ids/{file}.npy"
        path.write_bytes(path.read_bytes() + b"x")
    (folder / "february/ids/tags.ids.npy").unlink()
    assert [problem.where for problem in check(str(folder / "february")).problems] == [
        "ids/user.ids.npy", "ids/item.ids.npy", "ids/tags.ids.npy"]


def test_maps_of_an_object_store_are_brought_here_and_checked(folder, monkeypatch):
    wanted = february(folder)
    monkeypatch.setattr("embark.data.prepare.earlier_ids.local_folder", lambda path: None)
    assert february(folder, out="remote") == wanted
    (folder / "january/ids/user.ids.npy").write_bytes(b"other")
    with pytest.raises(DataError, match="the id map of user is missing or not what the manifest says"):
        february(folder, out="damaged")


@pytest.mark.parametrize(("sets", "message"), [
    (("data.prepare.sparse_columns=['user']",), "tables: user, item, tags there, user here"),
    (("data.dense_columns=['price', 'age']",), "dense columns: price there, price, age here"),
    (("features.numbers=none",), 'features: {} there, {"numbers": "none"} here'),
    (("model.tables=[{name='user', rows=50}, {name='item', rows=90}, {name='tags', rows=9, multi_hot=4}]",),
     r"user: 81 rows there, 50 in \[model\]"),
])
def test_input_whose_ids_would_mean_other_rows_is_refused(folder, sets, message):
    with pytest.raises(DataError, match=message):
        february(folder, *sets)


def test_data_without_id_maps_or_of_another_version_is_refused(folder):
    path = folder / "january/manifest.json"
    manifest = json.loads(path.read_text())
    for settings, message in (({}, "its manifest has no id maps"),
                              (manifest["settings"] | {"revision": 1}, "another version of Embark prepared it")):
        path.write_text(json.dumps(manifest | {"settings": settings}))
        with pytest.raises(DataError, match=message):
            february(folder)


def test_a_preview_says_what_becomes_of_new_values_and_writes_nothing(folder):
    found = preview(spec_of(folder, "february", "february", f"data.prepare.id_map_from={folder / 'january'}"))
    assert found.ids == f"as in {folder / 'january'}; new values get new rows"
    assert found.schema.why["user"] == f"as in {folder / 'january'}"
    assert not (folder / "february").exists()
