"""A number is the same through every door, by every transform, bit for bit in fp32."""

from __future__ import annotations

import csv
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
from embark.data.stream.source import StreamSource
from embark.export.artifact import open_artifact
from embark.serve.endpoint import Endpoint
from embark.serve.score_file import score_file
from embark.spec import RunSpec, resolve
from embark.trainers.torch.scoring.cpu_model import ExportedModel

TRANSFORMS = ("auto", "standardize", "quantiles", "piecewise_linear", "log", "mlperf", "clip", "none")
EXTREMES = ("", "NA", "nan", "0", "-0", "1e38", "-1e38", "1e-45", "3e38", "16777217", "-3", " 7 ", "+5")
PIECE = 500  # Not every matrix library sums in the same order in batches of all sizes.


def cells_of(num_rows: int, seed: int) -> list[list[str]]:
    """Draw a label, a number for each transform, and a word."""
    rng = np.random.default_rng(seed)
    values = (rng.lognormal(1, 2, (num_rows, len(TRANSFORMS))) * rng.choice([1, 1, 1, -1], (num_rows, 1)))
    rows = [[f"{value}" for value in row] for row in values.astype(np.float32)]
    for row, column, extreme in zip(rng.integers(num_rows, size=num_rows), rng.integers(len(TRANSFORMS), size=num_rows),
                                    rng.integers(len(EXTREMES), size=num_rows), strict=True):
        is_raw = TRANSFORMS[column] == "none" and "e38" in EXTREMES[extreme]  # whose score would not be finite
        rows[row][column] = "1e6" if is_raw else EXTREMES[extreme]
    return [[str(rng.integers(2)), *row, str(rng.choice(["a", "b", ""]))] for row in rows]


def write(path: Path, rows: list[list[str]]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["label", *TRANSFORMS, "word"], *rows])
    return path


def spec_of(folder: Path, *inputs: Path) -> RunSpec:
    return resolve({
        "name": "numbers", "model": {"embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [8]},
        "data": {"kind": "prepared", "path": str(folder / "prepared"), "dense_columns": list(TRANSFORMS), "prepare": {
            "input": [str(path) for path in inputs], "split": "file", "validation_files": ["later*"],
            "sparse_columns": ["word"]}},
        "features": {"missing_flags": True, "columns": {name: {"transform": name} for name in TRANSFORMS} |
                     {"clip": {"transform": "clip", "min": -2.5, "max": 9}}},
        "train": {"batch_size": 1}, "place": {"device": "cpu"}, "store": {"root": str(folder)},
        "stream": {"source": "files", "path": str(folder)}, "watch": {"tensorboard": False}})


def number_of(cell: str) -> float | None:
    return None if cell in ("", "NA", "nan") else float(np.float32(cell))


def tensors_of(rows: list[list[str]]) -> list[grpc_client.InferInput]:
    found = []
    for at, name in enumerate(TRANSFORMS, 1):
        found.append(grpc_client.InferInput(name, [len(rows)], "FP32"))
        numbers = [number_of(row[at]) for row in rows]
        found[-1].set_data_from_numpy(np.array([np.nan if one is None else one for one in numbers], np.float32))
    found.append(grpc_client.InferInput("word", [len(rows)], "BYTES"))
    found[-1].set_data_from_numpy(np.array([row[-1].encode() for row in rows], np.object_))
    return found


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return np.array_equal(np.asarray(one, np.float32).view(np.uint32), np.asarray(other, np.float32).view(np.uint32))


@pytest.mark.parametrize("num_rows", [1_000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_every_door_gives_the_scores_of_training_by_every_transform(tmp_path, num_rows):
    rows = cells_of(num_rows, 2)
    pieces = [rows[start : start + PIECE] for start in range(0, num_rows, PIECE)]
    files = [write(tmp_path / f"later{number:04d}.csv", piece) for number, piece in enumerate(pieces)]
    spec = spec_of(tmp_path, write(tmp_path / "train.csv", cells_of(2_000, 1)), *files)
    prepare_from_spec(spec, tmp_path / "prepared")
    artifact = open_artifact(export_run(save_run(spec).uri, str(tmp_path / "models")).uri)
    trained, model = validation_rows(spec.data.path), ExportedModel(artifact)
    assert trained.dense.shape == (num_rows, 2 * len(TRANSFORMS) + 15)
    expected = np.concatenate([model.score_encoded(trained.cut(start, start + PIECE))
                               for start in range(0, num_rows, PIECE)])
    assert len(np.unique(expected)) > num_rows / 2

    stream = StreamSource(resolve_from_data(spec))
    assert same_bits(np.concatenate([stream.rows_of_files(str(file))[0].dense for file in files]), trained.dense)
    for number, file in enumerate(files):
        score_file(artifact.uri, str(file), tmp_path / f"{number}.parquet")
    assert same_bits(np.concatenate([pyarrow.parquet.read_table(tmp_path / f"{number}.parquet")["score"].to_numpy()
                                     for number in range(len(files))]), expected)

    def use(client):
        typed = [[dict(zip(TRANSFORMS, map(number_of, row[1:-1]), strict=True)) | {"word": row[-1]} for row in piece]
                 for piece in pieces]
        text = [[dict(zip((*TRANSFORMS, "word"), row[1:], strict=True)) for row in piece] for piece in pieces]
        by_http = [[score for piece in kind for score in client("POST", "/score", {"rows": piece})[1]["scores"]]
                   for kind in (typed, text)]
        with grpc_client.InferenceServerClient(client.grpc) as library:
            by_grpc = [library.infer("numbers", tensors_of(piece)).as_numpy("score") for piece in pieces]
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
    assert [one["column"] for one in states[0]] == list(TRANSFORMS)
