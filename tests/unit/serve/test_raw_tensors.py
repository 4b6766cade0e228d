"""Requests of raw numbers are read without a step for each column, and score as the same rows read by column do."""

from __future__ import annotations

import json

import numpy as np
import pytest
from exported_runs import save_run

from embark import export_run
from embark.export.artifact import open_artifact
from embark.features.rows import NumberRows
from embark.serve.infer_protocol import InferReader, read_infer
from embark.serve.raw_tensors import RawTensors
from embark.serve.request_rows import RequestScorer, Scores
from embark.spec import resolve
from embark.trainers.torch.scoring.cpu_model import ExportedModel
from embark.trainers.torch.scoring.gpu_model import GpuModel

ROWS = {"a": 70, "b": 9, "c": 30, "d": 5}
DENSE = ("dense_0", "dense_1", "dense_2")
NUM = 21


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("numbers")
    model = {"embedding_dim": 8, "bottom_mlp": [8], "top_mlp": [16, 8], "num_dense": 3,
             "tables": [{"name": name, "rows": rows} for name, rows in ROWS.items()]}
    spec = resolve({"name": "clicks", "model": model, "data": {"num_train_samples": 64}, "store": {"root": str(folder)},
                    "train": {"batch_size": 16}})
    run = save_run(spec).uri
    return {tables: open_artifact(export_run(run, str(folder / tables), tables=tables).uri)
            for tables in ("fp32", "int8")}


def draw(num_rows=NUM, shared=(), seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=1 if name in shared else num_rows).astype("<f4") if name in DENSE else
            rng.integers(ROWS[name], size=1 if name in shared else num_rows) for name in (*DENSE, *ROWS)}


def read(artifact, columns, reader=None, names=None):
    """A request with these columns, in the order of `names`."""
    kinds = {"f4": "FP32", "i8": "INT64", "i4": "INT32", "f8": "FP64"}
    chosen = [(name, columns[name]) for name in names or columns]
    header = json.dumps({"inputs": [
        {"name": name, "datatype": kinds[values.dtype.str[1:]], "shape": [len(values)],
         "parameters": {"binary_data_size": values.nbytes}} for name, values in chosen]}).encode()
    raw = memoryview(b"".join(values.tobytes() for _, values in chosen))
    schema, model = artifact.info.rows.columns, artifact.info.model
    return (reader or InferReader(schema)).read(
        header, len(header), raw, lambda: read_infer(json.loads(header), raw, schema, model)).columns


def scorers(artifact):
    """One that reads numbers at once, and one that reads column by column."""
    model = ExportedModel(artifact)
    return RequestScorer(artifact, model.score, score_numbers=model.score_numbers), RequestScorer(artifact, model.score)


def test_numbers_in_any_order_have_the_scores_of_single_columns(artifacts):
    artifact = artifacts["int8"]
    reader = InferReader(artifact.info.rows.columns)
    at_once, by_column = scorers(artifact)
    names = [*DENSE, *ROWS]
    requests = [read(artifact, draw(seed=seed), reader, order) for seed, order in enumerate(
        [names, names[::-1], ["b", "dense_2", "a", "dense_0", "d", "dense_1", "c"], names])]
    requests.append(read(artifact, {**draw(), "more": np.arange(NUM)}))  # a column that the model does not take
    assert all(isinstance(one, RawTensors) and one.numbers() is not None for one in requests)
    expected = [by_column.score([one])[0] for one in requests]
    assert len({one.scores for one in expected}) == 4
    assert [at_once.score([one])[0] for one in requests] == expected
    for one, alone in zip(at_once.score(requests), expected, strict=True):
        assert one.scores == pytest.approx(alone.scores, abs=1e-6)


@pytest.mark.parametrize("tables", ["fp32", "int8"])
def test_columns_of_one_user_are_computed_once_unless_bits_must_stay(artifacts, tables):
    artifact = artifacts[tables]
    at_once, by_column = scorers(artifact)
    user = {*DENSE, "a", "c"}
    shared = [read(artifact, draw(num, user, seed=num)) for num in (NUM, 3)]
    every = [read(artifact, {name: np.repeat(values, num) if name in user else values
                             for name, values in draw(num, user, seed=num).items()}) for num in (NUM, 3)]
    networks: list[int] = []
    if (candidates := at_once._score_number_rows.__self__._candidates) is not None:
        for bottom in (candidates._bottom, candidates._network.bottom):
            bottom.register_forward_pre_hook(lambda _, given: networks.append(len(given[0])))
    found = at_once.score([shared[0], every[0], shared[1]])
    assert networks == ([] if tables == "fp32" else [NUM, 1, 1])
    expected = [by_column.score([one])[0] for one in (every[0], every[0], every[1])]
    for one, alone in zip(found, expected, strict=True):  # the size of a batch decides how a CPU sums
        assert one.scores == pytest.approx(alone.scores, abs=1e-6)
    if tables == "fp32":
        assert at_once.score([shared[0]])[0].scores == expected[0].scores


@pytest.mark.parametrize(("name", "value", "why"), [
    ("b", 9, "an id is not in 0 to 8"), ("a", -1, "an id is not in 0 to 69"), ("dense_1", np.nan, "is empty"),
    ("dense_2", np.inf, "is not a number")])
def test_a_row_that_cannot_be_read_is_refused_as_by_column(artifacts, name, value, why):
    at_once, by_column = scorers(artifacts["int8"])
    columns = draw()
    columns[name][4] = value
    bad, good = read(artifacts["int8"], columns), read(artifacts["int8"], draw())
    found = at_once.score([bad, good])
    assert [found[0].errors[0][0], why in found[0].errors[0][1], len(found[0].errors)] == [4, True, 1]
    assert found[0].errors == by_column.score([bad])[0].errors
    assert found[1].scores == pytest.approx(by_column.score([good])[0].scores, abs=1e-6)


def test_other_types_are_read_by_column(artifacts):
    at_once, by_column = scorers(artifacts["int8"])
    columns = draw()
    other = read(artifacts["int8"], columns | {"a": columns["a"].astype("<i4"), "dense_0": columns["dense_0"].astype(
        "<f8")})
    assert other.numbers() is None
    found, = at_once.score([other])
    assert isinstance(found, Scores)
    assert found.scores == by_column.score([read(artifacts["int8"], columns)])[0].scores


def test_on_a_gpu_numbers_have_the_scores_of_their_rows(artifacts):
    """The same steps here, without kernels."""
    artifact = artifacts["int8"]
    model = GpuModel(artifact, precision="fp32", max_batch_rows=32, device="cpu")
    several = [read(artifact, draw(num, shared, seed=num)).numbers() for num, shared in
               ((7, ()), (11, {*DENSE, "a"}), (1, ()))]
    expected = model.score_encoded(NumberRows.join(several).to_rows())
    assert len(np.unique(expected)) > 15
    assert np.array_equal(model.score_numbers(several), expected)
    many = [*several, *several, *several]  # more than the largest graph takes
    # A row has another place in a batch of another size, and a CPU may sum it in another order there.
    assert np.abs(model.score_numbers(many) - np.tile(expected, 3)).max() <= 1e-6
