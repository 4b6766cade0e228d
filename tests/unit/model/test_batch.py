"""A batch is shared equally by the ranks, or the mistake names the sizes that can be."""

import pytest

from embark.errors import SpecError
from embark.model.batch import batch_mistakes, divides, samples_per_rank


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
