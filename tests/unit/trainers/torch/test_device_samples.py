"""Samples drawn by the kernel are, bit for bit, those that numpy draws."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mixed_tables import MIXED

from embark.data.loader import Batch, Share
from embark.data.synthetic import EVAL, TRAIN, SyntheticSource
from embark.features.hashing import hash_counters, uniform
from embark.spec import DataSpec, ModelSpec, Table
from embark.trainers.torch import device_samples
from embark.trainers.torch.device_samples import DeviceDrawnSource
from embark.trainers.torch.engines.cuda_graph.batch_layout import DrawnLayout, PackedLayout
from embark.trainers.torch.engines.pipeline import BatchRange

CPU = torch.device("cpu")
SPECS = {
    "quickstart": (ModelSpec(), DataSpec()),
    "mixed": (MIXED, DataSpec(num_train_samples=5_000, seed=9)),
    "ragged": (MIXED, DataSpec(num_train_samples=5_000, ragged=True, zipf_exponent=1.0)),
}


@cache
def source_of(name: str) -> SyntheticSource:
    return SyntheticSource(*SPECS[name])


def assert_same(found: Batch, wanted: Batch) -> None:
    assert found.is_fixed == wanted.is_fixed
    for name in ("dense", "ids", "lengths", "label", "best_probability"):
        one, other = getattr(found, name), getattr(wanted, name)
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.tobytes() == other.tobytes(), name


@st.composite
def sources(draw: st.DrawFn) -> SyntheticSource:
    rows = st.one_of(st.integers(1, 20), st.integers(21, 2**31 - 1))
    table = st.builds(dict, rows=rows, multi_hot=st.integers(1, 4), pooling=st.sampled_from(["sum", "mean"]))
    tables = draw(st.lists(table, min_size=1, max_size=11))
    model = ModelSpec(num_dense=draw(st.integers(0, 5)),
                      tables=tuple(Table(name=f"t{i}", **table) for i, table in enumerate(tables)))
    exponent = draw(st.one_of(st.sampled_from([0.0, 1.0, 1.2, 2.0, 4.0]), st.floats(0, 4)))
    return SyntheticSource(model, DataSpec(zipf_exponent=exponent, ragged=draw(st.booleans()), num_eval_samples=2**40,
                                           seed=draw(st.integers(0, 2**31)), signal=draw(st.floats(0, 3))))


@settings(max_examples=12)
@given(source=sources(), start=st.integers(0, 2**40 - 2_000), size=st.integers(1, 2_000))
def test_held_out_samples_of_any_spec_are_those_of_the_host(source: SyntheticSource, start: int, size: int):
    assert_same(DeviceDrawnSource(source, CPU).eval_rows(start, start + size), source.eval_rows(start, start + size))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("batch_size", "world_size"), [(64, 1), (600, 3), (4_096, 2)])
def test_every_ranks_batches_are_those_of_the_host(name, batch_size, world_size):
    """In blocks of several, over the end of an epoch."""
    source = source_of(name)
    for rank in {0, world_size - 1}:
        per_epoch = source.num_train_samples // batch_size
        part = BatchRange(batch_size, rank, world_size, start_step=max(0, per_epoch - 2), stop_step=per_epoch + 1)
        packed = PackedLayout(batch_size // world_size, source.num_dense, tuple(source.multi_hot))
        share = Share(source.num_train_samples, **{f: getattr(part, f) for f in part.__slots__})
        steps = iter(range(len(share)))
        layout = DrawnLayout(source, packed, CPU)
        slot = torch.zeros(layout.size_bytes, dtype=torch.uint8)
        with layout.feed(source, part, CPU) as fed:
            for block in fed:
                block.write(slot)
                block.correct(slot)
                for number in range(block.num_batches):
                    wanted = np.zeros(packed.size_bytes, np.uint8)
                    packed.pack(source.train_rows(*share.of(next(steps))), wanted)
                    for one, other in zip(layout.decode(slot, number), packed.decode(torch.from_numpy(wanted)),
                                          strict=True):
                        assert torch.equal(one, other)
        assert next(steps, None) is None


@pytest.mark.parametrize("name", ["mixed", "ragged"])
@pytest.mark.parametrize("tolerance", ["ID_TOLERANCE", "LABEL_TOLERANCE"])
def test_what_the_device_cannot_decide_the_host_draws(monkeypatch, name, tolerance):
    monkeypatch.setattr(device_samples, tolerance, 0.01)
    source = source_of(name)
    drawn = DeviceDrawnSource(source, CPU)
    counted = []
    rows = source.rows
    monkeypatch.setattr(source, "rows", lambda *span: counted.append(span) or rows(*span))
    found = drawn.eval_rows(100, 300)
    assert 0 < len(counted) <= 200
    assert {split for split, _, _ in counted} == {EVAL}
    monkeypatch.undo()
    assert_same(found, source.eval_rows(100, 300))


def test_a_wrong_value_of_an_uncertain_sample_never_reaches_a_batch(monkeypatch):
    """As if the device's power function were off by one row wherever it is close."""
    source = source_of("mixed")
    layout = DrawnLayout(source, PackedLayout(500, 3, tuple(source.multi_hot)), CPU)
    draw = layout.sampler.draw

    def spoilt(split, spans, to):
        is_uncertain, logits = draw(split, spans, to)
        is_uncertain[:, ::7] = True
        to.label[is_uncertain] = 9
        to.dense[is_uncertain] = 9
        to.ids[:, [0, 7]] = 9  # of samples 0 and 7 in the first table
        return is_uncertain, logits

    monkeypatch.setattr(layout.sampler, "draw", spoilt)
    slot = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    with layout.feed(source, BatchRange(500, 0, 1, 0, 1), CPU) as fed:
        block = next(fed)
        block.write(slot)
        block.correct(slot)
    dense, ids, label = layout.decode(slot)
    wanted = source.rows(TRAIN, 0, 500)
    assert dense.numpy().tobytes() == wanted.dense.tobytes()
    assert ids.numpy().tobytes() == wanted.ids.tobytes()
    assert label.numpy().tobytes() == wanted.label.tobytes()


def test_the_tolerances_hold_what_numpy_and_the_kernel_differ_by():
    logits = np.linspace(-30, 30, 400_001, dtype=np.float32)
    exact = 1 / (1 + np.exp(-logits.astype(np.longdouble)))
    error = np.abs(source_of("mixed").teacher.probability_of(logits) - exact) / exact
    assert error.max() < device_samples.LABEL_TOLERANCE / 1.5
    u = uniform(hash_counters(3, np.arange(100_000)))
    for exponent in (1 / -0.2, 1 / 0.3, 1e6, -1e6, 1.0):
        base = u if abs(exponent) < 10 else 1 + u * 1e-6
        exact = np.power(base.astype(np.longdouble), np.longdouble(exponent))
        for found in (np.power(base, exponent), np.exp(np.log(base) * exponent)):
            assert (np.abs(found - exact) / exact).max() < device_samples.ID_TOLERANCE / 2
