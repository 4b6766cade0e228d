"""Recall@K, NDCG@K, Hit@K and MRR@K: their only definition.

A user's relevant items are the held-out ones. Recall@K: the share of them among the first K. NDCG@K: the sum of
1 / log2(rank + 1) of those among the first K, over the largest such sum. Hit@K: whether any is among the first K.
MRR@K: 1 / rank of the first of them, 0 behind K. Each is a mean over users with at least one relevant item.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from embark.features.arrays import Doubles

KS = (5, 10, 20, 50)
SUMS = ("recall_at_k", "ndcg_at_k", "hit_at_k", "num_users")


def ranking_sums(top: NDArray[np.integer], relevant: Sequence[NDArray[np.integer]]) -> Doubles:
    """Return the sums of `SUMS`. `top` is `[users, K]`, the best first and without repeats; −1 if there are fewer."""
    num_users, k = top.shape
    sums = np.zeros(len(SUMS))
    gains = 1 / np.log2(np.arange(k) + 2)
    best = np.concatenate([[0.0], np.cumsum(gains)])
    for user in range(num_users):
        wanted = np.unique(relevant[user])
        if not len(wanted):
            continue
        is_hit = np.isin(top[user], wanted)
        num_hits = int(is_hit.sum())
        sums += (num_hits / len(wanted), gains[is_hit].sum() / best[min(k, len(wanted))], num_hits > 0, 1)
    return sums


def sums_of_ranks(ranks: NDArray[np.integer], k: int) -> Doubles:
    """Return the sums of `SUMS` if each user has one relevant item, before which `ranks` [users] other candidates
    stand."""
    top = ranks[ranks < k]
    return np.array([len(top), (1 / np.log2(top + 2.0)).sum(), len(top), len(ranks)])


def metrics_of_ranks(ranks: NDArray[np.integer], num_candidates: float) -> dict[str, float]:
    """Return Hit, NDCG and MRR at each of `KS` of users with one relevant item each, and among how many candidates it
    was ranked."""
    found: dict[str, float] = {"num_users": len(ranks), "num_candidates": num_candidates}
    for k in KS:
        top, num_users = ranks[ranks < k], len(ranks) or np.nan
        found |= {f"hit_at_{k}": len(top) / num_users,
                  f"ndcg_at_{k}": float((1 / np.log2(top + 2.0)).sum() / num_users),
                  f"mrr_at_{k}": float((1 / (top + 1.0)).sum() / num_users)}
    return found


def ranking_metrics(sums: Doubles, k: int) -> dict[str, float]:
    """Turn the sums over all users into means; NaN without users."""
    num_users = float(sums[-1])
    means = sums[:-1] / num_users if num_users else np.full(len(SUMS) - 1, np.nan)
    return {**dict(zip(SUMS[:-1], means.tolist(), strict=True)), "num_users": num_users, "k": float(k)}
