"""What a run is: the sections of the TOML spec, presets, and explanations of mistakes. May import formatting and
errors."""

from embark.spec.data import DataSpec, PrepareSpec, moment
from embark.spec.features import FeaturesSpec, with_bucket_tables
from embark.spec.load import load_spec, parse_spec, resolve, set_in_text
from embark.spec.model import CANDIDATE, POOLED_KINDS, ModelSpec, StoredTable, Table
from embark.spec.paths import with_absolute_paths
from embark.spec.place import PlaceSpec
from embark.spec.run import RunSpec, StoreSpec, WatchSpec, accepting
from embark.spec.serve import DRAIN_S, PublishSpec
from embark.spec.stream import StreamSpec
from embark.spec.tasks import Task, label_columns, list_size_of, main_task
from embark.spec.toml import PRESETS, flatten, to_toml
from embark.spec.train import TrainSpec, batch_mistakes, divides, with_train_defaults
from embark.spec.two_tower import is_item_table
from embark.spec.user_code import file_of, user_error

__all__ = [
    "CANDIDATE", "DRAIN_S", "POOLED_KINDS", "PRESETS", "DataSpec", "FeaturesSpec", "ModelSpec", "PlaceSpec",
    "PrepareSpec", "PublishSpec", "RunSpec", "StoreSpec", "StoredTable", "StreamSpec", "Table", "Task", "TrainSpec",
    "WatchSpec", "accepting", "batch_mistakes", "divides", "file_of", "flatten", "is_item_table", "label_columns",
    "list_size_of", "load_spec", "main_task", "moment", "parse_spec", "resolve", "set_in_text", "to_toml",
    "user_error", "with_absolute_paths", "with_bucket_tables", "with_train_defaults"
]
