"""Scores of an exported model by torch on a CPU, without TorchRec.

Tables stay mapped and in the bits they have; only the rows of a batch are ever read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from embark.data.loader import weights_in_sum
from embark.data.prepared import Rows
from embark.errors import DataError
from embark.export.artifact import DENSE, Artifact, ArtifactInfo
from embark.export.quantize import TableDtype, row_format
from embark.features.rows import NumberRows, RawRows
from embark.spec.model import CANDIDATE, ModelSpec, Table
from embark.spec.user_code import user_error
from embark.store.checkpoint_arrays import table_weight
from embark.trainers.torch.networks import dense_network
from embark.trainers.torch.networks.dlrm import DotNetwork
from embark.trainers.torch.networks.jagged import JaggedSequence
from embark.trainers.torch.networks.sequences import NextItem
from embark.trainers.torch.networks.task_heads import scores_of
from embark.trainers.torch.networks.two_tower import TwoTowerNetwork
from .cpu_layers import (
    MIN_ROWS,
    CandidateNetwork,
    faster,
    has_int8_products,
    padded,
    speed_up,
)


class ExportedModel:
    """The network of an artifact, in float32; where tables have fewer bits, wide layers are int8 if that is faster."""

    device, is_quick = "CPU", False

    def __init__(self, artifact: Artifact, model_file: str = "") -> None:
        """`model_file` is the code of a custom model."""
        info = artifact.info
        self._tasks = info.model.tasks
        self._encoder = artifact.encoder
        self._dense = load_network(artifact, artifact.model_with_code(model_file))
        try:
            self._open_tables(artifact)
        except KeyError as error:
            raise other_weights(artifact, error) from None
        self._candidates: CandidateNetwork | None = None
        if not info.model.is_custom:
            self._speed_up(info)

    def _speed_up(self, info: ArtifactInfo) -> None:
        is_int8, network = info.tables in ("int8", "int4") and has_int8_products(), self._dense
        layers = None
        # With fp32 tables scores are the trainer's to the last bit.
        if isinstance(network, DotNetwork) and not info.model.tasks and self._one_table is not None and \
                info.tables != "fp32" and isinstance(network.bottom, nn.Sequential):
            assert isinstance(network.top, nn.Sequential)
            layers = nn.Sequential(*network.bottom), network.top[0]
            speed_up(layers[0], is_int8=False)  # of one row, which it takes longer to round than to multiply
        speed_up(network, is_int8=is_int8)
        if layers and isinstance(network, DotNetwork) and isinstance(layers[1], nn.Linear):
            self._candidates = CandidateNetwork(network, *layers, lambda linear: faster(linear, is_int8=is_int8))

    def _open_tables(self, artifact: Artifact) -> None:
        positions, model = positions_of(artifact), artifact.info.model
        self._tables, self._is_weighted = model.table_list(), model.has_weighted_ids
        self._lookups = [(positions[table.name], lookup_of(artifact, table)) for table in self._tables]
        self._weight_positions = [positions.get(table.weights_feature) for table in self._tables]
        self._one_table = _one_table(artifact)

    def score(self, raw: RawRows) -> NDArray[np.float32]:
        """Return the probability of the label of each row; `raw` must be `readable`."""
        return self.score_encoded(self._encoder.encode(raw))

    def score_encoded(self, rows: Rows) -> NDArray[np.float32]:
        """Return the scores of rows with ids; with several tasks [rows, outputs of all]."""
        logits = self.logits(rows)
        scores: NDArray[np.float32] = (scores_of(self._tasks, logits) if self._tasks else logits.sigmoid()).numpy()
        return scores

    @torch.inference_mode()
    def logits(self, rows: Rows) -> Tensor:
        """Return logits [n], or with several tasks [n, outputs of all]."""
        if not len(rows):
            return torch.zeros((0, sum(task.num_outputs for task in self._tasks)) if self._tasks else 0)
        dense, pooled = self._inputs(rows)
        logits: Tensor = self._dense(padded(dense), padded(pooled))[: len(rows)]
        return logits

    def score_numbers(self, several: Sequence[NumberRows]) -> NDArray[np.float32]:
        """Return the scores of the rows of several requests, with ids.

        What only depends on the columns that all rows of a request share is computed once, unless the tables are fp32:
        that changes the last bits of a score.
        """
        others = [rows for rows in several if not self._is_of_user(rows)]
        found = self.score_encoded(NumberRows.join(others).to_rows()) if others else np.empty(0, np.float32)
        if len(others) == len(several):
            return found
        parts, at = [], 0
        for rows in several:
            if self._is_of_user(rows):
                parts.append(self._score_candidates(rows))
            else:
                parts.append(found[at : at + len(rows)])
                at += len(rows)
        return np.concatenate(parts)

    def _is_of_user(self, rows: NumberRows) -> bool:
        return self._candidates is not None and len(rows.dense) == 1 < len(rows) and \
            0 < len(rows.shared) < len(self._lookups)

    @torch.inference_mode()
    def _score_candidates(self, rows: NumberRows) -> NDArray[np.float32]:
        assert self._candidates is not None
        assert self._one_table is not None
        (look_up, first_rows), num_rows = self._one_table, len(rows)
        is_shared = np.zeros(len(rows.ids), np.bool_)
        is_shared[list(rows.shared)] = True
        tables = np.array([position for position, _ in self._lookups])
        user, own = np.flatnonzero(is_shared[tables]), np.flatnonzero(~is_shared[tables])
        own_ids = rows.ids[tables[own]].T + first_rows[own]
        ids = np.concatenate([rows.ids[tables[user], 0] + first_rows[user], own_ids.reshape(-1)])
        values = look_up(torch.from_numpy(ids), None)
        own_values = padded(values[len(user) :].reshape(num_rows, -1)).view(max(num_rows, MIN_ROWS), len(own), -1)
        logits = self._candidates.logits(torch.from_numpy(rows.dense), values[: len(user)], own_values,
                                         tuple(user.tolist()))
        scores: NDArray[np.float32] = logits[:num_rows].sigmoid().numpy()
        return scores

    @torch.inference_mode()
    def user_vectors(self, raw: RawRows) -> NDArray[np.float32]:
        """Return a retrieval model's vectors, [n, width], for at least one row."""
        assert isinstance(self._dense, TwoTowerNetwork)
        vectors: NDArray[np.float32] = self._dense.user_vectors(*self._inputs(self._encoder.encode(raw))).numpy()
        return vectors

    def _inputs(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return dense values, and the pooled rows of all tables."""
        dense = np.require(rows.dense, np.float32, ("C", "W"))  # torch warns of what it cannot write
        return torch.from_numpy(dense), self._pooled(rows)

    def _pooled(self, rows: Rows) -> Tensor:
        """Return the pooled rows, [n, values of all tables]."""
        if self._is_weighted:
            return torch.cat([self._weighted_sums(rows, table) for table in range(len(self._tables))], dim=1)
        if self._one_table is not None and all(
                lengths is None and ids.size == len(rows) for ids, lengths in zip(rows.ids, rows.lengths, strict=True)):
            look_up, first_rows = self._one_table
            ids = np.array([rows.ids[position].reshape(-1) for position, _ in self._lookups], np.int64).T + first_rows
            return look_up(torch.from_numpy(ids.reshape(-1)), None).reshape(len(rows), -1)
        pooled = []
        for position, look_up in self._lookups:
            ids = torch.from_numpy(rows.ids[position].reshape(-1).astype(np.int64))
            has_one_id = rows.lengths[position] is None and len(ids) == len(rows)
            pooled.append(look_up(ids, None if has_one_id else torch.from_numpy(_offsets(rows, position))))
        return torch.cat(pooled, dim=1)

    def _weighted_sums(self, rows: Rows, table: int) -> Tensor:
        """Sum rows by weights as training does, where one feature with weights makes all features have some."""
        (position, look_up), weight_position = self._lookups[table], self._weight_positions[table]
        ids, offsets = rows.ids[position].reshape(-1).astype(np.int64), _offsets(rows, position)
        weights = np.ones(len(ids), np.float32) if weight_position is None else rows.ids[weight_position]
        lengths = np.diff(offsets).astype(np.int32)
        weights = np.require(weights_in_sum(weights, lengths, self._tables[table]), np.float32, ("C", "W"))
        return look_up(torch.from_numpy(ids), torch.from_numpy(offsets), torch.from_numpy(weights))


def _one_table(artifact: Artifact) -> tuple[Lookup, NDArray[np.int64]] | None:
    """Return a lookup in all tables as one, and the row of it at which each begins: one lookup instead of many.

    None where their rows are not alike or do not lie one behind the other in the file.
    """
    tables = artifact.info.model.table_list()
    arrays = {array.ctypes.data: array for array in (weight_of(artifact, table) for table in tables)}
    first_rows, num_rows = {}, 0
    start = min(arrays)
    for address, array in sorted(arrays.items()):
        if array.strides != arrays[start].strides or address != start + num_rows * array.strides[0]:
            return None
        first_rows[address], num_rows = num_rows, num_rows + len(array)
    rows = np.lib.stride_tricks.as_strided(arrays[start], (num_rows, arrays[start].shape[1]))
    return Lookup(rows, artifact.info.tables, tables[0]), np.array(
        [first_rows[weight_of(artifact, table).ctypes.data] for table in tables])


def weight_of(artifact: Artifact, table: Table) -> NDArray[Any]:
    is_sequence = any(stored.is_sequence for stored in artifact.info.model.stored_tables()
                      if stored.name == table.weights)
    weight = artifact.weights[table_weight(table.weights, is_sequence=is_sequence).removeprefix("model.")]
    if weight.shape != (table.stored_rows, row_format(artifact.info.tables, table.dim or 0)[1]):
        raise KeyError(f"table {table.name} is {list(weight.shape)}")
    return weight


def shared_cores(num_callers: int) -> AbstractContextManager[None]:
    """Give each of `num_callers` threads that score at the same time its share of the cores: more threads than cores
    spin."""
    return num_threads(max(1, torch.get_num_threads() // num_callers))


@contextmanager
def num_threads(num: int) -> Iterator[None]:
    """Let torch compute with `num` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def load_network(artifact: Artifact, model: ModelSpec) -> nn.Module:
    """Load the dense network with its weights; `model` is the artifact's, with the code of a custom one."""
    try:
        network = dense_network(model).eval()
    except Exception as error:
        raise user_error(error) or error from None
    try:
        network.load_state_dict({name.removeprefix(DENSE): torch.from_numpy(values)
                                 for name, values in artifact.weights.items() if name.startswith(DENSE)})
    except RuntimeError as error:
        raise other_weights(artifact, error) from None
    return network


def other_weights(artifact: Artifact, why: object) -> DataError:
    """Return the error of an artifact whose two files do not belong together."""
    return DataError(f"{artifact.folder}: its weights are not those of its model: {why}", "export the run again")


def positions_of(artifact: Artifact) -> dict[str, int]:
    """Return the position of each feature among those of a row."""
    return {feature.name: position for position, feature in enumerate(artifact.info.rows.layout.features)}


def lookup_of(artifact: Artifact, table: Table) -> Lookup:
    """Return a function that looks up the rows of a feature's ids."""
    return Lookup(weight_of(artifact, table), artifact.info.tables, table)


class Lookup:
    """Looks up and pools the rows of a table, in the bits that they have."""

    def __init__(self, values: NDArray[Any], dtype: TableDtype, table: Table) -> None:
        self._weight, self._dtype = torch.from_numpy(values), dtype
        self._dim, self._is_mean = table.dim or 0, table.pooling == "mean"

    def __call__(self, ids: Tensor, offsets: Tensor | None, weights: Tensor | None = None) -> Tensor:
        """Return a vector for each bag; without `offsets` each id is one; with `weights` rows are summed by them."""
        is_mean = self._is_mean and weights is None
        if self._dtype in ("fp32", "fp16"):
            rows = self._weight.index_select(0, ids).float()
            return rows if offsets is None else embedding_bag(
                torch.arange(len(ids)), rows, offsets, mode="mean" if is_mean else "sum", per_sample_weights=weights,
                include_last_offset=True)
        dim, is_int8 = self._dim, self._dtype == "int8"
        if offsets is None and is_int8 and dim % 4 == 0 and not torch.backends.mkl.is_available():
            rows = self._weight.index_select(0, ids)  # in half the time of bags of one, which FBGEMM has no kernel for
            numbers = rows[:, dim:].view(torch.float32)
            return rows[:, :dim].float().mul_(numbers[:, :1]).add_(numbers[:, 1:])
        quantized = torch.ops.quantized
        add = quantized.embedding_bag_byte_rowwise_offsets if is_int8 else quantized.embedding_bag_4bit_rowwise_offsets
        bags = torch.arange(len(ids) + 1) if offsets is None else offsets
        sums: Tensor = add(self._weight, ids, bags, per_sample_weights=weights, include_last_offset=True)
        sums = sums[:, :dim]  # an odd number has one more
        return sums if offsets is None or not is_mean else sums / offsets.diff().clamp(min=1)[:, None]


class ExportedSequenceModel(ExportedModel):
    """Scores of DIN, SASRec, HSTU, or a custom model that takes sequences, whose rows are looked up one by
    one; and the vectors of histories for retrieval."""

    @torch.inference_mode()
    def user_vectors(self, raw: RawRows) -> NDArray[np.float32]:
        """Return the vectors of histories, [n, width]; zeros of one without a known item."""
        assert isinstance(self._dense, NextItem)
        _, sequences = self._looked_up(self._encoder.encode(raw))
        vectors: NDArray[np.float32] = self._dense.vectors(sequences).numpy()
        return vectors

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
        """Return logits [n]; for the next item, the log-odds of the candidate against some items, the same for all
        rows."""
        if not len(rows):
            return torch.zeros(0)
        dense = np.require(rows.dense, np.float32, ("C", "W"))  # torch warns of what it cannot write
        if isinstance(self._dense, NextItem):
            return self._of_candidates(self._dense, rows)
        pooled, sequences = self._looked_up(rows)
        logits: Tensor = self._dense(torch.from_numpy(dense), pooled, sequences)
        return logits

    def _of_candidates(self, network: NextItem, rows: Rows) -> Tensor:
        """Encode rows of the same history, as the candidates of a user have, once."""
        firsts, users = _distinct(rows, [position for table, position, _ in self._features if table.is_sequence])
        pooled, _ = self._looked_up(rows, of_sequences=False)
        _, sequences = self._looked_up(rows.select(firsts))
        return network.rank(sequences, pooled[CANDIDATE], torch.from_numpy(users), self._others)

    def _looked_up(
        self, rows: Rows, *, of_sequences: bool = True
    ) -> tuple[dict[str, Tensor], dict[str, JaggedSequence]]:
        """Return, by feature, one vector for each row, and sequences."""
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
    """Return where each row's ids begin, and the end."""
    lengths = rows.lengths[position]
    if lengths is None:
        return np.arange(len(rows) + 1) * (rows.ids[position].size // len(rows))
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def _distinct(rows: Rows, positions: Sequence[int]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return which rows are the first with their ids at `positions`, and which of these each row is like."""
    numbers: dict[tuple[bytes, ...], int] = {}
    flat = [(rows.ids[position].reshape(-1), _offsets(rows, position).tolist()) for position in positions]
    found = np.empty(len(rows), np.int64)
    is_first = np.zeros(len(rows), np.bool_)
    for row in range(len(rows)):
        key = tuple(ids[offsets[row] : offsets[row + 1]].tobytes() for ids, offsets in flat)
        is_first[row] = key not in numbers
        found[row] = numbers.setdefault(key, len(numbers))
    return is_first, found
