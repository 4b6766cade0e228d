"""What is done to a rank before it begins."""

from __future__ import annotations

import time

from integration.faults.hooks import die_at_step


def late(rank: int) -> None:
    """The second gets its batches late."""
    from embark.data.synthetic import SyntheticSource

    make = SyntheticSource.train_rows

    def slow(*words):
        time.sleep(0.8)  # so long that a busy machine makes no other rank as late
        return make(*words)

    if rank == 1:
        SyntheticSource.train_rows = slow


def die_at_step_7(rank: int) -> None:
    """The first SIGKILLs itself, with the checkpoint of step 5 committed."""
    die_at_step(rank, 0, 7, "step-000000005/commit.json")
