"""What is done to a rank before it begins."""

from __future__ import annotations

import time


def late(rank: int) -> None:
    """The second gets its batches late."""
    from embark.data.synthetic import SyntheticSource

    make = SyntheticSource.train_rows

    def slow(*words):
        time.sleep(0.6)
        return make(*words)

    if rank == 1:
        SyntheticSource.train_rows = slow
