"""The ids of dynamic tables at a checkpoint: an id map like those of prepared data, whose other values have row 0."""

import numpy as np
from numpy.typing import NDArray

from embark.data.dynamic_ids import FREE, MAP, table_key, unmixed
from embark.spec import RunSpec
from embark.store.checkpoint_arrays import CheckpointArrays

Maps = dict[str, tuple[NDArray[np.uint64], NDArray[np.int32]]]


def read_dynamic_maps(arrays: CheckpointArrays, spec: RunSpec) -> Maps:
    """By table: ids, rising, and their rows."""
    found: Maps = {}
    for table in spec.model.stored_tables():
        if table.is_dynamic:
            hashes, seen = (arrays.tensor(f"dynamic.{table.name}.{part}", (table.rows - 1,))
                            for part in ("hashes", "seen"))
            slots = np.flatnonzero(seen != FREE)
            ids = unmixed(hashes[slots], table_key(spec.train.seed, table.name, MAP)).view(np.uint64)
            order = np.argsort(ids)
            found[table.name] = ids[order], (slots + 1)[order].astype(np.int32)
    return found
