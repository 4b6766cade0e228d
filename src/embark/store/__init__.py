"""Where a run's bytes live."""

from embark.store.door import Door, Entry, open_door
from embark.store.retention import Kept, metric_of, reasons_by_spec, to_delete
from embark.store.run_dir import RunDir, find_run, numbered, run_uri, write_whole
from embark.store.shelf import Checkpoint, FileMark, MarkedDoor, Shelf, checkpoint_name

__all__ = [
    "Checkpoint", "Door", "Entry", "FileMark", "Kept", "MarkedDoor", "RunDir", "Shelf", "checkpoint_name", "find_run",
    "metric_of", "numbered", "open_door", "reasons_by_spec", "run_uri", "to_delete", "write_whole",
]
