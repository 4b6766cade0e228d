"""A row is the same through every door, by every transform and feature, bit for bit in fp32."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import tritonclient.grpc as grpc_client
from exported_runs import save_run, validation_rows
from served_models import while_serving

from embark import export_run
from embark.data import resolve_from_data
from embark.data.prepare.prepare import prepare_from_spec
from embark.data.prepared.cache import read_manifest
from embark.data.stream.source import StreamSource
from embark.export.artifact import open_artifact
from embark.features.layout import Rows
from embark.serve.endpoint import Endpoint
from embark.serve.score_file import score_file
from embark.spec import RunSpec, resolve
from embark.trainers.torch.scoring.cpu_model import ExportedModel

TRANSFORMS = ("auto", "standardize", "quantiles", "piecewise_linear", "log", "mlperf", "clip", "none")
EXTREMES = ("", "NA", "nan", "0", "-0", "1e38", "-1e38", "1e-45", "3e38", "16777217", "-3", " 7 ", "+5")
NUMBERS = (*TRANSFORMS, "euro")
COLUMNS = ("label", *NUMBERS, "word", "device", "user", "tags", "title", "at", "seen")
COMMAS = str.maketrans("_.", ".,")
PIECE = 500  # Not every matrix library sums in the same order in batches of all sizes.


def cells_of(num_rows: int, seed: int) -> list[list[str]]:
    """Draw cells of `COLUMNS`: a label, a number for each transform, and what other features are made of."""
    rng, draw = np.random.default_rng(seed), random.Random(seed)
    values = (rng.lognormal(1, 2, (num_rows, len(TRANSFORMS))) * rng.choice([1, 1, 1, -1], (num_rows, 1)))
    rows = [[f"{value}" for value in row] for row in values.astype(np.float32)]
    for row, column, extreme in zip(rng.integers(num_rows, size=num_rows), rng.integers(len(TRANSFORMS), size=num_rows),
                                    rng.integers(len(EXTREMES), size=num_rows), strict=True):
        is_raw = TRANSFORMS[column] == "none" and "e38" in EXTREMES[extreme]  # whose score would not be finite
        rows[row][column] = "1e6" if is_raw else EXTREMES[extreme]
    return [[str(draw.randrange(2)), *row, draw.choice(["", f"{draw.uniform(-9, 9999):_.3f}".translate(COMMAS)]),
             draw.choice(["a", "b", "", "NA", " a ", f"w{draw.randrange(99)}"]), draw.choice(["tv", "phone", ""]),
             draw.choice(["", "-7", str(draw.randrange(3 * seed, 700))]),
             "|".join(draw.choices(["x", "y", "NA", " x", "日本", "e\u0301"], k=draw.randrange(6))),
             " - ".join(draw.choices(["Red", "red", "ﬁne", "Größe", "don't"], k=draw.randrange(6))),
             draw.choice(["", f"{draw.randrange(10, 29)}.{draw.randrange(1, 13):02}.2024 {draw.randrange(10, 24)}:30"]),
             f"2024-{draw.randrange(10, 13)}-03T{draw.randrange(10, 24)}:00:00Z"] for row in rows]


def write(path: Path, rows: list[list[str]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([COLUMNS, *rows])
    return path


def spec_of(folder: Path, *inputs: Path) -> RunSpec:
    return resolve({
        "name": "every", "model": {"embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [8]},
        "data": {"kind": "prepared", "path": str(folder / "prepared"), "dense_columns": [*TRANSFORMS, "euro"],
                 "time_column": "seen", "prepare": {
                     "input": [str(path) for path in inputs], "split": "file", "validation_files": ["later*"],
                     "sparse_columns": ["word", "device", "user"], "list_columns": ["tags"], "list_delimiter": "|",
                     "max_ids": 3}},
        "features": {
            "missing_flags": True, "bucket_tables": True, "columns": {
                **{name: {"transform": name} for name in TRANSFORMS},
                "clip": {"transform": "clip", "min": -2.5, "max": 9}, "euro": {"decimal": ",", "num_buckets": 5},
                "word": {"statistics": ["count", "label_rate"], "min_count": 2},
                "user": {"rows": 5_000, "num_hashes": 2, "statistics": ["label_rate"]},
                "title": {"words": True, "max_ids": 4},
                "at": {"parts": ["hour", "weekday", "day", "month", "age"], "time_format": "%d.%m.%Y %H:%M",
                       "time_zone": "Europe/Berlin"}},
            "crosses": [{"columns": ["word", "device"]}, {"columns": ["user", "at_hour"], "rows": 997},
                        {"columns": ["device", "log"], "buckets": {"log": [-1, 0.5, 20]}}]},
        "train": {"batch_size": 1}, "place": {"device": "cpu"}, "store": {"root": str(folder)},
        "stream": {"source": "files", "path": str(folder)}, "watch": {"tensorboard": False}})


def typed(name: str, cell: str) -> object:
    """Return the value of JSON that a cell stands for."""
    if name in NUMBERS:
        text = cell.replace(".", "").replace(",", ".") if name == "euro" else cell
        return None if cell in ("", "NA", "nan") else float(np.float32(text))
    if name == "user":
        return int(cell) if cell else None
    return cell.split("|") if name == "tags" and cell else cell or None


def tensors_of(rows: list[list[str]]) -> list[grpc_client.InferInput]:
    found = []
    for at, name in enumerate(COLUMNS[1:], 1):
        found.append(grpc_client.InferInput(name, [len(rows)], "FP32" if name in NUMBERS else "BYTES"))
        cells = [row[at] for row in rows]
        if name in NUMBERS:
            numbers = [typed(name, cell) for cell in cells]
            found[-1].set_data_from_numpy(np.array([np.nan if one is None else one for one in numbers], np.float32))
        else:
            found[-1].set_data_from_numpy(np.array([cell.encode() for cell in cells], np.object_))
    return found


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return np.array_equal(np.asarray(one, np.float32).view(np.uint32), np.asarray(other, np.float32).view(np.uint32))


def streamed(stream: StreamSource, spec: RunSpec, file: Path, like: Rows) -> Rows:
    """Return the rows that a stream makes of a file, with their features in the order of `like`."""
    batch, _ = stream.rows_of_files(str(file))
    names = [table.name for table in spec.model.table_list()]
    ids, lengths = (dict(zip(names, found, strict=True)) for found in (batch.by_feature(batch.ids), batch.lengths))
    order = [feature.name for feature in read_manifest(spec.data.path).layout.features]
    return Rows(batch.label, batch.dense, tuple(ids[name] for name in order), tuple(
        None if one is None else lengths[name] for name, one in zip(order, like.lengths, strict=True)))


@pytest.mark.parametrize("num_rows", [1_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_every_door_gives_the_scores_of_training_by_every_feature(tmp_path, num_rows):
    rows = cells_of(num_rows, 2)
    pieces = [rows[start : start + PIECE] for start in range(0, num_rows, PIECE)]
    files = [write(tmp_path / f"later{number:04d}.csv", piece) for number, piece in enumerate(pieces)]
    spec = spec_of(tmp_path, write(tmp_path / "train.csv", cells_of(2_000, 1)), *files)
    prepare_from_spec(spec, tmp_path / "prepared")
    artifact = open_artifact(export_run(save_run(spec).uri, str(tmp_path / "models")).uri)
    trained, model = validation_rows(spec.data.path), ExportedModel(artifact)
    features = {feature.name for feature in read_manifest(spec.data.path).layout.features}
    assert {"tags", "title", "user", "at_month", "word_x_device", "device_x_log", "euro_bucket"} < features
    assert trained.dense.shape == (num_rows, 2 * (len(NUMBERS) + 1) + 3 + 15 + 2 * 17)  # bins of three, age, statistics
    expected = np.concatenate([model.score_encoded(trained.cut(start, start + PIECE))
                               for start in range(0, num_rows, PIECE)])
    assert len(np.unique(expected)) > num_rows / 4  # raw numbers make many of them 0 or 1

    complete = resolve_from_data(spec)
    stream = StreamSource(complete)
    by_stream = [model.score_encoded(streamed(stream, complete, file, trained)) for file in files]
    assert same_bits(np.concatenate(by_stream), expected)
    for number, file in enumerate(files):
        score_file(artifact.uri, str(file), tmp_path / f"{number}.parquet")
    assert same_bits(np.concatenate([pyarrow.parquet.read_table(tmp_path / f"{number}.parquet")["score"].to_numpy()
                                     for number in range(len(files))]), expected)

    def use(client):
        texts = [[dict(zip(COLUMNS[1:], row[1:], strict=True)) for row in piece] for piece in pieces]
        values = [[{name: typed(name, cell) for name, cell in row.items()} for row in piece] for piece in texts]
        by_http = [[score for piece in kind for score in client("POST", "/score", {"rows": piece})[1]["scores"]]
                   for kind in (values, texts)]
        with grpc_client.InferenceServerClient(client.grpc) as library:
            by_grpc = [library.infer("every", tensors_of(piece)).as_numpy("score") for piece in pieces]
        return *by_http, np.concatenate(by_grpc)

    for scores in while_serving(artifact, use, endpoint=Endpoint(port=0, grpc_port=0)):
        assert same_bits(scores, expected)


def test_the_state_is_that_of_training_rows_at_any_number_of_pieces(tmp_path, monkeypatch):
    train = write(tmp_path / "train.csv", cells_of(3_000, 1))
    states = []
    for number, size in enumerate([1 << 30, 20_000, 50_000]):
        monkeypatch.setattr("embark.data.prepare.prepare.segment_bytes_of", lambda _, size=size: size)
        spec = spec_of(tmp_path / str(number), train, write(tmp_path / "later.csv", cells_of(500, number)))
        states.append(prepare_from_spec(spec, tmp_path / f"{number}").manifest.settings["numbers"])
    assert states[0] == states[1] == states[2]
    assert [one["column"] for one in states[0]] == [*NUMBERS, "at_age"]
