"""Raw rows of every kind, data prepared of them, and runs whose weights are drawn instead of trained."""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from embark.data import resolve_from_data
from embark.data.prepare.prepare import prepare_from_spec
from embark.data.prepared import Rows
from embark.data.prepared.cache import read_manifest
from embark.data.prepared.parts import iter_blocks
from embark.spec import RunSpec, resolve, to_toml
from embark.spec.run import DATA, KEY
from embark.store import ChecksumWriter, RunDir, checkpoint_name
from embark.store.checkpoint_arrays import INDEX, Index, merge_entries, table_weight, unsharded, write_pieces
from embark.trainers.torch.networks import dense_network

COLUMNS = ("word", "tags", "number", "price", "seen at", "bought at", "clicked")
WORDS = ["a", "B", " a ", "", "NA", "\\N", "nan", "Ωμέγα", "e\u0301", "é", "İ", "日本", "🙂‍↕️", "\u200b", "\u202eabc",
         "a\tb", 'say "hi"', "two\nlines", "x" * 70, "0", "01", "1.0", "-3", "ǅ", "\u00a0a", "�"]
TIMES = ["2024-05-31T18:00:00", "2024-02-29T23:59:59.123456789", "1969-12-31T23:59:59", "", "NA", "2024-05-31 00:00"]


def draw_rows(num_rows: int, seed: int, new_words: Sequence[str] = ()) -> list[list[str]]:
    """Cells of `COLUMNS`; all of them can be read."""
    draw = random.Random(seed)
    words = [*WORDS, *new_words, *(f"w{i}" for i in range(40))]
    return [[
        draw.choice(words), "|".join(draw.choices(words[:12], k=draw.randrange(6))).replace("\n", " "),
        draw.choice(["", "7", "-1", "+5", str(draw.randrange(99)), "922337203685477580", " 12 "]),
        draw.choice(["", "0", "-2.5", "1e3", " 4 ", "nan", str(draw.uniform(-9, 9))]),
        draw.choice(TIMES), draw.choice(TIMES), str(draw.randrange(2)),
    ] for _ in range(num_rows)]


def write_csv(path: Path, rows: Iterable[Sequence[str]], columns: Sequence[str] = COLUMNS) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
    return path


def prepared_spec(folder: Path, train: Path, held_out: Path, **changes: Any) -> RunSpec:
    """Prepared by file: the rows of `held_out` are the validation split, in their order."""
    raw: dict[str, Any] = {
        "name": "clicks", "model": {"embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [8]},
        "data": {
            "kind": "prepared", "path": str(folder / "prepared"), "label": "clicked", "dense_columns": ["price"],
            "time_column": "bought at",
            "prepare": {
                "input": [str(train), str(held_out)], "split": "file", "validation_files": [held_out.name],
                "sparse_columns": ["word", "number"], "list_columns": ["tags"], "list_delimiter": "|", "max_ids": 4,
                "time_columns": {"seen at": ["hour", "weekday", "age"]}, **changes.pop("prepare", {})}},
        "train": {"batch_size": 64, "precision": "fp32", "num_steps": 4, "learning_rate": 0.3},
        "place": {"device": "cpu"}, "store": {"root": str(folder)}, "watch": {"every": 4, "tensorboard": False},
        **changes,
    }
    spec = resolve(raw)
    prepare_from_spec(spec, folder / "prepared")
    return spec


def validation_rows(prepared: str) -> Rows:
    """Of prepared data: all of the split, which may have several blocks."""
    manifest = read_manifest(prepared)
    blocks = list(iter_blocks(Path(prepared), manifest, "validation"))
    positions = range(len(manifest.layout.features))
    return Rows(
        np.concatenate([block.label for block in blocks]), np.concatenate([block.dense for block in blocks]),
        tuple(np.concatenate([block.ids(i) for block in blocks]) for i in positions),
        tuple(None if blocks[0].lengths(i) is None else np.concatenate([block.lengths(i) for block in blocks])
              for i in positions))


def draw_weights(spec: RunSpec, seed: int = 0) -> dict[str, Any]:
    """By the names of a checkpoint."""
    rng = np.random.default_rng(seed)
    weights = {f"model.dense.{name}": rng.normal(size=tuple(value.shape)).astype(value.numpy().dtype)
               for name, value in dense_network(spec.model).state_dict().items()}
    return weights | {table_weight(table.name): rng.normal(size=(table.rows, table.dim)).astype(np.float32)
                      for table in spec.model.table_list()}


def save_run(spec: RunSpec, seed: int = 0, step: int = 3, weights: dict[str, Any] | None = None) -> RunDir:
    """A checkpoint with drawn weights, or with these, as if the run had been trained."""
    fingerprint = ""
    if spec.data.kind == "prepared":
        fingerprint, spec = read_manifest(spec.data.path).fingerprint(), resolve_from_data(spec)
    weights = weights or draw_weights(spec, seed)
    run_dir = RunDir(f"{spec.store.root}/{spec.name}")
    store, folder = ChecksumWriter(run_dir.checkpoints.store), checkpoint_name(step)
    parts = [write_pieces(store, folder, 0, [unsharded(name, values) for name, values in weights.items()])]
    store.write(f"{folder}/{INDEX}", Index(merge_entries(parts)).to_json())
    store.write(f"{folder}/spec.toml", to_toml(spec).encode())
    marks = {path.removeprefix(f"{folder}/"): mark for path, mark in store.marks.items()}
    run_dir.checkpoints.commit(step, marks, {KEY: {DATA: fingerprint}, "eval": {"auc": 0.75, "log_loss": float("nan")}})
    return run_dir


class EditedRun:
    """A run whose weights are edited instead of trained: each checkpoint changes some rows."""

    def __init__(self, folder: Path, seed: int = 0, rows: int = 400, **sections: Any) -> None:
        self.spec = resolve({"name": "edited", "store": {"root": str(folder / "runs"), "keep_checkpoints": 99},
                             "data": {"num_train_samples": 4_096, "num_eval_samples": 2_000}, **sections,
                             "model": {"num_dense": 2, "bottom_mlp": [8], "top_mlp": [8], "tables": [
                                 {"name": "a", "rows": rows}, {"name": "b", "rows": 3}], "embedding_dim": 4}})
        self.rng, self.step = np.random.default_rng(seed), 0
        self.weights = draw_weights(self.spec, seed)

    def save(self, num_rows: int = 20, scale: float = 1.0) -> str:
        """The next checkpoint, in which weights have moved by about `scale`; returns the run."""
        for name, values in self.weights.items():
            values = values.copy()
            if name.startswith("model.dense."):
                values += scale * self.rng.normal(size=values.shape).astype(np.float32) / 10
            else:
                rows = self.rng.integers(len(values), size=self.rng.integers(num_rows + 1))
                values[rows] = scale * self.rng.normal(size=(len(rows), values.shape[1]))
                values[self.rng.integers(len(values))] *= -0.0  # equal as numbers to another zero, not in its bits
            self.weights[name] = values
        self.step += 1
        return save_run(self.spec, step=self.step, weights=self.weights).uri
