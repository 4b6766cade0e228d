"""The held-out item of each user, ranked among all items of the log by one product with their rows at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from embark.data import Batch, SampleSource
from embark.data.loader import eval_range
from embark.features.arrays import Int32s, Int64s
from embark.run.evaluation import ratio
from embark.run.retrieval_metrics import metrics_of_ranks, ranking_metrics, sums_of_ranks
from embark.spec import ModelSpec
from .batch import DeviceBatch
from .world import World

TOP = 10  # The K of the metrics that early stopping may take.
ITEMS_AT_ONCE, USERS_AT_ONCE = 1 << 13, 1 << 16
SCORES_AT_ONCE = 1 << 22  # Scores of users and items that are in memory at once: few, so that it is used again.


@dataclass(frozen=True, slots=True)
class Pairs:
    """Some items of each user, as positions in the catalogue."""

    users: Int64s
    items: Int64s

    @staticmethod
    def of(lists: Sequence[tuple[Int32s, Int64s]], items: Int32s) -> Pairs:
        """Make pairs of ids, user by user, and how many each has, without those that are no item."""
        ids, lengths = (np.concatenate(parts) for parts in zip(*lists, strict=True))
        users, found = np.repeat(np.arange(len(lengths)), lengths), positions_of(ids, items)
        return Pairs(users[found >= 0], found[found >= 0])

    def select(self, chosen: Any) -> Pairs:
        return Pairs(self.users[chosen], self.items[chosen])


def positions_of(ids: Int32s, items: Int32s) -> Int64s:
    """Return where the ids are in the rising `items`; −1 for one that is not there."""
    found = np.minimum(np.searchsorted(items, ids), len(items) - 1)
    return np.where(items[found] == ids, found, -1)


@dataclass(frozen=True, slots=True)
class HeldOutUsers:
    """Users of one batch whose held-out items were not ranked yet."""

    vectors: Tensor  # [n, dim + 1]: the last column is the score of the held-out item.
    targets: Int32s  # [n]: the held-out items.
    seen: tuple[Int32s, Int64s]  # What each chose before, one user behind the other, and how many.
    negatives: tuple[Int32s, Int64s]


class NextItemEvaluator:
    """Ranks the held-out items among all items, among those that the user had not chosen before, and among the sampled
    negatives that the source gives. A tie counts against the held-out item, and so does NaN: a model that scores
    everything alike has found nothing."""

    def __init__(
        self, model: DistributedModelParallel, spec: ModelSpec, world: World,
        to_device: Callable[[Batch], DeviceBatch], items: Int32s,
    ) -> None:
        self._model, self._world, self._to_device, self._items = model, world, to_device, items
        names, roles = [table.name for table in spec.table_list()], spec.sequence
        self._history, self._negatives = names.index(roles.history), names.index(roles.negatives)
        self._name, self._num_features = roles.history, len(names)
        self._main = "unseen_items" if roles.exclude_seen else "all_items"
        self._waiting: list[HeldOutUsers] = []
        self._num_batches = self._batch_size = self._num_negatives = 0
        self._sums = np.zeros(2)  # Of the log losses, and of the shares of the candidates that are ranked behind.
        self._ranks: dict[str, list[Int64s]] = {"all_items": [], "unseen_items": [], "sampled_negatives": []}

    def eval_source(self, source: SampleSource) -> SampleSource:
        self._source = source
        return source

    def batch_size(self, of_training: int) -> int:
        self._batch_size = of_training
        return of_training

    def add(self, batch: Batch) -> None:
        _, (_, vectors, _) = self._model(self._to_device(batch).to(self._world.device, non_blocking=True))
        start, stop = eval_range(self._num_batches, self._source.num_eval_samples, self._batch_size, self._world.rank,
                                 self._world.world_size)
        self._num_batches += 1
        num, ids, lengths = stop - start, batch.by_feature(batch.ids), batch.lengths.astype(np.int64)
        history, negatives = ((ids[feature][: of_each.sum()], of_each) for feature in (self._history, self._negatives)
                              for of_each in (lengths[feature, :num],))
        ends = np.cumsum(history[1])
        find_seen = getattr(self._source, "eval_seen", None)
        seen = find_seen(start, stop) if find_seen and num else (np.delete(history[0], ends - 1), history[1] - 1)
        self._waiting.append(HeldOutUsers(vectors[:num], history[0][ends - 1], seen, negatives))
        if len(self._waiting) * len(batch.label) >= USERS_AT_ONCE:
            self._rank()

    def metrics(self) -> dict[str, Any]:
        """Return the metrics over all ranks, which must all call it.

        The AUC is the mean share of the other candidates that are ranked behind, and the log loss that of a softmax
        over all items.
        """
        if self._waiting:
            self._rank()
        loss, behind = np.sum(self._world.gathered(self._sums), axis=0)
        ranks = {name: np.concatenate([one for of_rank in self._world.gathered(found) for one in of_rank])
                 for name, found in self._ranks.items()}
        num_samples, main, num_items = len(ranks["all_items"]), ranks[self._main], len(self._items)
        candidates = {"all_items": num_items, "unseen_items": num_items, "sampled_negatives": self._num_negatives + 1}
        return {
            "auc": ratio(behind, len(main)), "log_loss": ratio(loss, num_samples),
            "normalized_entropy": math.nan, "calibration": math.nan, "num_samples": float(num_samples),
            **ranking_metrics(sums_of_ranks(main, TOP), TOP),
            "rankings": {name: metrics_of_ranks(found, candidates[name]) for name, found in ranks.items()
                         if candidates[name] > 1},
        }

    @torch.no_grad()
    def _rank(self) -> None:
        """Rank the items of the users that wait; every rank must call it."""
        users, items = self._waiting, self._items
        self._waiting = []
        vectors = torch.cat([one.vectors for one in users])
        targets = positions_of(np.concatenate([one.targets for one in users]), items)
        seen, negatives = (Pairs.of(lists, items)
                           for lists in ([one.seen for one in users], [one.negatives for one in users]))
        is_repeat = np.zeros(len(targets), np.bool_)
        is_repeat[seen.users[seen.items == targets[seen.users]]] = True
        seen = Pairs(*np.unique([seen.users, seen.items], axis=1)) if len(seen.users) else seen
        ahead, log_sums = self._count_ahead(vectors, targets, (seen, negatives))
        every, of_seen, of_negatives = ahead
        is_known = targets >= 0
        every[~is_known] = len(items)  # an item that training does not know is found by nobody
        self._num_negatives = max([self._num_negatives, *(int(one.negatives[1].max(initial=0)) for one in users)])
        num_others = len(items) - 1 - np.bincount(seen.users, minlength=len(every))
        ranks = {"all_items": every, "unseen_items": (every - of_seen)[~is_repeat],
                 "sampled_negatives": np.where(is_known, of_negatives, self._num_negatives)}
        num_others = num_others[~is_repeat] if self._main == "unseen_items" else np.full(len(every), len(items) - 1)
        losses = (log_sums - vectors[:, -1].double().cpu().numpy())[is_known]
        self._sums += losses.sum(), (1 - np.minimum(ranks[self._main] / np.maximum(num_others, 1), 1)).sum()
        for name, found in ranks.items():
            self._ranks[name].append(found)

    def _count_ahead(
        self, vectors: Tensor, targets: Int64s, pairs: Sequence[Pairs]
    ) -> tuple[Int64s, NDArray[np.float64]]:
        """Return [1 + pairs, n]: how many of all items, and of each of `pairs`, are before the held-out one; and the
        logarithm of the sum of all items' exponentiated scores, [n]."""
        num, device = len(vectors), vectors.device
        ahead = torch.zeros(1 + len(pairs), num, dtype=torch.long, device=device)
        log_sums = torch.full((num,), -math.inf, dtype=torch.float64, device=device)
        own = Pairs(np.arange(num), targets)
        for first in range(0, len(self._items), ITEMS_AT_ONCE):
            rows = self._rows(self._items[first : first + ITEMS_AT_ONCE])
            at_once = max(1, SCORES_AT_ONCE // len(rows))
            for start in range(0, num, at_once):
                some = slice(start, start + at_once)

                def indices(of: Pairs, low: int = first, start: int = start, num_rows: int = len(rows),
                            at_once: int = at_once) -> tuple[Tensor, Tensor]:
                    """Return those of this block, as indices of it."""
                    high = start + at_once
                    inside = slice(*np.searchsorted(of.users, (start, high)))
                    of = of.select(inside)
                    of = of.select((of.items >= low) & (of.items < low + num_rows))
                    return torch.from_numpy(of.users - start).to(device), torch.from_numpy(of.items - low).to(device)

                scores = product(vectors[some, :-1], rows)
                log_sums[some] = torch.logaddexp(log_sums[some], scores.logsumexp(dim=1).double())
                is_ahead = ~(scores < vectors[some, -1:])
                is_ahead[indices(own)] = False
                ahead[0, some] += is_ahead.sum(dim=1)
                for number, of in enumerate(pairs, 1):
                    users, items = indices(of)
                    ahead[number, some].index_add_(0, users, is_ahead[users, items].long())
        return ahead.cpu().numpy(), log_sums.cpu().numpy()

    def _rows(self, ids: Int32s) -> Tensor:
        """Look up the rows of items, [n, dim], on every rank."""
        lengths = np.zeros((self._num_features, 1), np.int32)
        lengths[self._history] = len(ids)
        batch = Batch(np.zeros((1, 0), np.float32), ids, lengths, np.ones(1, np.float32), is_fixed=False)
        sparse = self._to_device(batch).sparse.to(self._world.device)
        rows: Tensor = dict(self._model.module.sequences(sparse).items())[self._name].values()
        return rows.float()


def product(users: Tensor, rows: Tensor) -> Tensor:
    """Return the scores [users, rows] in fp32: those of TF32 or bf16 tie."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        return users @ rows.T
    finally:
        torch.set_float32_matmul_precision(before)
