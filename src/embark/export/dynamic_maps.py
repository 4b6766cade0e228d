"""The ids of dynamic tables at a checkpoint: by slot, as `by_rising_key` takes them; other values have row 0."""

import numpy as np
from numpy.typing import NDArray

from embark.data.dynamic_ids import FREE, MAP, table_key, unmixed
from embark.spec import RunSpec
from embark.store.checkpoint_arrays import CheckpointArrays

Maps = dict[str, tuple[NDArray[np.uint64], NDArray[np.int32]]]


def read_dynamic_maps(arrays: CheckpointArrays, spec: RunSpec) -> Maps:
    """Return the id and the row of each slot, by table; both are 0 in a free slot."""
    found: Maps = {}
    for table in spec.model.stored_tables():
        if table.is_dynamic:
            hashes, seen = (arrays.tensor(f"dynamic.{table.name}.{part}", (table.rows - 1,))
                            for part in ("hashes", "seen"))
            ids = unmixed(hashes, table_key(spec.train.seed, table.name, MAP)).view(np.uint64)
            is_taken = seen != FREE
            found[table.name] = (np.where(is_taken, ids, np.uint64(0)),
                                 np.where(is_taken, np.arange(1, table.rows), 0).astype(np.int32))
    return found
