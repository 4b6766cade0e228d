"""Scores of files: one for each row, in their order, whatever the format; the same ids as in the prepared data."""

from __future__ import annotations

import csv
import io
import json
import tomllib
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from exported_runs import COLUMNS, draw_rows, prepared_spec, save_run, write_csv
from hypothesis import given, settings
from hypothesis import strategies as st

from embark import export_run, score_file
from embark.__main__ import run as embark
from embark.data.prepared.cache import read_manifest
from embark.data.prepared.parts import iter_blocks
from embark.errors import DataError, UserError
from embark.export.artifact import INFO, open_artifact
from embark.features.arrow.row_parser import Location, RowParser, json_column
from embark.spec import resolve

LATER = [*draw_rows(10_000, 7, new_words=["never seen", "Ωμέγα ", "\U0001f9ff"])]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The URI of an artifact, the held-out rows as a file, and the data that was prepared of them."""
    folder = tmp_path_factory.mktemp("scored")
    train, later = write_csv(folder / "train.csv", draw_rows(1_000, 3)), write_csv(folder / "later.csv", LATER)
    spec = prepared_spec(folder, train, later)
    return export_run(save_run(spec).uri, str(folder / "models")).uri, later, spec.data.path


def parsed(artifact, rows: list[dict[str, object]]):
    """Encoded as a request's rows are."""
    count = np.arange(len(rows))
    parser = RowParser(artifact.info.rows.columns, artifact.info.rows.prepare)
    cells = partial(json_column, rows, parser=parser)
    return artifact.encoder.encode(parser.parse(cells, Location(count, count, len(rows)), "rows"))


def scores_of(path) -> list[float | None]:
    return pq.read_table(path).column("score").to_pylist()


def test_raw_rows_become_bit_for_bit_what_preparing_them_gave(exported):
    uri, _, prepared = exported
    found = parsed(open_artifact(uri), [dict(zip(COLUMNS, row, strict=True)) for row in LATER])
    (block,) = iter_blocks(Path(prepared), read_manifest(prepared), "validation")
    assert block.dense.tobytes() == found.dense.tobytes()
    assert len(found) == len(LATER) == len(block.label)
    for position in range(len(found.ids)):
        assert np.array_equal(block.ids(position).reshape(-1), found.ids[position])
        lengths = block.lengths(position)
        assert np.array_equal(lengths, found.lengths[position]) if lengths is not None else \
            found.lengths[position] is None


CELLS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=9)


@settings(max_examples=40)
@given(rows=st.lists(st.tuples(CELLS, st.lists(CELLS, max_size=6)), min_size=1, max_size=6))
def test_a_list_and_its_text_give_the_same_ids(exported, rows):
    """Of any text, as JSON has it and as CSV has it."""
    artifact = open_artifact(exported[0])
    same = {"number": "3", "price": "1.5", "seen at": "", "bought at": ""}
    rows = [(word, [tag for tag in tags if "|" not in tag]) for word, tags in rows]
    as_lists = parsed(artifact, [{**same, "word": word, "tags": tags} for word, tags in rows])
    text = io.StringIO()
    csv.writer(text, quoting=csv.QUOTE_ALL).writerows([word, "|".join(tags)] for word, tags in rows)
    read = list(csv.reader(io.StringIO(text.getvalue(), newline="")))
    as_text = parsed(artifact, [{**same, "word": word, "tags": tags} for word, tags in read])
    mixed = parsed(artifact, [{**same, "word": word, "tags": tags if i % 2 else text[1]}
                              for i, ((word, tags), text) in enumerate(zip(rows, read, strict=True))])
    for ours, theirs, of_both in zip(as_lists.ids, as_text.ids, mixed.ids, strict=True):
        assert np.array_equal(ours, theirs)
        assert np.array_equal(ours, of_both)


def test_scores_are_not_written_under_the_name_of_another_format(exported, tmp_path):
    uri, later, _ = exported
    with pytest.raises(UserError, match=r"scores\.csv: scores are written as Parquet") as error:
        score_file(uri, str(later), tmp_path / "scores.csv", force=True)
    assert error.value.fix == f"--to {tmp_path / 'scores.parquet'}"
    assert not (tmp_path / "scores.csv").exists()


def test_csv_json_lines_and_parquet_give_the_same_scores_in_order(exported, tmp_path):
    uri, later, _ = exported
    rows = [dict(zip(COLUMNS[:-1], row, strict=False)) for row in LATER]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    result = score_file(uri, str(later), tmp_path / "csv.parquet", keep=["word"])
    assert (result.num_rows, result.num_scored, result.reasons) == (len(LATER), len(LATER), {})
    assert pq.read_table(tmp_path / "csv.parquet").column("word").to_pylist() == [row[0] for row in LATER]
    expected = scores_of(tmp_path / "csv.parquet")
    assert len(set(expected)) > len(LATER) / 4
    assert result.mean_score == pytest.approx(sum(expected) / len(expected))
    for name in ("rows.jsonl", "rows.parquet"):
        score_file(uri, str(tmp_path / name), tmp_path / "out.parquet", force=True)
        assert scores_of(tmp_path / "out.parquet") == expected


def test_a_row_that_cannot_be_read_has_no_score_and_keeps_its_place(exported, tmp_path):
    uri, _, _ = exported
    good = LATER[0]
    rows = [good, ["w1", "", "1", "x", "", "", "0"], good, good[:3], good, ["w1", "", "2", "1", "June", "", "0"]]
    source = write_csv(tmp_path / "rows.csv", rows)
    result = score_file(uri, str(source), tmp_path / "out.parquet", keep=["word"])
    found = scores_of(tmp_path / "out.parquet")
    assert [score is None for score in found] == [False, True, False, True, False, True]
    assert len({score for score in found if score is not None}) == 1
    kept = pq.read_table(tmp_path / "out.parquet").column("word").to_pylist()
    assert kept == [good[0], "w1", good[0], None, good[0], "w1"]
    assert sum(result.reasons.values()) == result.num_rows - result.num_scored == 3
    assert any("line 3" in example and "'x' is not a number" in example for example in result.examples)


@pytest.mark.parametrize("broken", ["a;b;c;d;e;f;g;h;i", "one two three four", "x|y|z|x|y|z|x|y"])
def test_broken_rows_do_not_decide_the_delimiter_of_a_short_file(exported, tmp_path, broken):
    uri, _, _ = exported
    source = write_csv(tmp_path / "rows.csv", [LATER[0]])
    expected = scores_of(score_file(uri, str(source), tmp_path / "good.parquet").path)
    with source.open("a") as file:
        file.writelines(f"{broken}\n" for _ in range(9))
    score_file(uri, str(source), tmp_path / "out.parquet")
    assert scores_of(tmp_path / "out.parquet") == [*expected, *[None] * 9]


def test_plain_ids_beyond_a_table_are_refused_or_clipped(tmp_path):
    spec = resolve({"name": "ids", "store": {"root": str(tmp_path)},
                    "model": {"num_dense": 1, "embedding_dim": 4, "bottom_mlp": [4], "top_mlp": [4],
                              "tables": [{"name": "user", "rows": 5}, {"name": "seen", "rows": 9, "multi_hot": 2}]}})
    uri = export_run(save_run(spec).uri).uri
    cells = [["0.5", "4", "1|8"], ["0.5", "5", "1|8"], ["", "4", "1"], ["0.5", "", "1"], ["0.5", "4", "1|2|3"],
             ["0.5", "4", "-1"], ["0.5", "4", ""]]
    source = write_csv(tmp_path / "rows.csv", cells, ["dense_0", "user", "seen"])
    result = score_file(uri, str(source), tmp_path / "out.parquet")
    scored = [score is not None for score in scores_of(tmp_path / "out.parquet")]
    assert scored == [True, False, False, False, True, False, True]
    assert set(result.reasons) == {
        "column 'user': an id is not in 0 to 4", "column 'dense_0' is empty", "column 'user' is empty",
        "column 'seen': an id is not in 0 to 8"}
    assert result.num_lists_cut == 1
    source = write_csv(tmp_path / "newest.csv", [["0.5", "4", "2|3"]], ["dense_0", "user", "seen"])
    score_file(uri, str(source), tmp_path / "newest.parquet")
    assert scores_of(tmp_path / "newest.parquet")[0] == scores_of(tmp_path / "out.parquet")[4]
    artifact = open_artifact(uri)
    clipping = replace(artifact.encoder, plain_ids="clip")
    count = np.arange(2)
    raw = RowParser(artifact.info.rows.columns, artifact.info.rows.prepare).parse(
        partial(json_column, [{"dense_0": 1, "user": 7, "seen": [-3, 9]}, {"dense_0": 1, "user": 4, "seen": [0, 8]}]),
        Location(count, count, 2), "rows")
    found = clipping.encode(clipping.readable(raw))
    assert [ids.tolist() for ids in found.ids] == [[4, 4], [0, 8, 0, 8]]


OWN = """
import torch

class Net(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.layer = torch.nn.Linear(model.num_dense + sum(table.dim for table in model.table_list()), 1)
        self.register_buffer("steps", torch.tensor([3]))

    def forward(self, dense, pooled):
        return self.layer(torch.cat([dense, *pooled.values()], dim=1))
"""


def test_a_custom_model_runs_only_from_the_file_the_operator_names(tmp_path, monkeypatch, capsys):
    spec = resolve({"name": "own", "store": {"root": str(tmp_path)}, "model": {
        "kind": "mine:Net", "code": OWN, "num_dense": 1, "embedding_dim": 4, "num_tables": 2, "rows_per_table": 5}})
    run_dir = save_run(spec)
    assert embark(["export", run_dir.uri]) == 0
    uri = f"{run_dir.uri}/export"
    assert f"embark score {uri} ROWS.csv --to scores.parquet --model-file mine.py" in capsys.readouterr().out
    artifact, source = open_artifact(uri), write_csv(tmp_path / "rows.csv", [["0.5", "4", "1"]],
                                                       ["dense_0", "cat_0", "cat_1"])
    assert "torch.nn" not in (artifact.folder / INFO).read_text()
    assert artifact.weights["dense.own.steps"].dtype == np.int64
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "other.py").write_text(OWN + "print()")
    for file, message in (("", "an artifact holds no code"), (str(tmp_path / "no.py"), "cannot be read"),
                          (str(tmp_path / "other.py"), "is not the code that the model was trained with")):
        with pytest.raises(UserError, match=message) as error:
            score_file(uri, str(source), tmp_path / "out.parquet", model_file=file)
    trained_with = error.value.fix.removeprefix("put back that text: it is model.code in ")
    assert tomllib.loads(Path(trained_with).read_text())["model"]["code"] == OWN
    score_file(uri, str(source), tmp_path / "out.parquet", model_file=str(tmp_path / "mine.py"))
    weights = artifact.weights
    pooled = [weights[f"tables.embedding_bags.cat_{i}.weight"][row] for i, row in enumerate((4, 1))]
    logit = np.concatenate([[0.5], *pooled]) @ weights["dense.own.layer.weight"][0] + weights["dense.own.layer.bias"]
    assert scores_of(tmp_path / "out.parquet") == [pytest.approx(1 / (1 + np.exp(-logit[0])), abs=1e-6)]
    monkeypatch.setattr("embark.store.CheckpointStore.damages", lambda *_: [])
    text = (artifact.folder / INFO).read_text()
    (artifact.folder / INFO).write_text(text.replace('"code": ""', '"code": "import os"'))
    with pytest.raises(DataError, match="holds code, which is never run"):
        score_file(uri, str(source), tmp_path / "new.parquet", model_file=str(tmp_path / "mine.py"))


def test_criteo_rows_are_scored_with_and_without_their_label(tmp_path):
    """By another reader than prepared them, with the same ids and dense values."""
    rng = np.random.default_rng(0)
    lines = ["\t".join([str(i % 2), *("" if v > 900 else str(v) for v in rng.integers(-3, 999, 13)),
                        *("" if v % 9 == 0 else f"{v:08x}" for v in rng.integers(0, 60, 26))]) for i in range(300)]
    (tmp_path / "day_0").write_text("\n".join(lines[:200]) + "\n")
    (tmp_path / "day_1").write_text("\n".join(lines[200:]) + "\n")
    (tmp_path / "unlabelled").write_text("\n".join(line.partition("\t")[2] for line in lines[200:]) + "\n")
    changes = {"input": [str(tmp_path / "day_0"), str(tmp_path / "day_1")], "format": "criteo", "list_columns": [],
               "sparse_columns": [], "time_columns": {}, "validation_files": ["day_1"]}
    from embark.data.prepare.prepare import prepare_from_spec

    spec = resolve({"name": "ads", "model": {"embedding_dim": 4, "bottom_mlp": [4], "top_mlp": [4]}, "data": {
        "kind": "prepared", "path": str(tmp_path / "prepared"),
        "prepare": {key: value for key, value in changes.items() if value} | {"split": "file"}},
        "store": {"root": str(tmp_path)}})
    prepare_from_spec(spec, tmp_path / "prepared")
    uri = export_run(save_run(spec).uri).uri
    for name in ("day_1", "unlabelled"):
        score_file(uri, str(tmp_path / name), tmp_path / f"{name}.parquet")
    from embark.data.prepared import Rows
    from embark.trainers.torch.scoring.cpu_model import ExportedModel

    manifest = read_manifest(str(tmp_path / "prepared"))
    (block,) = iter_blocks(tmp_path / "prepared", manifest, "validation")
    num = len(manifest.layout.features)
    rows = Rows(block.label, block.dense, tuple(block.ids(i) for i in range(num)), (None,) * num)
    expected = ExportedModel(open_artifact(uri)).score_encoded(rows).tolist()
    assert scores_of(tmp_path / "day_1.parquet") == scores_of(tmp_path / "unlabelled.parquet") == expected


def test_the_command_shows_what_has_no_score_and_refuses_to_overwrite(exported, tmp_path, capsys):
    source = write_csv(tmp_path / "rows.csv", [LATER[0], ["w1", "", "1", "x", "", "", "0"]])
    words = ["score", exported[0], str(source), "--to", str(tmp_path / "out.parquet")]
    assert embark(words) == 0
    shown = capsys.readouterr()
    assert "1 score by version 1" in shown.out
    assert "1 row without a score" in shown.out + shown.err
    assert embark(words) == 64
    assert embark([*words, "--force", "--keep", "wrod"]) == 64
    assert "word" in capsys.readouterr().err
    with pytest.raises(UserError, match="has no version 5"):
        score_file(exported[0], str(source), tmp_path / "new.parquet", version=5)
    lacking = write_csv(tmp_path / "lacking.csv", [["a", "b"]], ["word", "tags"])
    assert embark(["score", exported[0], str(lacking), "--to", str(tmp_path / "new.parquet")]) == 64
    assert not (tmp_path / "new.parquet").exists()


def test_an_input_is_not_overwritten_even_with_force(exported, tmp_path):
    rows = tmp_path / "rows.parquet"
    pq.write_table(pa.table(dict(zip(COLUMNS, zip(*LATER[:9], strict=True), strict=True))), rows)
    (tmp_path / "link.parquet").symlink_to(rows)
    content = rows.read_bytes()
    for target in (rows, tmp_path / "link.parquet"):
        with pytest.raises(UserError, match="is one of the files to score"):
            score_file(exported[0], str(tmp_path / "r*.parquet"), target, force=True)
    assert rows.read_bytes() == content
