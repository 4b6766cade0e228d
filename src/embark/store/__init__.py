"""Where a run's bytes live."""

from embark.store.checkpoint_store import Checkpoint, CheckpointStore, FileMark, MarkedStore, checkpoint_name
from embark.store.object_store import Entry, ObjectStore, open_store
from embark.store.retention import Kept, metric_of, reasons_by_spec, to_delete
from embark.store.run_dir import RunDir, find_run, numbered, run_uri, write_atomic

__all__ = [
    "Checkpoint", "ObjectStore", "Entry", "FileMark", "Kept", "MarkedStore", "RunDir", "CheckpointStore", "checkpoint_name", "find_run",
    "metric_of", "numbered", "open_store", "reasons_by_spec", "run_uri", "to_delete", "write_atomic",
]
