"""What a run is: the sections of the TOML spec, presets, and explanations of mistakes. May import formatting and
errors."""

from .data import DataSpec, PrepareSpec, moment
from .features import FeaturesSpec, with_bucket_tables
from .load import load_spec, parse_spec, resolve, set_in_text
from .model import CANDIDATE, POOLED_KINDS, ModelSpec, StoredTable, Table
from .paths import with_absolute_paths
from .place import PlaceSpec
from .run import RunSpec, StoreSpec, WatchSpec, accepting
from .serve import DRAIN_S, PublishSpec
from .stream import StreamSpec
from .tasks import Task, label_columns, list_size_of, main_task
from .toml import PRESETS, flatten, to_toml
from .train import TrainSpec, batch_mistakes, divides, with_train_defaults
from .two_tower import is_item_table
from .user_code import file_of, user_error

__all__ = [
    "CANDIDATE", "DRAIN_S", "POOLED_KINDS", "PRESETS", "DataSpec", "FeaturesSpec", "ModelSpec", "PlaceSpec",
    "PrepareSpec", "PublishSpec", "RunSpec", "StoreSpec", "StoredTable", "StreamSpec", "Table", "Task", "TrainSpec",
    "WatchSpec", "accepting", "batch_mistakes", "divides", "file_of", "flatten", "is_item_table", "label_columns",
    "list_size_of", "load_spec", "main_task", "moment", "parse_spec", "resolve", "set_in_text", "to_toml",
    "user_error", "with_absolute_paths", "with_bucket_tables", "with_train_defaults"
]
