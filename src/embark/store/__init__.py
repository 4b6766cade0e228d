"""Where a run's bytes live."""

from embark.store.run_dir import (
    Checkpoint,
    RunDir,
    begin_checkpoint,
    commit_checkpoint,
    numbered,
    read_checkpoint,
    write_whole,
)

__all__ = [
    "Checkpoint", "RunDir", "begin_checkpoint", "commit_checkpoint", "numbered", "read_checkpoint", "write_whole",
]
