"""Scores by an exported model that reads sequences: rows are looked up one by one, as in training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embark.data.prepared import Rows
from embark.export.artifact import Artifact
from embark.spec.model import CANDIDATE
from embark.trainers.torch.exported_model import ExportedModel, lookup_of, positions_of
from embark.trainers.torch.jagged import JaggedSequence
from embark.trainers.torch.sequence_network import NextItem


class ExportedSequenceModel(ExportedModel):
    """DIN, SASRec, HSTU, or a model of the user's own that takes sequences."""

    def _open_tables(self, artifact: Artifact) -> None:
        positions, model = positions_of(artifact), artifact.info.model
        self._one_table = None
        self._features = [(table, positions[table.name], lookup_of(artifact, table) if table.lookup else None)
                          for table in model.scored_features()]
        if model.is_next_item:
            negatives = model.feature(model.sequence.negatives)
            # As many as a sample had in training, from all over the table.
            ids = np.linspace(0, negatives.rows - 1, negatives.multi_hot).astype(np.int64)
            self._others = lookup_of(artifact, negatives)(torch.from_numpy(ids), None)

    @torch.inference_mode()
    def logits(self, rows: Rows) -> Tensor:
        """[n]. Of the next item: the log-odds of the candidate against some items, the same for all rows."""
        if not len(rows):
            return torch.zeros(0)
        dense = np.require(rows.dense, np.float32, ("C", "W"))  # torch warns of what it cannot write
        if isinstance(self._dense, NextItem):
            return self._of_candidates(self._dense, rows)
        pooled, sequences = self._looked_up(rows)
        logits: Tensor = self._dense(torch.from_numpy(dense), pooled, sequences)
        return logits

    def _of_candidates(self, network: NextItem, rows: Rows) -> Tensor:
        """Rows of the same history, as the candidates of a user have, are encoded once."""
        firsts, users = _distinct(rows, [position for table, position, _ in self._features if table.is_sequence])
        pooled, _ = self._looked_up(rows, of_sequences=False)
        _, sequences = self._looked_up(rows.select(firsts))
        return network.rank(sequences, pooled[CANDIDATE], torch.from_numpy(users), self._others)

    def _looked_up(
        self, rows: Rows, *, of_sequences: bool = True
    ) -> tuple[dict[str, Tensor], dict[str, JaggedSequence]]:
        """By feature: one vector for each row, and sequences."""
        pooled, sequences = dict[str, Tensor](), dict[str, JaggedSequence]()
        for table, position, look_up in self._features:
            if table.is_sequence and not of_sequences:
                continue
            ids = torch.from_numpy(rows.ids[position].reshape(-1).astype(np.int64))
            offsets = torch.from_numpy(_offsets(rows, position))
            if not table.is_sequence and look_up is not None:
                pooled[table.name] = look_up(ids, None if len(ids) == len(rows) else offsets)
            else:
                sequences[table.name] = JaggedSequence(look_up(ids, None) if look_up else ids, offsets, ids)
        return pooled, sequences


def _offsets(rows: Rows, position: int) -> NDArray[np.int64]:
    """Where each row's ids begin, and the end."""
    lengths = rows.lengths[position]
    if lengths is None:
        return np.arange(len(rows) + 1) * (rows.ids[position].size // len(rows))
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def _distinct(rows: Rows, positions: Sequence[int]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Rows that are the first with their ids at `positions`, and of each row which of these it is like."""
    numbers: dict[tuple[bytes, ...], int] = {}
    flat = [(rows.ids[position].reshape(-1), _offsets(rows, position).tolist()) for position in positions]
    found = np.empty(len(rows), np.int64)
    is_first = np.zeros(len(rows), np.bool_)
    for row in range(len(rows)):
        key = tuple(ids[offsets[row] : offsets[row + 1]].tobytes() for ids, offsets in flat)
        is_first[row] = key not in numbers
        found[row] = numbers.setdefault(key, len(numbers))
    return is_first, found
