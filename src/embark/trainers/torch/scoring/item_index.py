"""The item index of an exported retrieval model: the vectors of all items, by the item tower or as rows of the table of
the history, and faiss to search them.

Built with the checkpoint's own weights; how much of an exact search's answer it finds is measured before it is
written.
"""

from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from embark.data import Batch, open_source
from embark.data.item_catalog import next_items, read_item_catalog
from embark.errors import DataError, MissingPackage
from embark.export.artifact import DENSE, ItemIndexInfo
from embark.export.item_values import Values, item_values
from embark.export.safetensors_file import TensorSource, in_memory
from embark.features.arrays import Int32s
from embark.spec.model import ModelSpec
from embark.store.checkpoint_arrays import CheckpointArrays, table_weight
from embark.store.checkpoint_inspect import TrainedRun
from embark.trainers.torch.networks.jagged import JaggedSequence
from embark.trainers.torch.networks.sequences import NextItem
from embark.trainers.torch.networks.two_tower import TwoTowerNetwork

MIN_RECALL = 0.95
EXACT_UP_TO = 4_096  # Items; so few are searched one by one.
NUM_QUERIES = 1_000
NEXT_ITEM_K = 20  # Items of a model of the next item whose share in the index's answers is measured.
ITEMS_AT_ONCE = 65_536
_READ_BYTES = 32 << 20
_LINKS, _BUILD_WIDTH, _SEARCH_WIDTHS = 32, 200, (64, 128, 256, 512, 1024, 2048, 4096)  # HNSW's parameters.
Floats = NDArray[np.float32]
Network = TypeVar("Network", bound=nn.Module)


def build_item_index(trained: TrainedRun, arrays: CheckpointArrays) -> tuple[ItemIndexInfo, list[TensorSource]]:
    """Return what the artifact says of the index, and its tensors. Reads the run's data once, for the items there are.
    """
    faiss, model = require_faiss(), trained.spec.model
    source = open_source(trained.spec)
    values = item_values(trained)
    num = min(NUM_QUERIES, source.num_eval_samples or source.num_train_samples)
    samples = source.eval_rows(0, num) if source.num_eval_samples else source.train_rows(0, 0, num)
    if model.is_next_item:
        ids = _known(next_items(source, model), values, model)
        table = model.feature(model.retrieved)
        vectors = _rows(arrays, table_weight(table.weights, is_sequence=True), ids, table.dim or 0).numpy()
        queries, k = _next_item_vectors(model, arrays, samples), min(NEXT_ITEM_K, len(ids))
    else:
        catalog = read_item_catalog(source, model)
        ids, network = _known(catalog.ids, values, model), _network(TwoTowerNetwork(model), arrays)
        chosen = np.searchsorted(catalog.ids, ids)
        vectors = np.concatenate([_vectors(network, model, arrays, catalog.batch(chosen[start : start + ITEMS_AT_ONCE]))
                                  [1] for start in range(0, len(chosen), ITEMS_AT_ONCE)])
        queries, k = _vectors(network, model, arrays, samples)[0], min(model.two_tower.eval_k, len(ids))
    index, kind, recall = _index(faiss, vectors, queries, k)
    tensors = [in_memory("ids", ids), *_value_tensors(values, ids), in_memory("index", faiss.serialize_index(index))]
    return ItemIndexInfo(num_items=len(ids), kind=kind, k=k, recall=recall, num_queries=num), tensors


def _known(ids: Int32s, values: Values, model: ModelSpec) -> Int32s:
    """Return the items that have a value."""
    known = ids[values.is_known(ids)]
    if not len(known):
        raise DataError(f"no item of table {model.retrieved} has a known value", "check the run's data")
    return known


def require_faiss() -> ModuleType:
    """Import faiss, or raise with the command that installs it."""
    try:
        import faiss
    except ModuleNotFoundError:
        raise MissingPackage("the item index of a retrieval model needs faiss, which is not installed",
                             "pip install 'embark-rec[retrieval]'") from None
    module: ModuleType = faiss
    return module


def _value_tensors(values: Values, ids: NDArray[np.int32]) -> list[TensorSource]:
    return [in_memory(name, array) for name, array in values.arrays(ids).items()]


def _index(faiss: Any, vectors: Floats, queries: Floats, k: int) -> tuple[Any, str, float]:
    """Return the index, its kind, and its recall: the share of the exact search's `k` items that it finds too."""
    exact = faiss.IndexFlatIP(vectors.shape[1])
    exact.add(vectors)
    if len(vectors) <= EXACT_UP_TO:
        return exact, "exact", 1.0
    wanted = exact.search(queries, k)[1]
    index = faiss.IndexHNSWFlat(vectors.shape[1], _LINKS, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = _BUILD_WIDTH
    index.add(vectors)
    for width in _SEARCH_WIDTHS:
        index.hnsw.efSearch = width
        recall = recall_of(index.search(queries, k)[1], wanted)
        if recall >= MIN_RECALL:
            return index, f"hnsw, efSearch {width}", recall
    return exact, "exact", 1.0


def recall_of(found: NDArray[np.int64], wanted: NDArray[np.int64]) -> float:
    """Return the share of `wanted`, `[queries, k]`, that is among `found` for the same query."""
    return float(np.mean([np.isin(one, other).mean() for one, other in zip(wanted, found, strict=True)]))


def _network(network: Network, arrays: CheckpointArrays) -> Network:
    """Load the weights of a network."""
    network.load_state_dict({name: torch.from_numpy(arrays.tensor(f"model.{DENSE}{name}", tuple(value.shape)))
                             for name, value in network.state_dict().items()})
    return network.eval()


@torch.inference_mode()
def _next_item_vectors(model: ModelSpec, arrays: CheckpointArrays, batch: Batch) -> Floats:
    """Return the vectors of samples' histories, without the last item of each."""
    sequences, ids = dict[str, JaggedSequence](), batch.by_feature(batch.ids)
    for number, table in enumerate(model.table_list()):
        if table.name != model.sequence.negatives:
            distinct, places = np.unique(ids[number], return_inverse=True)
            values = torch.from_numpy(ids[number].astype(np.int64)) if not table.lookup else _rows(
                arrays, table_weight(table.weights, is_sequence=True), distinct, table.dim or 0)[places]
            offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(batch.lengths[number], dtype=np.int64)]))
            sequences[table.name] = JaggedSequence(values, offsets, torch.from_numpy(ids[number]))
    network = _network(NextItem(model), arrays)
    found: Floats = network(torch.empty(0), {}, sequences)[:, :-1].numpy()
    return found


@torch.inference_mode()
def _vectors(
    network: TwoTowerNetwork, model: ModelSpec, arrays: CheckpointArrays, batch: Batch
) -> tuple[Floats, Floats]:
    """Return the vectors of the users and of the items of samples."""
    pooled, start = [], 0
    for table, lengths in zip(model.table_list(), batch.lengths, strict=True):
        ids = batch.ids[start : start + int(lengths.sum())]
        start += len(ids)
        distinct, places = np.unique(ids, return_inverse=True)
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))
        rows = _rows(arrays, table_weight(table.weights), distinct, table.dim or 0)
        pooled.append(embedding_bag(torch.from_numpy(places.astype(np.int64)), rows, offsets, mode=table.pooling,
                                    include_last_offset=True))
    dense, together = torch.from_numpy(np.require(batch.dense, np.float32, ("C", "W"))), torch.cat(pooled, dim=1)
    return network.user_vectors(dense, together).numpy(), network.item_vectors(dense, together).numpy()


def _rows(arrays: CheckpointArrays, name: str, ids: NDArray[np.int32], dim: int) -> Tensor:
    """Return rows of a table by rising id; it is read in pieces, and only those rows are kept."""
    found = np.zeros((max(1, len(ids)), dim), np.float32)
    at_once = max(1, _READ_BYTES // (4 * dim))
    for start in range(0, arrays.entry(name).size[0], at_once):
        low, high = np.searchsorted(ids, (start, start + at_once))
        if low < high:
            stop = int(ids[high - 1]) + 1
            found[low:high] = arrays.rows(name, start, stop)[ids[low:high] - start]
    return torch.from_numpy(found)
