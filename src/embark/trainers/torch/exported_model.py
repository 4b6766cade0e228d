"""Scores by an exported model: torch on a CPU, without TorchRec. Tables stay mapped and in the bits they have; only the
rows of a batch are ever read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding_bag

from embark.data.prepare.rows import RawRows
from embark.data.prepared import Rows
from embark.errors import DataError
from embark.export.artifact import DENSE, Artifact
from embark.export.quantize import row_format
from embark.spec.model import Table
from embark.spec.user_code import user_error
from embark.store.checkpoint_arrays import table_weight
from embark.trainers.torch.dense_network import dense_network
from embark.trainers.torch.task_heads import scores_of
from embark.trainers.torch.two_tower_network import TwoTowerNetwork

Lookup = Callable[[Tensor, Tensor | None], Tensor]  # Ids, and the offsets of the bags where not each has one.


class ExportedModel:
    """The network of an artifact, in float32."""

    def __init__(self, artifact: Artifact, model_file: str = "") -> None:
        """`model_file` is the code of a model of the user's own."""
        info = artifact.info
        self._tasks = info.model.tasks
        self._encoder = artifact.encoder
        model = artifact.model_with_code(model_file)
        try:
            self._dense = dense_network(model).eval()
        except Exception as error:
            raise user_error(error) or error from None
        try:
            self._dense.load_state_dict({name.removeprefix(DENSE): torch.from_numpy(values)
                                         for name, values in artifact.weights.items() if name.startswith(DENSE)})
            positions = {feature.name: i for i, feature in enumerate(info.rows.layout.features)}
            self._lookups = [(positions[table.name], _lookup(artifact, table))
                             for table in info.model.table_list()]
        except (KeyError, RuntimeError) as error:
            raise DataError(f"{artifact.folder}: its weights are not those of its model: {error}",
                            fix="export the run again") from None

    def score(self, raw: RawRows) -> NDArray[np.float32]:
        """The probability of the label of each row; `raw` must be `readable`."""
        return self.score_encoded(self._encoder.encode(raw))

    def score_encoded(self, rows: Rows) -> NDArray[np.float32]:
        """Of rows with ids; of several tasks [rows, outputs of all]."""
        logits = self.logits(rows)
        scores: NDArray[np.float32] = (scores_of(self._tasks, logits) if self._tasks else logits.sigmoid()).numpy()
        return scores

    @torch.inference_mode()
    def logits(self, rows: Rows) -> Tensor:
        """[n], or of several tasks [n, outputs of all]"""
        if not len(rows):
            return torch.zeros((0, sum(task.num_outputs for task in self._tasks)) if self._tasks else 0)
        logits: Tensor = self._dense(*self._inputs(rows))
        return logits

    @torch.inference_mode()
    def user_vectors(self, raw: RawRows) -> NDArray[np.float32]:
        """Of a retrieval model: [n, width], for at least one row."""
        assert isinstance(self._dense, TwoTowerNetwork)
        vectors: NDArray[np.float32] = self._dense.user_vectors(*self._inputs(self._encoder.encode(raw))).numpy()
        return vectors

    def _inputs(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Dense values, and the pooled rows of all tables."""
        pooled = []
        for position, look_up in self._lookups:
            ids = torch.from_numpy(rows.ids[position].reshape(-1).astype(np.int64))
            lengths = rows.lengths[position]
            if lengths is None and len(ids) == len(rows):
                pooled.append(look_up(ids, None))
                continue
            counts = np.full(len(rows), len(ids) // len(rows)) if lengths is None else lengths.astype(np.int64)
            pooled.append(look_up(ids, torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]))))
        dense = torch.from_numpy(np.require(rows.dense, np.float32, ("C", "W")))  # torch warns of what it cannot write
        return dense, torch.cat(pooled, dim=1)


def _lookup(artifact: Artifact, table: Table) -> Lookup:
    weight = torch.from_numpy(artifact.weights[table_weight(table.weights).removeprefix("model.")])
    dtype, dim = artifact.info.tables, table.dim or 0
    if weight.shape != (table.rows, row_format(dtype, dim)[1]):
        raise KeyError(f"table {table.name} is {list(weight.shape)}")

    def look_up(ids: Tensor, offsets: Tensor | None) -> Tensor:
        rows = weight.index_select(0, ids).float()
        if offsets is None:
            return rows
        return embedding_bag(torch.arange(len(ids)), rows, offsets, mode=table.pooling, include_last_offset=True)

    def look_up_quantized(ids: Tensor, offsets: Tensor | None) -> Tensor:
        quantized = torch.ops.quantized
        add = quantized.embedding_bag_byte_rowwise_offsets if dtype == "int8" else \
            quantized.embedding_bag_4bit_rowwise_offsets
        every = torch.arange(len(ids) + 1) if offsets is None else offsets
        sums: Tensor = add(weight, ids, every, include_last_offset=True)[:, :dim]  # an odd number has one more
        return sums / every.diff().clamp(min=1)[:, None] if table.pooling == "mean" else sums

    return look_up if dtype in ("fp32", "fp16") else look_up_quantized
