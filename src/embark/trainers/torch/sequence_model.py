"""Models that read sequences: tables whose rows are pooled, tables whose rows are not, and a network over both."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.fx
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, softplus
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from embark.spec import ModelSpec, StoredTable, TrainSpec
from embark.trainers.torch.batch import DeviceBatch
from embark.trainers.torch.jagged import JaggedSequence
from embark.trainers.torch.model import WithoutValues, data_type_of, tables_without_values
from embark.trainers.torch.own_model import OwnNetwork
from embark.trainers.torch.sequence_network import sequence_network


class SequenceRecommender(nn.Module):
    """As `Recommender`, with sequences. A table that some feature reads as a sequence is looked up row by row for all
    of its features."""

    def __init__(self, model: ModelSpec, train: TrainSpec, device: torch.device, *, is_bf16: bool) -> None:
        super().__init__()
        stored = model.stored_tables()
        pooled = [table for table in stored if not table.is_sequence]
        self.tables = tables_without_values(pooled, train) if pooled else None
        self.sequences = sequence_tables_without_values([table for table in stored if table.is_sequence], train)
        self.pooled_names = [feature.name for table in pooled for feature in table.features]
        self.unpooled = [(feature.name, feature.is_sequence, feature.lookup) for feature in model.table_list()
                         if feature.name not in self.pooled_names]
        self.dense = (OwnNetwork(model) if model.is_own else sequence_network(model)).to(device)
        self.is_next_item = model.is_next_item
        self.is_bf16, self.device_type = is_bf16, device.type

    def forward(self, batch: DeviceBatch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        pooled = self.tables(batch.sparse) if self.tables is not None else None
        rows = self.sequences(batch.sparse)
        by_name, sequences = network_inputs(pooled, self.pooled_names, rows, batch.sparse, self.unpooled)
        with torch.autocast(self.device_type, torch.bfloat16, enabled=self.is_bf16):
            logits = self.dense(batch.dense, by_name, sequences)
        return loss_and_predictions(logits, batch.label, self.is_next_item)


@torch.fx.wrap  # the train pipeline traces the model; a batch's features are known only when it runs
def network_inputs(
    pooled: KeyedTensor | None, pooled_names: list[str], rows: dict[str, JaggedTensor], ids: KeyedJaggedTensor,
    unpooled: list[tuple[str, bool, bool]],
) -> tuple[dict[str, Tensor], dict[str, JaggedSequence]]:
    """By feature: one vector for each sample, and sequences. `unpooled`: name, whether it is a sequence, and whether it
    is looked up."""
    by_name = {name: pooled[name] for name in pooled_names} if pooled is not None else {}
    looked_up, sequences = dict(rows.items()), dict[str, JaggedSequence]()
    for name, is_sequence, is_looked_up in unpooled:
        own = ids[name]
        offsets = own.offsets()
        values = looked_up[name].values() if is_looked_up else own.values()
        if is_sequence:
            sequences[name] = JaggedSequence(values, offsets, own.values())
        elif len(values) == len(offsets) - 1:  # one id for each sample
            by_name[name] = values
        else:
            by_name[name] = torch.segment_reduce(values.float(), "sum", offsets=offsets, initial=0.0)
    return by_name, sequences


@torch.fx.wrap
def loss_and_predictions(
    logits: Tensor, label: Tensor, is_next_item: bool
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """What a train pipeline wants. Of the next item: in training the log-odds of each place, of which ranks have
    different numbers; each rank's loss is its share of the mean over all of them. In evaluation, the scores of all
    candidates."""
    logits = logits.float()
    if not is_next_item:
        loss = binary_cross_entropy_with_logits(logits, label)
    elif logits.ndim == 2:
        loss = cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=logits.device))
    else:
        label = torch.ones_like(logits)
        count = torch.tensor(float(len(logits)), device=logits.device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(count)
            count /= dist.get_world_size()
        loss = softplus(-logits).sum() / count.clamp(min=1)
    return loss, (loss.detach(), logits.detach(), label)


def sequence_tables_without_values(tables: Iterable[StoredTable], train: TrainSpec) -> EmbeddingCollection:
    """On `meta`: sharding gives each rank its part."""
    with WithoutValues():
        return EmbeddingCollection(tables=[
            EmbeddingConfig(name=table.name, embedding_dim=table.dim, num_embeddings=table.rows,
                            data_type=data_type_of(table, train),
                            feature_names=[feature.name for feature in table.features]) for table in tables
        ], device=torch.device("meta"))


def table_collections(model: ModelSpec, train: TrainSpec) -> nn.Module:
    """All tables of a model, on `meta`."""
    stored = model.stored_tables()
    pooled, sequences = [t for t in stored if not t.is_sequence], [t for t in stored if t.is_sequence]
    if not sequences:
        return tables_without_values(pooled, train)
    found: list[nn.Module] = [tables_without_values(pooled, train)] if pooled else []
    return nn.ModuleList([*found, sequence_tables_without_values(sequences, train)])
