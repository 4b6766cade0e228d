"""Batches of a stream: the ids that the prepared data gives, each row once, and the same from any checkpoint."""

from __future__ import annotations

import gzip
import json
import random
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embark.data import open_source, resolve_from_data
from embark.data.evaluation_rows import open_rows
from embark.data.loader import Batch
from embark.data.prepare.prepare import prepare_from_spec
from embark.data.stream.event_order import OrderState
from embark.data.stream.records import StreamStopped
from embark.data.stream.source import STREAM_FILE, StreamSource
from embark.errors import DataError, SpecError, UserError
from embark.spec import RunSpec, load_spec, resolve
from embark.store import Checkpoint, RunDir

BATCH = 16
COLUMNS = {"num_dense": 1, "embedding_dim": 8, "bottom_mlp": [8], "top_mlp": [8]}
TABLES = [{"name": "user", "rows": 50}, {"name": "tags", "rows": 20, "multi_hot": 3}]


def rows(num: int, seed: int = 0) -> list[dict]:
    chance = random.Random(seed)
    return [{"t": 1.7e9 + number, "label": chance.randrange(2), "price": round(chance.uniform(-3, 900), 3),
             "user": f"u{chance.randrange(40)}",
             "tags": [f"g{chance.randrange(9)}" for _ in range(chance.randrange(4))]} for number in range(num)]


def write_jsonl(path: Path, some: list[dict]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in some))


def take(source: StreamSource, num: int, first: int = 0) -> list[Batch]:
    return [source.train_rows(0, step * BATCH, (step + 1) * BATCH) for step in range(first, first + num)]


def assert_same(found: list[Batch], expected: list[Batch]) -> None:
    for one, other in zip(found, expected, strict=True):
        for field in ("dense", "ids", "lengths", "label"):
            assert np.array_equal(getattr(one, field), getattr(other, field)), field


def saved(source: StreamSource, step: int, folder: Path) -> tuple[RunDir, Checkpoint]:
    """A checkpoint with what the source gives for it."""
    files = source.checkpoint_files(step)
    run_dir = RunDir(str(folder))
    for name, data in files.items():
        run_dir.checkpoints.store.write(f"step-{step:09d}/{name}", data)
    return run_dir, Checkpoint(step, dict.fromkeys(files, None), {})  # type: ignore[arg-type]


def plain(folder: Path, **stream: object) -> RunSpec:
    return resolve({"model": {**COLUMNS, "tables": TABLES}, "data": {"dense_columns": ["price"]},
                    "train": {"batch_size": BATCH}, "stream": {"source": "files", "path": str(folder), **stream}})


def with_ids(some: list[dict]) -> list[dict]:
    return [{**row, "user": int(row["user"][1:]), "tags": [int(tag[1:]) for tag in row["tags"]]} for row in some]


def test_a_row_of_the_stream_has_the_ids_of_the_prepared_data(tmp_path: Path) -> None:
    some = rows(6 * BATCH)
    write_jsonl(tmp_path / "raw" / "all.jsonl", some)
    (tmp_path / "spec.toml").write_text(f"""
[model]
embedding_dim = 8
bottom_mlp = [8]
top_mlp = [8]
[data]
kind = "prepared"
path = "prepared"
shuffle = "none"
dense_columns = ["price"]
time_column = "t"
[data.prepare]
input = "raw/all.jsonl"
split = "time"
min_count = 2
[train]
batch_size = {BATCH}
[stream]
source = "files"
path = "stream"
""")
    spec = load_spec(str(tmp_path / "spec.toml"))
    assert spec.stream.path == str(tmp_path / "stream")
    prepare_from_spec(spec, tmp_path / "prepared")
    spec = resolve_from_data(spec)
    write_jsonl(tmp_path / "stream" / "1.jsonl", [*some[:7], {"user": "u1", "price": "dear", "label": 1}, *some[7:40]])
    write_jsonl(tmp_path / "stream" / "2.jsonl", some[40:])
    prepared = open_source(spec)
    with closing(StreamSource(spec)) as source:
        found = take(source, 5)
        assert_same(found, [prepared.train_rows(0, step * BATCH, (step + 1) * BATCH) for step in range(5)])
        assert source.fingerprint() == prepared.fingerprint()
        assert source.status(5)["num_unreadable"] == 1


def test_a_source_continues_from_a_checkpoint_behind_any_step(tmp_path: Path) -> None:
    some = with_ids(rows(9 * BATCH))
    chance = random.Random(1)
    for row in some:
        row["t"] -= chance.uniform(0, 10)
    for number in range(9):
        write_jsonl(tmp_path / "in" / f"{number}.jsonl", some[number * BATCH : (number + 1) * BATCH])
    spec = plain(tmp_path / "in", time_column="t", bound_s=12)
    with closing(StreamSource(spec)) as source:
        expected = take(source, 8)
        reads = [source.status(step) for step in range(1, 9)]
    assert reads[-1]["num_late"] == 0
    for step in range(1, 8):
        with closing(StreamSource(spec)) as first:
            take(first, min(step + 2, 8))  # it has read ahead of what was trained
            first.trained(step)
            run_dir, checkpoint = saved(first, step, tmp_path / f"run{step}")
        with closing(StreamSource(spec)) as again:
            again.restore(run_dir.checkpoints, checkpoint)
            assert_same(take(again, 8 - step, step), expected[step:])
            assert [again.status(one) for one in range(step + 1, 9)] == reads[step:]


def test_csv_gzip_and_parquet_files_are_read_in_order(tmp_path: Path) -> None:
    some, folder = with_ids(rows(4 * BATCH)), tmp_path / "in"
    write_jsonl(folder / "0.jsonl", some[:BATCH])
    (folder / "1.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, some[BATCH : 2 * BATCH])).encode()))
    (folder / "_2.jsonl").write_text("not yet")
    with closing(StreamSource(plain(folder))) as source, closing(StreamSource(plain(tmp_path / "all"))) as whole:
        found = take(source, 2)
        pq.write_table(pa.Table.from_pylist(some[2 * BATCH : 3 * BATCH]), folder / "2.parquet")
        lines = ["label,price,user,tags", *(f"{row['label']},{row['price']},{row['user']},"
                                            f"{'|'.join(map(str, row['tags']))}" for row in some[3 * BATCH :])]
        (folder / "3.csv").write_text("\n".join(lines) + "\n")
        found += take(source, 2, 2)
        write_jsonl(tmp_path / "all" / "x.jsonl", some)
        assert_same(found, take(whole, 4))


def test_an_object_store_prefix_is_followed(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    some = with_ids(rows(3 * BATCH))
    memory = fsspec.filesystem("memory")
    for number in range(3):
        text = "".join(json.dumps(row) + "\n" for row in some[number * BATCH : (number + 1) * BATCH])
        memory.pipe(f"/follow-{tmp_path.name}/part-{number}.jsonl", text.encode())
    write_jsonl(tmp_path / "all" / "x.jsonl", some)
    spec = plain(Path("x"))
    spec = spec.model_copy(update={"stream": spec.stream.model_copy(update={"path": f"memory://follow-{tmp_path.name}"})})
    with closing(StreamSource(spec)) as source, closing(StreamSource(plain(tmp_path / "all"))) as whole:
        assert_same(take(source, 3), take(whole, 3))


OWN = """
class Source:
    def __init__(self, stream):
        self.acknowledged = None
    def poll(self, offset, timeout_s):
        first = 0 if offset is None else offset + 1
        return [(i, {"label": i % 2, "price": i, "user": i % 50, "tags": [i % 20]}) for i in range(first, first + 10)]
    def acknowledge(self, offset):
        print("acknowledged", offset)
"""


def test_a_stream_of_the_user_s_own_code_hears_what_is_committed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    spec = plain(tmp_path, path="", source="custom_stream:Source", code=OWN)
    with closing(StreamSource(spec)) as source:
        found = take(source, 3)
        saved(source, 2, tmp_path / "run")
        source.committed(2)
        take(source, 1, 3)
    assert [int(batch.dense[0, 0]) for batch in found] == [0, 16, 32]
    assert "acknowledged 31" in capsys.readouterr().out


def test_numpy_values_are_saved_and_an_offset_that_is_not_json_is_refused(tmp_path):
    code = "import numpy as np\n" + OWN.replace('"label": i % 2', '"label": np.int64(i % 2)').replace(
        '"tags": [i % 20]', '"tags": np.arange(2)')
    with closing(StreamSource(plain(tmp_path, path="", source="custom_stream:Source", code=code))) as source:
        expected = take(source, 2)
        run_dir, checkpoint = saved(source, 1, tmp_path / "run")
    with closing(StreamSource(plain(tmp_path, path="", source="custom_stream:Source", code=code))) as again:
        again.restore(run_dir.checkpoints, checkpoint)
        assert_same(take(again, 1, 1), expected[1:])
    code = code.replace("[(i, {", "[(np.int64(i), {")
    with closing(StreamSource(plain(tmp_path, path="", source="custom_stream:Source", code=code))) as source, \
            pytest.raises(DataError, match="poll returned the offset"):
        take(source, 1)


def test_a_stream_of_words_for_dynamic_tables(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in" / "0.jsonl", rows(BATCH))
    spec = plain(tmp_path / "in")
    tables = [{"name": "user", "ids": "dynamic", "capacity": 32}, *TABLES[1:]]
    words = resolve({**spec.model_dump(mode="json", exclude_unset=True), "model": {**COLUMNS, "tables": tables}})
    write_jsonl(tmp_path / "in" / "0.jsonl", [{**row, "tags": []} for row in rows(BATCH)])
    with closing(StreamSource(words)) as source:
        (batch,) = take(source, 1)
    users = [row["user"] for row in rows(BATCH)]
    assert batch.ids.dtype == np.int64
    assert len(set(batch.ids.tolist())) == len(set(users))
    assert batch.ids.max() > 1 << 40


def test_a_source_that_waits_for_records_ends_when_the_run_is_stopped(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in" / "0.jsonl", with_ids(rows(BATCH + 3)))
    with closing(StreamSource(plain(tmp_path / "in"))) as source, source.reading(lambda: True, print):
        take(source, 1)
        with pytest.raises(StreamStopped):
            take(source, 1, 1)


def test_labelled_files_are_read_as_the_records_of_the_stream_are(tmp_path: Path) -> None:
    some = with_ids(rows(3 * BATCH))
    write_jsonl(tmp_path / "in" / "0.jsonl", some)
    write_jsonl(tmp_path / "later" / "0.jsonl", some[:BATCH])
    write_jsonl(tmp_path / "later" / "1.jsonl", [*some[BATCH:], {"a": "no id"}])
    spec = plain(tmp_path / "in")
    with closing(StreamSource(spec)) as source:
        expected = take(source, 3)
    for path, num_bad in (("later", 1), ("in/0.jsonl", 0)):
        with open_rows(spec, "", str(tmp_path / path)) as opened:
            assert_same([opened.source.eval_rows(i * BATCH, (i + 1) * BATCH) for i in range(3)], expected)
            assert opened.source.num_eval_samples == 3 * BATCH
            assert len(opened.notes) == num_bad
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has no row"), open_rows(spec, "", str(tmp_path / "empty")):
        pass


def test_a_checkpoint_without_a_state_and_a_lost_file_are_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in" / "0.jsonl", with_ids(rows(2 * BATCH)))
    with closing(StreamSource(plain(tmp_path / "in"))) as source:
        with pytest.raises(UserError, match="has no state of a stream"):
            source.restore(RunDir(str(tmp_path)).checkpoints, Checkpoint(3, {}, {}))
        take(source, 1)
        run_dir, checkpoint = saved(source, 1, tmp_path / "run")
        assert OrderState.from_json(source.checkpoint_files(1)[STREAM_FILE]).offsets[""][:2] == ["0.jsonl", BATCH - 1]
    (tmp_path / "in" / "0.jsonl").unlink()
    with closing(StreamSource(plain(tmp_path / "in"))) as again:
        again.restore(run_dir.checkpoints, checkpoint)
        with pytest.raises(DataError, match=r"0\.jsonl"):
            take(again, 1, 1)


@pytest.mark.parametrize(("stream", "field"), [
    ({"bound_s": 3.0}, "stream.source"), ({"source": "nats", "topics": ["a"]}, "stream.servers"),
    ({"source": "files", "path": "x", "topics": ["a"]}, "stream.topics"),
    ({"source": "files", "path": "x", "key": "id"}, "stream.label_window_s"),
    ({"source": "files", "path": "x", "key": "id", "label_window_s": 3.0}, "stream.time_column"),
])
def test_settings_that_contradict_each_other_are_mistakes(stream: dict, field: str) -> None:
    with pytest.raises(SpecError, match=field.replace(".", r"\.")):
        resolve({"stream": stream})
