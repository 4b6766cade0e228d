"""The rules of the sharding search."""

import itertools

from embark.model.sharding import stride_ends


def test_strides_grow_from_one_step_to_all():
    ends = list(stride_ends(4_000, 12))
    assert ends[:3] == [1, 2, 3]
    assert ends[-1] == 4_000
    assert len(ends) < 24
    assert all(later > earlier for earlier, later in itertools.pairwise(ends))
    assert list(stride_ends(0, 12)) == []
