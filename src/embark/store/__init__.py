"""Where a run's bytes live."""

from embark.store.door import Door, Entry, open_door
from embark.store.retention import Kept, to_delete
from embark.store.run_dir import RunDir, numbered, run_uri, write_whole
from embark.store.shelf import Checkpoint, FileMark, MarkedDoor, Shelf, checkpoint_name

__all__ = [
    "Checkpoint", "Door", "Entry", "FileMark", "Kept", "MarkedDoor", "RunDir", "Shelf", "checkpoint_name", "numbered",
    "open_door", "run_uri", "to_delete", "write_whole",
]
