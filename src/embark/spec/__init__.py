"""What a run is: the sections of the TOML spec, presets, and explanations of mistakes. May import formatting and
errors."""

from embark.spec.data import DataSpec
from embark.spec.load import load_spec, parse_spec, resolve
from embark.spec.model import ModelSpec, StoredTable, Table
from embark.spec.place import PlaceSpec
from embark.spec.run import RunSpec, StoreSpec, WatchSpec
from embark.spec.tasks import Task
from embark.spec.toml import PRESETS, to_toml
from embark.spec.train import TrainSpec

__all__ = [
    "PRESETS", "DataSpec", "ModelSpec", "PlaceSpec", "RunSpec", "StoreSpec", "StoredTable", "Table", "Task",
    "TrainSpec", "WatchSpec", "load_spec", "parse_spec", "resolve", "to_toml",
]
