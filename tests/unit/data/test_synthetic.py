"""Synthetic samples: the same whoever asks, in range, and worth learning from."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mixed_tables import MIXED

from embark.data.loader import Batch
from embark.data.synthetic import SyntheticSource
from embark.spec import DataSpec, ModelSpec, Table


def by_sample(batch: Batch) -> list[tuple[bytes, ...]]:
    """What each sample consists of, comparable."""
    ids = np.split(batch.ids, np.cumsum(batch.lengths.reshape(-1))[:-1])
    num_features, num_samples = batch.lengths.shape
    probability = np.zeros(num_samples, np.float32) if batch.best_probability is None else batch.best_probability
    return [
        (
            batch.dense[i].tobytes(),
            *(ids[f * num_samples + i].tobytes() for f in range(num_features)),
            batch.label[i].tobytes(),
            probability[i].tobytes(),
        )
        for i in range(num_samples)
    ]


def auc(label: np.ndarray, score: np.ndarray) -> float:
    """Chance that a 1 scores above a 0, ties counting half."""
    _, ranks, counts = np.unique(score, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(counts) - (counts - 1) / 2
    positives = label.sum()
    wins = mean_rank[ranks][label == 1].sum() - positives * (positives + 1) / 2
    return float(wins / (positives * (len(label) - positives)))


@pytest.fixture(scope="module", params=[False, True], ids=["fixed", "ragged"])
def mixed(request: pytest.FixtureRequest) -> SyntheticSource:
    return SyntheticSource(MIXED, DataSpec(num_train_samples=50_000, num_eval_samples=20_000, ragged=request.param))


@settings(max_examples=25)
@given(cuts=st.lists(st.integers(0, 300), max_size=6), start=st.integers(0, 49_000))
def test_slices_put_together_are_one_batch_bit_for_bit(mixed: SyntheticSource, cuts: list[int], start: int):
    edges = [start, *(start + cut for cut in sorted(cuts)), start + 300]
    pieces = [
        sample
        for low, high in itertools.pairwise(edges)
        for sample in by_sample(mixed.train_rows(0, low, high))
    ]
    assert pieces == by_sample(mixed.train_rows(0, start, start + 300))


def test_one_sample_alone_is_the_sample_it_is_in_a_large_batch(mixed: SyntheticSource):
    complete = by_sample(mixed.train_rows(0, 0, 10_000))
    for position in (0, 1, 1_023, 8_738, 9_999):
        assert by_sample(mixed.train_rows(0, position, position + 1)) == [complete[position]]


def test_samples_are_a_function_of_spec_and_seed():
    data = DataSpec(num_train_samples=1_000, num_eval_samples=1_000)
    one, two = SyntheticSource(MIXED, data), SyntheticSource(MIXED, data)
    other = SyntheticSource(MIXED, data.model_copy(update={"seed": 2}))
    samples = by_sample(one.train_rows(0, 0, 500))
    assert samples == by_sample(two.train_rows(3, 0, 500))
    assert not set(samples) & set(by_sample(other.train_rows(0, 0, 500)))


def test_samples_differ_from_each_other_and_from_the_held_out_ones(mixed: SyntheticSource):
    train, held_out = by_sample(mixed.train_rows(0, 0, 5_000)), by_sample(mixed.eval_rows(0, 5_000))
    assert len(set(train) | set(held_out)) == 10_000


@settings(max_examples=40)
@given(
    rows=st.one_of(st.integers(1, 20), st.integers(21, 2**31 - 1)),
    exponent=st.one_of(st.sampled_from([0.0, 1.0, 2.0, 4.0]), st.floats(0, 4)),
    multi_hot=st.integers(1, 4),
    is_ragged=st.booleans(),
)
def test_every_id_is_a_row_of_its_table(rows: int, exponent: float, multi_hot: int, is_ragged: bool):
    model = ModelSpec(num_dense=0, tables=(Table(name="t", rows=rows, multi_hot=multi_hot),))
    batch = SyntheticSource(model, DataSpec(zipf_exponent=exponent, ragged=is_ragged)).train_rows(0, 0, 2_000)
    assert batch.ids.dtype == np.int32
    assert batch.ids.min() >= 0
    assert batch.ids.max() < rows


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 1.2, 2.0])
def test_ids_are_as_unequal_as_the_exponent_says(exponent: float):
    model = ModelSpec(num_dense=0, tables=(Table(name="t", rows=100),))
    data = DataSpec(num_train_samples=200_000, zipf_exponent=exponent)
    counts = np.bincount(SyntheticSource(model, data).train_rows(0, 0, 200_000).ids, minlength=100)
    slope = np.polyfit(np.log(np.arange(2, 41)), np.log(counts[1:40]), 1)[0]
    assert slope == pytest.approx(-exponent, abs=0.05)


def test_large_tables_are_reached_to_their_ends():
    model = ModelSpec(num_dense=0, tables=(Table(name="t", rows=40_000_000),))
    ids = SyntheticSource(model, DataSpec()).train_rows(0, 0, 200_000).ids
    tail = ids[ids > 20_000_000]
    assert len(tail) > 500
    assert len(np.unique(tail)) > 0.99 * len(tail)


def test_fixed_samples_have_exactly_the_tables_number_of_ids():
    batch = SyntheticSource(MIXED, DataSpec()).train_rows(0, 0, 100)
    assert batch.is_fixed
    assert (batch.lengths == np.array([[1], [9], [2], [2], [1]])).all()
    assert len(batch.ids) == batch.lengths.sum()


def test_ragged_samples_have_from_none_to_the_tables_number_of_ids():
    batch = SyntheticSource(MIXED, DataSpec(ragged=True)).train_rows(0, 0, 2_000)
    assert not batch.is_fixed
    assert len(batch.ids) == batch.lengths.sum()
    for lengths, most in zip(batch.lengths, (1, 9, 2, 2, 1), strict=True):
        assert set(lengths) == set(range(most + 1))


def test_dense_features_are_centred_and_of_unit_spread():
    dense = SyntheticSource(MIXED, DataSpec()).train_rows(0, 0, 50_000).dense
    assert dense.shape == (50_000, 3)
    assert np.abs(dense.mean(axis=0)).max() < 0.02
    assert np.abs(dense.std(axis=0) - 1).max() < 0.02
    assert np.abs(np.corrcoef(dense.T) - np.eye(3)).max() < 0.02


SHAPES = {
    "quickstart": ModelSpec(),
    "no dense features": ModelSpec(num_dense=0, num_tables=4),
    "one table": ModelSpec(num_tables=1, num_dense=2, rows_per_table=50),
    "two hundred tables": ModelSpec(num_tables=200, rows_per_table=1_000),
    "multi-hot": MIXED,
}


@pytest.mark.parametrize("model", SHAPES.values(), ids=SHAPES.keys())
def test_the_best_auc_is_about_0_80_and_a_quarter_of_the_labels_are_1(model: ModelSpec):
    batch = SyntheticSource(model, DataSpec()).eval_rows(0, 30_000)
    assert batch.best_probability is not None
    assert auc(batch.label, batch.best_probability) == pytest.approx(0.80, abs=0.02)
    assert batch.label.mean() == pytest.approx(0.25, abs=0.02)


def test_the_reported_probability_is_the_one_labels_are_drawn_with():
    batch = SyntheticSource(ModelSpec(), DataSpec()).eval_rows(0, 60_000)
    assert batch.best_probability is not None
    tenths = np.array_split(np.argsort(batch.best_probability), 10)
    for tenth in tenths:
        assert batch.label[tenth].mean() == pytest.approx(batch.best_probability[tenth].mean(), abs=0.025)


def test_without_signal_labels_are_coin_flips():
    batch = SyntheticSource(ModelSpec(), DataSpec(signal=0.0)).eval_rows(0, 30_000)
    assert batch.best_probability is not None
    assert np.ptp(batch.best_probability) == 0
    assert max(abs(auc(batch.label, column) - 0.5) for column in batch.dense.T) < 0.02


def test_more_signal_is_easier():
    def best(signal: float) -> float:
        batch = SyntheticSource(ModelSpec(), DataSpec(signal=signal)).eval_rows(0, 20_000)
        assert batch.best_probability is not None
        return auc(batch.label, batch.best_probability)

    assert 0.5 < best(0.3) < 0.75 < best(1.0) < 0.88 < best(3.0)


def test_a_table_of_one_row_and_nothing_else_is_a_coin_not_an_error():
    model = ModelSpec(num_dense=0, tables=(Table(name="t", rows=1),))
    batch = SyntheticSource(model, DataSpec()).eval_rows(0, 10_000)
    assert batch.dense.shape == (10_000, 0)
    assert batch.label.mean() == pytest.approx(0.25, abs=0.02)


def test_samples_beyond_the_epoch_are_refused():
    source = SyntheticSource(MIXED, DataSpec(num_train_samples=100))
    with pytest.raises(IndexError, match="of 100"):
        source.train_rows(0, 50, 101)
