"""Raw batches to tensors, on the device they lie on: views and casts, the same kernels for every batch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from embark.data.prepared.layout import Field, Layout

_DTYPES = {"uint8": torch.uint8, "uint16": torch.uint16, "int32": torch.int32, "float16": torch.float16,
           "float32": torch.float32}


class RawDecoder:
    """Batches of `num_rows` rows of one layout, for a model that takes the features `names` in this order.

    Shapes and kernels are fixed and nothing waits for the device, so `decode` can be captured in a CUDA graph: one
    cast for each group of columns, one gather where the groups' order is not the model's, one cast of the label.
    """

    def __init__(
        self, layout: Layout, names: Sequence[str], num_rows: int, device: torch.device, num_batches: int = 1
    ) -> None:
        if not layout.is_fixed:
            raise ValueError("there are no raw batches where rows have different numbers of ids")
        where = layout.map(num_batches * num_rows)
        self.size_bytes: int = where.size_bytes
        """Of `num_batches` batches, which lie together."""
        self._num_rows = num_rows
        self._label, self._dense, self._groups = where.label, where.dense, where.groups
        # A feature of several ids is as many lines of `num_rows` ids, which lie together.
        stored = [member for group in layout.groups for member in group.members]
        lines, num_lines = {}, 0
        for member in stored:
            feature = layout.features[member]
            lines[feature.name] = range(num_lines, num_lines + feature.multi_hot)
            num_lines += feature.multi_hot
        wanted = [line for name in names for line in lines[name]]
        self._num_lines = num_lines
        self._order = None if wanted == list(range(num_lines)) else torch.tensor(wanted, device=device)

    def decode(self, buffer: Tensor, number: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Of one of the batches: dense [B, D] in float32, ids in int32, feature by feature, and labels [B] in float32.

        Dense values that are stored as float32 stay in `buffer`: it must not be filled again while they are used.
        """
        rows = slice(number * self._num_rows, (number + 1) * self._num_rows)
        dense = _view(buffer, self._dense)[rows].to(torch.float32)
        label = _view(buffer, self._label)[rows].to(torch.float32)
        ids = torch.empty(self._num_lines * self._num_rows, dtype=torch.int32, device=buffer.device)
        start = 0
        for field in self._groups:
            group = _view(buffer, field)[:, rows]
            ids[start : start + group.numel()].view(group.shape).copy_(group)
            start += group.numel()
        if self._order is not None:
            ids = ids.view(self._num_lines, self._num_rows).index_select(0, self._order).view(-1)
        return dense, ids, label


def _view(buffer: Tensor, field: Field) -> Tensor:
    taken = buffer[field.start : field.start + field.size_bytes]
    return taken.view(_DTYPES[field.dtype.name]).view(field.shape)
