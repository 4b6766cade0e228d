"""Data prepared into a store, each task in a folder of its own, is the data that one machine prepares."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from uuid import uuid4

import pytest

from embark.data.prepare import prepare as prepare_module
from embark.data.prepare.prepare import prepare_from_spec
from embark.data.prepare.stored import Extent, TaskFolder
from embark.data.prepared import Manifest
from embark.errors import Fault, UserError
from embark.spec.run import RunSpec
from embark.store import open_store

NETWORK = {"embedding_dim": 8, "bottom_mlp": [8], "top_mlp": [8]}
FEATURES = {"columns": {"user": {"statistics": ["count", "label_rate"]}, "at": {"parts": ["hour"]}}}
TIME = {"time_column": "at", "prepare": {"split": "time"}}
KINDS = {
    "ids by frequency, numbers by their rows": {},
    "ids by hash": {"prepare": {"ids": "hash"}, "model": {**NETWORK, "tables": [
        {"name": "user", "rows": 50}, {"name": "words", "rows": 20, "multi_hot": 3}, {"name": "shop", "rows": 9}]}},
    "statistics and a split by time": {**TIME, "features": FEATURES},
    "columns that share ids": {"model": {**NETWORK, "tables": [
        {"name": "user", "rows": 3000}, {"name": "friend", "rows": 3000, "shares": "user"},
        {"name": "words", "rows": 99, "multi_hot": 3}, {"name": "shop", "rows": 30}]}},
}


class Repeating:
    """An executor that does tasks in any order, each twice: as a cluster may that took a machine for lost."""

    num_tasks = 0

    def __init__(self, work, num_tasks, memory_bytes):
        self._work = work

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def run(self, tasks, report):
        for task in random.Random(1).sample(list(tasks), len(tasks)):
            zombie, again = self._work.do(task, lambda *_: None), self._work.do(task, report)
            Repeating.num_tasks += 1
            result = again()
            assert zombie() == result
            yield task, result


@pytest.fixture(autouse=True)
def many_small_tasks(monkeypatch, tmp_path):
    for name, value in (("SMALL_BYTES", 1 << 40), ("MIN_SEGMENT_BYTES", 6_000)):
        monkeypatch.setattr(f"embark.data.prepare.prepare.{name}", value)
    monkeypatch.setattr("embark.data.ray_executor.RayExecutor", Repeating)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("os.fsync", lambda _: None)  # which on a busy disk takes most of the time


@pytest.fixture
def text(tmp_path):
    """Return the path of some rows."""
    draw = random.Random(3)
    rows = [f"{draw.randrange(2)},{draw.choice(['', draw.random()])},u{draw.randrange(900)},u{draw.randrange(900)},"
            f"s{draw.randrange(9)},{'|'.join(f'w{draw.randrange(40)}' for _ in range(draw.randrange(3)))},"
            f"2024-05-{draw.randrange(1, 29):02d}T{draw.randrange(24):02d}:00:00Z" for _ in range(1_200)]
    (tmp_path / "in.csv").write_text("\n".join(["label,price,user,friend,shop,words,at", *rows]) + "\n")
    return str(tmp_path / "in.csv")


def spec_of(text: str, kind: str, **prepare: object) -> RunSpec:
    given = dict(KINDS[kind])
    model, features = given.pop("model", {}), given.pop("features", {})
    data = {"kind": "prepared", **given}
    if model:
        data["prepare"] = data.get("prepare", {}) | {"ignored_columns": [] if "friend" in str(model) else ["friend"]}
    data["prepare"] = {"input": text, "memory_gb": 1, **data.get("prepare", {}), **prepare}
    return RunSpec.model_validate({"data": data, "model": model, "features": features})


def content(uri: str | Path) -> dict[str, bytes | str]:
    store = open_store(uri)
    found: dict[str, bytes | str] = {entry.path: store.read(entry.path) for entry in store.list()}
    return found | {"manifest.json": Manifest.from_text(found["manifest.json"].decode(), "").fingerprint()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_and_repeated_tasks_change_no_byte(text, tmp_path, kind):
    expected = prepare_from_spec(spec_of(text, kind), tmp_path / "here")
    bucket, shared = f"memory://{uuid4().hex}", tmp_path / "shared"
    in_store = prepare_from_spec(spec_of(text, kind), bucket)
    Repeating.num_tasks = 0
    by_others = prepare_from_spec(spec_of(text, kind, executor="ray"), shared)
    assert Repeating.num_tasks > 5
    assert content(tmp_path / "here") == content(bucket) == content(shared)
    assert in_store.hints == by_others.hints == expected.hints
    assert not list(tmp_path.glob("embark-prepare-*/*"))  # No task leaves its folder behind.
    assert prepare_from_spec(spec_of(text, kind), bucket).was_complete


@pytest.mark.parametrize("split", ["last", "time"])
def test_a_log_becomes_the_same_sequences_in_a_store(tmp_path, split, monkeypatch):
    monkeypatch.setattr("embark.data.prepare.sequences.GROUP_ROWS", 300)
    draw = random.Random(4)
    rows = [f"u{draw.randrange(90)},item-{draw.randrange(40)},{1_700_000_000 + draw.randrange(100_000)}"
            for _ in range(2_000)]
    (tmp_path / "log.csv").write_text("\n".join(["user,item,at", *rows]) + "\n")
    data = {"kind": "prepared", "time_column": "at", "prepare": {"input": str(tmp_path / "log.csv"), "split": split}}
    local = RunSpec.model_validate({"model": {"kind": "sasrec", "embedding_dim": 8}, "data": data})
    data["prepare"]["executor"] = "ray"
    by_others = RunSpec.model_validate({"model": {"kind": "sasrec", "embedding_dim": 8}, "data": data})
    bucket, shared = f"memory://{uuid4().hex}", tmp_path / "shared"
    prepare_from_spec(local, tmp_path / "here")
    prepare_from_spec(local, bucket)
    Repeating.num_tasks = 0
    prepare_from_spec(by_others, shared)
    assert Repeating.num_tasks > 5
    assert content(tmp_path / "here") == content(bucket) == content(shared)
    (tmp_path / "log.csv").write_text("\n".join(["user,item,at", *(row.replace("item-1", "new-1") for row in rows)]))
    later = [spec.changed(data=spec.data.changed(prepare=spec.data.prepare.changed(id_map_from=str(tmp_path / "here"))))
             for spec in (local, local, by_others)]
    outs = tmp_path / "later", f"memory://{uuid4().hex}", tmp_path / "shared-later"
    manifests = [prepare_from_spec(spec, out).manifest for spec, out in zip(later, outs, strict=True)]
    assert manifests[0].settings["id_maps"]["item"]["known"] == 40
    assert manifests[0].settings["id_maps"]["item"]["new"] == 11
    assert content(outs[0]) == content(outs[1]) == content(outs[2])
    assert not list(tmp_path.glob("embark-prepare-*/*"))


def test_ids_of_earlier_data_are_kept_in_a_store(text, tmp_path):
    kind = "ids by frequency, numbers by their rows"
    prepare_from_spec(spec_of(text, kind), tmp_path / "january")
    later = [spec_of(text, kind, id_map_from=str(tmp_path / "january"), executor=one) for one in ("local", "ray")]
    prepare_from_spec(later[0], tmp_path / "here")
    prepare_from_spec(later[1], tmp_path / "shared")
    bucket = f"memory://{uuid4().hex}"
    prepare_from_spec(later[0], bucket)
    assert content(tmp_path / "here") == content(tmp_path / "shared") == content(bucket)


def test_a_preparation_in_a_store_goes_on_where_it_stopped(text, tmp_path, monkeypatch):
    kind, bucket = "ids by frequency, numbers by their rows", f"memory://{uuid4().hex}"
    done: list[str] = []
    original = prepare_module.Preparation.do

    def count(self, task, report):
        done.append(task.record)
        if len(done) == 12:
            raise Fault("a stop")
        return original(self, task, report)

    monkeypatch.setattr(prepare_module.Preparation, "do", count)
    with pytest.raises(Fault, match="a stop"):
        prepare_from_spec(spec_of(text, kind), bucket)
    assert not open_store(bucket).exists("manifest.json")
    prepare_from_spec(spec_of(text, kind), bucket)
    assert len(done) == len(set(done)) + 1  # No task twice, but for the one that failed.
    prepare_from_spec(spec_of(text, kind), tmp_path / "here")
    assert content(bucket) == content(tmp_path / "here")


def test_a_store_holds_one_preparation_at_a_time_and_fresh_replaces_it(text, tmp_path):
    kind, bucket = "ids by frequency, numbers by their rows", f"memory://{uuid4().hex}"
    prepare_from_spec(spec_of(text, kind), bucket)
    with pytest.raises(UserError, match="prepared from other files or with other settings"):
        prepare_from_spec(spec_of(text, kind, min_count=3), bucket)
    prepare_from_spec(spec_of(text, kind, min_count=3), bucket, fresh=True)
    prepare_from_spec(spec_of(text, kind, min_count=3), tmp_path / "here")
    assert content(bucket) == content(tmp_path / "here")


def test_a_machine_that_does_not_see_the_folder_says_so(text, tmp_path, monkeypatch):
    class Elsewhere(Repeating):
        def __init__(self, work, *more):
            work = type(work)(work.work, str(tmp_path / "of another machine"))
            super().__init__(work, *more)

    monkeypatch.setattr("embark.data.ray_executor.RayExecutor", Elsewhere)
    with pytest.raises(UserError, match="finds no preparation there") as caught:
        prepare_from_spec(spec_of(text, "ids by hash", executor="ray"), tmp_path / "out")
    assert "in a folder that all machines share" in caught.value.fix


def test_parts_of_files_are_fetched_to_where_they_are(tmp_path):
    store = open_store(f"memory://{uuid4().hex}")
    store.write("a/b.keys", bytes(range(256)) * 40)
    folder = TaskFolder(store)
    folder.fetch([Extent("a/b.keys", 100, 50), Extent("a/b.keys", 10_000, 5), Extent("a/b.keys", 200, 0)])
    fetched = (folder.path / "a" / "b.keys").read_bytes()
    assert fetched[100:150] == bytes(range(100, 150))
    assert fetched[10_000:] == bytes(range(10_000 % 256, 10_000 % 256 + 5))
    (folder.path / "a" / "made").write_bytes(b"x")
    folder.put()
    assert [(entry.path, entry.size_bytes) for entry in store.list()] == [("a/b.keys", 256 * 40), ("a/made", 1)]
    folder.close()


def test_folders_of_killed_processes_are_removed_and_no_others(tmp_path):
    store = open_store(f"memory://{uuid4().hex}")
    in_use = TaskFolder(store)
    abandoned, young = in_use.path.parent / "abandoned", in_use.path.parent / "young"
    for folder in (abandoned, young):
        folder.mkdir()
    for folder in (abandoned, in_use.path):
        os.utime(folder, (time.time() - 1e6,) * 2)
    TaskFolder(store).close()
    assert in_use.path.exists()
    assert young.exists()
    assert not abandoned.exists()
    in_use.close()
