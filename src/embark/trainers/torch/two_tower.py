"""Two towers over one `EmbeddingBagCollection`, trained by a softmax over the items of the global batch and sampled
ones; and the exact search over all items that evaluates them."""

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from embark.data import Batch, SampleSource
from embark.data.item_catalog import ItemCatalog, column_ids, read_item_catalog, with_negatives
from embark.errors import Mistake, SpecError
from embark.run.evaluation import NUM_BINS
from embark.run.retrieval_metrics import SUMS, ranking_metrics, ranking_sums
from embark.spec import RunSpec
from .batch import DeviceBatch, ToDevice
from .metrics import MetricWindow
from .model import ordered_values, tables_without_values
from .networks.rank_values import from_all_ranks, gathered
from .networks.two_tower import TwoTowerNetwork
from .world import World

_NO_CANDIDATE = -1e30  # Score of an item that is no candidate: not −∞, which times 0 is no number.
SCORES_AT_ONCE = 1 << 24  # Scores of users and items that the exact search holds at once.


def read_catalog(spec: RunSpec, source: SampleSource, world: World) -> ItemCatalog:
    """Read the items of the run's training data; every rank must call it."""
    return read_item_catalog(source, spec.model, rank=world.rank, num_ranks=world.world_size, gathered=world.gathered)


def negatives_adder(spec: RunSpec, catalog: ItemCatalog, world: World) -> Callable[[Batch, int], Batch] | None:
    """Return a function that puts this rank's part of a step's sampled negatives behind its samples, or None."""
    first, stop = _share(spec, world)
    if not spec.model.two_tower.num_sampled_negatives:
        return None

    def add(batch: Batch, step: int) -> Batch:
        drawn = catalog.negatives(spec.train.seed, step, first, stop)
        return with_negatives(batch, catalog.batch(drawn))

    return add


def _share(spec: RunSpec, world: World) -> tuple[int, int]:
    num, ranks = spec.model.two_tower.num_sampled_negatives, world.world_size
    if num % ranks:
        raise SpecError([Mistake("", "model.two_tower.num_sampled_negatives", str(num),
                                 f"does not divide over {ranks} ranks", f"use {-(-num // ranks) * ranks}")])
    each = num // ranks
    return world.rank * each, (world.rank + 1) * each


class TwoTowers(nn.Module):
    """Loss and rest in training, as a train pipeline wants them; in evaluation the vectors of users and items."""

    def __init__(self, spec: RunSpec, world: World, catalog: ItemCatalog, *, is_bf16: bool) -> None:
        super().__init__()
        self.tables = tables_without_values(spec.model.stored_tables(), spec.train)
        self.dense = TwoTowerNetwork(spec.model).to(world.device)
        self.softmax = CandidateSoftmax(self.dense, spec, world, catalog, is_bf16=is_bf16)

    def forward(self, batch: DeviceBatch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        found: tuple[Tensor, tuple[Tensor, Tensor, Tensor]] = self.softmax(
            batch.dense, self.tables(batch.sparse), batch.sparse, batch.label)
        return found


class CandidateSoftmax(nn.Module):
    """Scores each positive against the items of all positives of the global batch and all sampled negatives.

    A module of its own, which the train pipeline does not trace into.
    """

    def __init__(
        self, network: TwoTowerNetwork, spec: RunSpec, world: World, catalog: ItemCatalog, *, is_bf16: bool
    ) -> None:
        super().__init__()
        two = spec.model.two_tower
        first, stop = _share(spec, world)
        self._names, self._item = [t.name for t in spec.model.table_list()], two.item
        self._before = sum(t.multi_hot for t in spec.model.table_list()[: self._names.index(two.item)])
        self._network = [network]  # A list hides its weights, which are those of the model.
        self._num_negatives, self._temperature = stop - first, two.temperature
        expected = catalog.expected_counts(spec.train.batch_size, two.num_sampled_negatives)
        # No buffer: it follows from the data, and no checkpoint holds it.
        self._log_expected = torch.from_numpy(np.log(np.maximum(expected, 1e-30)) * two.logq).to(world.device)
        self._embedding_l2, self._is_bf16, self._device_type = spec.train.embedding_l2, is_bf16, world.device.type

    def forward(
        self, dense: Tensor, looked_up: KeyedTensor, sparse: KeyedJaggedTensor, label: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Return, in training, the minimized value, and a tuple of the loss, the losses of this rank's samples, and a
        mask of the positives."""
        pooled = ordered_values(looked_up, self._names)
        with torch.autocast(self._device_type, torch.bfloat16, enabled=self._is_bf16):
            user = self._network[0].user_vectors(dense, pooled)
            item = self._network[0].item_vectors(dense, pooled)
        if not self.training:
            return user, (user, item, label)
        loss, losses, is_positive = self.losses(user, item, sparse[self._item].values(), label)
        minimized = loss
        if self._embedding_l2:
            minimized = loss + self._embedding_l2 / 2 * pooled.float().square().sum(dim=1).mean()
        return minimized, (loss.detach(), losses.detach(), is_positive)

    def losses_of_all(
        self, user: Tensor, item: Tensor, every_id: Tensor, label: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what `losses` does, given the ids of all features, each with room for as many as it may have. An id
        outside its table, which the lookup reports, is taken for the last one."""
        ids = every_id[self._before * len(label) : (self._before + 1) * len(label)]
        return self.losses(user, item, ids.clamp(max=len(self._log_expected) - 1), label)

    def losses(self, user: Tensor, item: Tensor, ids: Tensor, label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return first a loss whose mean over the ranks is the loss of the global batch."""
        num_samples = len(label) - self._num_negatives
        is_positive = label[:num_samples] > 0.5
        is_candidate = torch.cat([is_positive, torch.ones_like(label[num_samples:], dtype=torch.bool)])
        vectors, every_id, every_candidate = from_all_ranks(item), gathered(ids), gathered(is_candidate)
        # Few passes over all pairs of samples and candidates, which take the time of a step.
        added = torch.where(every_candidate, -self._log_expected[every_id.long()], _NO_CANDIDATE)
        logits = torch.addmm(added.float(), user[:num_samples].float() / self._temperature, vectors.float().T)
        samples = torch.arange(num_samples, device=label.device)
        own = samples + dist.get_rank() * len(label)
        # The sample's own item is the answer; the same item elsewhere is no negative.
        is_left_out = every_id[None, :] == ids[:num_samples, None]
        is_left_out.scatter_(1, own[:, None], False)  # not by an index, for which the host would wait
        logits = torch.where(is_left_out, float("-inf"), logits)
        losses = torch.nn.functional.cross_entropy(logits, own, reduction="none") * is_positive
        num_positives = gathered(is_positive).sum().clamp(min=1)
        return losses.sum() * (dist.get_world_size() / num_positives), losses, is_positive.float()


class SoftmaxWindow(MetricWindow):
    """Losses since the last `take`, in the state that every window has."""

    @torch.no_grad()
    def accumulate(self, logits: Tensor, label: Tensor) -> None:
        """Count samples: `logits` are their losses, and `label` says which of them are positives."""
        loss, positives = logits.double().sum(), label.double().sum()
        self._sums += torch.stack([loss, torch.zeros_like(loss), positives])

    def take(self, world: World) -> dict[str, float]:
        loss, _, positives, samples = self.state(world)[2 * NUM_BINS :].tolist()
        self.clear()
        return {"log_loss": loss / positives if positives else float("nan"), "num_samples": samples}


class RetrievalEvaluator:
    """Searches for the held-out items of each user among all items."""

    def __init__(self, model: DistributedModelParallel, spec: RunSpec, world: World, catalog: ItemCatalog) -> None:
        self._model, self._world, self._catalog, self._two = model, world, catalog, spec.model.two_tower
        names = [t.name for t in spec.model.table_list()]
        self._to_device = ToDevice(names, world.device)
        self._item, self._user = names.index(self._two.item), names.index(self._two.user) if self._two.user else None
        self._batch_size = spec.train.batch_size // world.world_size
        self._vectors: list[Tensor] = []
        self._held_out: list[NDArray[np.int64]] = []  # Batch, user, item, index among this rank's vectors.
        self._num_batches = self._num_vectors = 0

    def eval_source(self, source: SampleSource) -> SampleSource:
        return source

    def batch_size(self, of_training: int) -> int:
        return of_training

    def add(self, batch: Batch) -> None:
        user, _ = self._vectors_of(batch)
        num = batch.num_samples
        places = self._num_vectors + np.arange(num)
        order = np.full(num, self._num_batches * self._world.world_size + self._world.rank)
        if self._user is None:
            # Numbers that no two samples have, on any rank.
            users = order * self._batch_size + np.arange(num)
        else:
            users = column_ids(batch, self._user)[:num].astype(np.int64)
        held = np.stack([order, users, column_ids(batch, self._item)[:num], places]).astype(np.int64)
        is_positive = batch.label[:num] > 0.5
        self._held_out.append(held[:, is_positive])
        self._vectors.append(user[:num])
        self._num_batches += 1
        self._num_vectors += num

    def metrics(self) -> dict[str, float]:
        """Return the metrics over all ranks, which must all call it.

        A user is searched for by the rank that has its first sample.
        """
        items, k = self._item_vectors(), self._two.eval_k
        held = np.concatenate([*self._held_out, np.empty((4, 0), np.int64)], axis=1)
        every = np.concatenate([np.concatenate([part, np.full((1, part.shape[1]), rank)])
                                for rank, part in enumerate(self._world.gathered(held))], axis=1)
        every = every[:, np.lexsort((every[3], every[0], every[1]))]  # by user, and those in the order of the data
        starts = np.flatnonzero(np.diff(every[1], prepend=np.iinfo(np.int64).min))
        relevant = np.split(every[2], starts[1:]) if len(starts) else []
        mine = [number for number, start in enumerate(starts) if every[4, start] == self._world.rank]
        vectors = torch.cat(self._vectors) if self._vectors else items[:0]
        sums = np.zeros(len(SUMS))
        at_once = max(1, SCORES_AT_ONCE // max(1, len(items)))
        for first in range(0, len(mine), at_once):
            some = mine[first : first + at_once]
            seen = [self._seen(int(every[1, starts[number]])) for number in some]
            top = exact_search(vectors[torch.from_numpy(every[3, starts[some]]).to(vectors.device)], items, k, seen)
            wanted = [np.setdiff1d(relevant[number], self._catalog.ids[own])
                      for number, own in zip(some, seen, strict=True)]
            sums += ranking_sums(np.where(top >= 0, self._catalog.ids[top], -1), wanted)
        total = self._world.sum_over_ranks(torch.from_numpy(sums).to(self._world.device))
        return {**ranking_metrics(total.cpu().numpy(), k), "num_samples": float(every.shape[1])}

    def _seen(self, user: int) -> NDArray[np.int64]:
        if self._user is None or not self._two.exclude_seen:
            return np.empty(0, np.int64)
        return self._catalog.seen_by(user)

    def _vectors_of(self, batch: Batch) -> tuple[Tensor, Tensor]:
        _, (user, item, _) = self._model(self._to_device(batch).to(self._world.device, non_blocking=True))
        return user, item

    def _item_vectors(self) -> Tensor:
        """Return the vectors of all items on every rank; each computes its share, in as many batches as any other."""
        num, ranks = len(self._catalog), self._world.world_size
        found = []
        for start in range(0, num, self._batch_size * ranks):
            first = start + self._world.rank * self._batch_size
            which = np.minimum(np.arange(first, first + self._batch_size), num - 1)
            found.append(gathered(self._vectors_of(self._catalog.batch(which))[1]))
        return torch.cat(found)[:num]


@torch.no_grad()
def exact_search(users: Tensor, items: Tensor, k: int, left_out: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return `[users, k]`: positions of the items with the largest dot products, best first, without those left out.

    Rows are filled up with −1 where there are fewer.
    """
    scores = users @ items.T
    rows = np.repeat(np.arange(len(users)), [len(one) for one in left_out])
    if len(rows):
        columns = np.concatenate(left_out)
        scores[torch.from_numpy(rows).to(scores.device), torch.from_numpy(columns).to(scores.device)] = float("-inf")
    values, found = scores.topk(min(k, len(items)), dim=1)
    found = found.masked_fill(values == float("-inf"), -1)
    return torch.nn.functional.pad(found, (0, k - found.shape[1]), value=-1).cpu().numpy()
