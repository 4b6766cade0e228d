"""The loader: every rank its share, in order, and no thread left behind."""

from __future__ import annotations

import threading
import time
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embark.data.loader import Batch, Loader, eval_batches
from embark.data.synthetic import SyntheticSource
from embark.errors import DataError, UserError
from embark.spec import DataSpec, ModelSpec, Table


class Numbers:
    """Samples that are their own position: label = position, dense = epoch, one id and a ragged feature."""

    notes: ClassVar[tuple[str, ...]] = ()

    def __init__(self, num_train: int, num_eval: int = 0, *, delay_s: float = 0.0, fails_at: int = -1) -> None:
        self.num_train_samples = num_train
        self.num_eval_samples = num_eval
        self.delay_s = delay_s
        self.fails_at = fails_at

    def train_rows(self, epoch: int, start: int, stop: int) -> Batch:
        time.sleep(self.delay_s)
        if start <= self.fails_at < stop:
            raise DataError("the disk is on fire")
        return self.rows(epoch, start, stop)

    def eval_rows(self, start: int, stop: int) -> Batch:
        return self.rows(-1, start, stop)

    def rows(self, epoch: int, start: int, stop: int) -> Batch:
        position = np.arange(start, stop, dtype=np.int32)
        lengths = np.stack([np.ones_like(position), position % 3])
        return Batch(
            dense=np.full((len(position), 1), epoch, np.float32),
            ids=np.concatenate([position, np.repeat(position, position % 3)]),
            lengths=lengths,
            label=position.astype(np.float32),
            is_fixed=False,
        )


def loader_threads() -> int:
    return sum(thread.name == "embark-loader" for thread in threading.enumerate())


@settings(max_examples=30)
@given(
    world_size=st.sampled_from([1, 2, 4]), per_rank=st.integers(1, 5), num_train=st.integers(20, 90),
    start=st.integers(0, 12), count=st.integers(0, 12),
)
def test_ranks_together_take_each_steps_samples_in_order(
    world_size: int, per_rank: int, num_train: int, start: int, count: int
):
    batch_size = world_size * per_rank
    source = Numbers(num_train)
    seen = []
    for rank in range(world_size):
        with Loader(source, batch_size=batch_size, rank=rank, world_size=world_size,
                    start_step=start, stop_step=start + count) as loader:
            assert len(loader) == count
            seen.append([(batch.dense[0, 0], batch.label) for batch in loader])
    steps = num_train // batch_size
    for offset in range(count):
        epoch, step = divmod(start + offset, steps)
        assert {rank_batches[offset][0] for rank_batches in seen} == {epoch}
        together = np.concatenate([rank_batches[offset][1] for rank_batches in seen])
        assert together.tolist() == list(range(step * batch_size, (step + 1) * batch_size))


def test_a_resumed_loader_continues_where_the_first_one_stopped():
    source = SyntheticSource(ModelSpec(num_tables=3), DataSpec(num_train_samples=1_000))

    def labels(start: int, stop: int) -> list[bytes]:
        with Loader(source, batch_size=100, rank=1, world_size=2, start_step=start, stop_step=stop) as loader:
            return [batch.ids.tobytes() + batch.label.tobytes() for batch in loader]

    assert labels(0, 7) + labels(7, 15) == labels(0, 15)


def test_an_error_in_the_thread_is_raised_after_the_batches_before_it():
    with Loader(Numbers(100, fails_at=35), batch_size=10, rank=0, world_size=1, start_step=0, stop_step=10) as loader:
        batches = iter(loader)
        assert [next(batches).label[0] for _ in range(3)] == [0, 10, 20]
        with pytest.raises(DataError, match="on fire"):
            next(batches)


@pytest.mark.parametrize("num_threads", [2, 5])
def test_many_threads_keep_the_order_and_an_error_its_place(num_threads: int):
    class Uneven(Numbers):
        def train_rows(self, epoch: int, start: int, stop: int) -> Batch:
            time.sleep(0.004 if start % 40 == 0 else 0)
            return super().train_rows(epoch, start, stop)

    with Loader(Uneven(1_000, fails_at=405), batch_size=10, rank=0, world_size=1, start_step=0, stop_step=80,
                num_threads=num_threads) as loader:
        batches = iter(loader)
        assert [next(batches).label[0] for _ in range(40)] == list(range(0, 400, 10))
        with pytest.raises(DataError, match="on fire"):
            next(batches)
    assert loader_threads() == 0


def test_close_stops_a_thread_that_waits_on_a_full_queue():
    loader = Loader(Numbers(1_000), batch_size=10, rank=0, world_size=1, start_step=0, stop_step=100, depth=1)
    next(iter(loader))
    time.sleep(0.05)
    loader.close()
    assert loader_threads() == 0


def test_leaving_the_with_block_early_leaves_no_thread():
    with Loader(Numbers(1_000), batch_size=10, rank=0, world_size=1, start_step=0, stop_step=100) as loader:
        for _ in loader:
            break
    assert loader_threads() == 0


def test_batches_are_made_ahead_but_no_further_than_the_depth():
    made = []

    class Counted(Numbers):
        def rows(self, epoch: int, start: int, stop: int) -> Batch:
            made.append(start)
            return super().rows(epoch, start, stop)

    with Loader(Counted(1_000), batch_size=10, rank=0, world_size=1, start_step=0, stop_step=100, depth=3,
                num_threads=1) as loader:
        next(iter(loader))
        time.sleep(0.1)
        # one taken, three ready, one in the thread's hand
        assert len(made) == 5


def test_a_second_pass_raises_rather_than_be_empty():
    loader = Loader(Numbers(100), batch_size=10, rank=0, world_size=1, start_step=0, stop_step=2)
    assert len(list(loader)) == 2
    with pytest.raises(RuntimeError, match="once"):
        iter(loader)


def test_a_closed_loader_raises_rather_than_end():
    loader = Loader(Numbers(100), batch_size=10, rank=0, world_size=1, start_step=0, stop_step=5)
    batches = iter(loader)
    next(batches)
    loader.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(batches)


def test_a_batch_that_ranks_cannot_share_equally_is_refused():
    with pytest.raises(UserError, match="use 9 or 12"):
        Loader(Numbers(100), batch_size=10, rank=0, world_size=3, start_step=0, stop_step=1)


@settings(max_examples=60)
@given(num_eval=st.integers(0, 70), world_size=st.sampled_from([1, 2, 4]), per_rank=st.integers(1, 6))
def test_every_held_out_sample_counts_once_over_all_ranks(num_eval: int, world_size: int, per_rank: int):
    source = Numbers(100, num_eval)
    ranks = [
        list(eval_batches(source, batch_size=world_size * per_rank, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    counted = []
    for batch in (batch for batches in ranks for batch in batches):
        assert len(batch.label) == len(batch.dense) == batch.lengths.shape[1] == per_rank
        assert len(batch.ids) == batch.lengths.sum()
        ids = np.split(batch.ids, np.cumsum(batch.lengths.reshape(-1))[:-1])
        for feature in range(2):
            for i, label in enumerate(batch.label):
                assert (ids[feature * per_rank + i] == label).all()
        counted += batch.label[: batch.num_samples].tolist()
    assert sorted(counted) == list(range(num_eval))


def test_a_filled_up_batch_keeps_probabilities():
    model = ModelSpec(num_dense=0, tables=(Table(name="t", rows=9, multi_hot=2),))
    source = SyntheticSource(model, DataSpec(num_eval_samples=5))
    first, last = eval_batches(source, batch_size=4, rank=0, world_size=1)
    assert first.num_samples == 4
    assert (last.num_samples, last.dense.shape, len(last.ids)) == (1, (4, 0), 8)
    assert last.best_probability is not None
    assert len(set(last.best_probability.tolist())) == 1
