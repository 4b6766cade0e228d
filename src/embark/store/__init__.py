"""Object stores behind one interface, the run directory, checkpoints, retention, retries. May import spec and below."""

from .atomic_file import commit, set_in_file, write_atomic
from .checkpoint_store import (
    Checkpoint,
    CheckpointStore,
    ChecksumWriter,
    FileChecksum,
    checkpoint_name,
    metric_of,
    reasons_by_spec,
)
from .errors import BRIEF_RETRY, NotFound, explain_data, writing
from .object_store import Entry, LocalStore, ObjectStore, for_each_parallel, normalize_path, open_store
from .run_dir import EVENTS, SPEC, RunDir, find_run, first_free_run, run_uri

__all__ = [
    "BRIEF_RETRY", "EVENTS", "SPEC", "Checkpoint", "CheckpointStore", "ChecksumWriter", "Entry", "FileChecksum",
    "LocalStore", "NotFound", "ObjectStore", "RunDir", "checkpoint_name", "commit", "explain_data", "find_run",
    "first_free_run", "for_each_parallel", "metric_of", "normalize_path", "open_store", "reasons_by_spec", "run_uri",
    "set_in_file", "write_atomic", "writing"
]
