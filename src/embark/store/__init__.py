"""Object stores behind one interface, the run directory, checkpoints, retention, retries. May import spec and below."""

from embark.store.atomic_file import set_in_file, write_atomic
from embark.store.checkpoint_store import (
    Checkpoint,
    CheckpointStore,
    ChecksumWriter,
    FileChecksum,
    checkpoint_name,
    metric_of,
    reasons_by_spec,
)
from embark.store.object_store import Entry, ObjectStore, open_store
from embark.store.run_dir import RunDir, find_run, first_free_run, run_uri

__all__ = [
    "Checkpoint", "CheckpointStore", "ChecksumWriter", "Entry", "FileChecksum", "ObjectStore", "RunDir",
    "checkpoint_name", "find_run", "first_free_run", "metric_of", "open_store", "reasons_by_spec", "run_uri",
    "set_in_file", "write_atomic",
]
