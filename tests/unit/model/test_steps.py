"""How many batches there are; a batch is shared equally by the ranks, or the mistake names the sizes that can be."""

import pytest

from embark.errors import DataError, SpecError
from embark.model.steps import num_steps_of, samples_per_rank, steps_per_epoch
from embark.spec import TrainSpec
from embark.spec.train import batch_mistakes, divides


def test_the_odd_rest_of_an_epoch_is_left_out():
    assert steps_per_epoch(109, 10) == 10


@pytest.mark.parametrize("num_steps", [0, 5])
def test_fewer_rows_than_a_batch_is_an_error_that_says_both_numbers(num_steps):
    with pytest.raises(DataError, match=r"9 rows.*train\.batch_size = 10"):
        num_steps_of(TrainSpec(batch_size=10, num_steps=num_steps), 9)


def test_a_run_is_as_long_as_its_steps_or_else_its_epochs():
    assert num_steps_of(TrainSpec(batch_size=10, num_epochs=3), 109) == 30
    assert num_steps_of(TrainSpec(batch_size=10, num_epochs=3, num_steps=7), 109) == 7


def test_a_batch_that_divides():
    assert divides(4096, 8)
    assert batch_mistakes(4096, 8) == []
    assert samples_per_rank(4096, 8) == 512


@pytest.mark.parametrize(("batch", "ranks", "fix"), [(1001, 8, "use 1000 or 1008"), (3, 8, "use 8")])
def test_a_batch_that_does_not_divide(batch, ranks, fix):
    (mistake,) = batch_mistakes(batch, ranks, "chips")
    assert mistake.field == "train.batch_size"
    assert mistake.what == f"does not divide over {ranks} chips"
    assert mistake.fix == fix
    with pytest.raises(SpecError, match=fix):
        samples_per_rank(batch, ranks)
