"""The raw values of items, as an artifact has them: whole numbers, or text as one run of bytes with offsets."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from embark.data.kept_maps import find_id_maps
from embark.errors import DataError
from embark.features.arrays import Array, Mask
from embark.store.checkpoint_inspect import TrainedRun
from embark.values import frozen

NUMBERS, TEXT, OFFSETS = "value_numbers", "value_text", "value_offsets"


@frozen
class Values:
    """The raw values of items, indexed by id; None if the ids are the values."""

    by_id: Any  # An Arrow array with nulls, or None.

    def is_known(self, ids: Array) -> Mask:
        """Tell which ids stand for an item: ids of rare and missing values do not."""
        if self.by_id is None:
            return np.ones(len(ids), np.bool_)
        known: Mask = np.zeros(len(ids), np.bool_)
        inside = ids < len(self.by_id)
        known[inside] = np.asarray(self.by_id.is_valid())[ids[inside]]
        return known

    def arrays(self, ids: Array) -> dict[str, Array]:
        """Return the values of these items as arrays for a file."""
        if self.by_id is None:
            return {NUMBERS: ids.astype(np.int64)}
        import pyarrow as pa

        chosen = self.by_id.take(pa.array(ids))
        if pa.types.is_integer(chosen.type):
            return {NUMBERS: np.asarray(chosen).astype(np.int64)}
        text = [str(value).encode() for value in chosen.to_pylist()]
        return {TEXT: np.frombuffer(b"".join(text), np.uint8), OFFSETS: np.cumsum([0, *map(len, text)], dtype=np.int64)}


def item_values(trained: TrainedRun) -> Values:
    """Return the values of the item table, read from the run's data."""
    data, item = trained.spec.data, trained.spec.model.retrieved
    if data.kind not in ("prepared", "interactions"):
        return Values(None)
    from embark.data.export.id_values import read_values

    found = find_id_maps(trained.run_dir.uri, trained.spec, trained.fingerprint)
    if found.manifest is None and data.kind == "interactions":  # whose items are rows of the table
        return Values(None)
    if found.manifest is None:
        raise DataError(f"{data.path}: the values of the items cannot be read: {found.why}", found.fix)
    table = read_values(found.path, found.manifest, [item])[item]
    if table.values is None and not table.has_no_map:
        raise DataError(f"{data.path}: the values of the items cannot be read: {table.note}",
                        "put the files back that the data was prepared from")
    return Values(table.values)


class StoredValues:
    """Item values read back from an artifact."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._numbers, self._text, self._offsets = (arrays.get(name) for name in (NUMBERS, TEXT, OFFSETS))

    def like(self, value: Any) -> tuple[int | str, ...]:
        """Return the item that a value of a request stands for; empty if none of this type can."""
        if self._numbers is None:
            return (str(value),)
        try:
            return (int(value),)
        except (TypeError, ValueError, OverflowError):
            return ()

    def __getitem__(self, position: int) -> int | str:
        if self._numbers is not None:
            return int(self._numbers[position])
        assert self._text is not None
        assert self._offsets is not None
        return bytes(self._text[self._offsets[position] : self._offsets[position + 1]]).decode()
